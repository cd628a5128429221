"""SIGTERM and SIGINT end a command with exit code 75, whatever it does. This module imports nothing slow."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from manifests.errors import Interrupted, LaminaError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESUME = "run the same command again to resume"


def exit_on_signals() -> None:
    """Make signals exit at once, for the seconds in which torch and Ray are imported.

    While Python shuts down, signals are ignored, so that the exit code of the finished command stays.
    """
    atexit.register(_ignore_signals)  # registered first, it is called last

    def _leave(*_: object) -> None:
        print(f"interrupted; {RESUME}", file=sys.stderr, flush=True)
        os._exit(Interrupted.exit_code)

    for name in STOP_SIGNALS:
        signal.signal(name, _leave)


def interrupt_on_signals(stop: threading.Event) -> None:
    """Make signals raise KeyboardInterrupt in the main thread: every write survives an interruption anywhere.

    `except Exception` does not catch it. `stop` is set, too, as Python drops exceptions of callbacks. The second signal
    exits at once. Raises Interrupted if a signal was caught before.
    """

    def _interrupt(number: int, _: object) -> None:
        _exit_if_set(stop)
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    for name in STOP_SIGNALS:
        signal.signal(name, _interrupt)
    if stop.is_set():
        raise Interrupted(f"stopped by a signal; {RESUME}")


@contextmanager
def deferred_signals(stop: threading.Event) -> Iterator[None]:
    """Defer signals to the end of the block, even if it raises: an interrupted start of Ray would crash the process.

    Signals stay caught (`catch_signals`) afterwards. Raises Interrupted at the end if a signal came.
    """
    catch_signals(stop)
    try:
        yield
    except LaminaError:
        if not stop.is_set():
            raise
    catch_signals(stop)  # again, as Ray's core has replaced the handlers,
    signal.alarm(0)  # and would abort the process three seconds after SIGTERM
    if stop.is_set():
        raise Interrupted(f"stopped by a signal; {RESUME}")


def catch_signals(stop: threading.Event) -> None:
    """Make signals set `stop`, which the pool notices between units; the second signal exits at once."""

    def _request_stop(number: int, _: object) -> None:
        _exit_if_set(stop)
        name = signal.Signals(number).name
        line = f"{name}: stopping; running work is abandoned, committed work stays; repeat it to exit at once\n"
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())  # print might be interrupted

    for name in STOP_SIGNALS:
        signal.signal(name, _request_stop)


@contextmanager
def interrupting(stop: threading.Event) -> Iterator[None]:
    """Make signals raise KeyboardInterrupt in the block (`interrupt_on_signals`), and catch them again after it."""
    interrupt_on_signals(stop)
    try:
        yield
    finally:
        catch_signals(stop)


def _ignore_signals() -> None:
    for name in STOP_SIGNALS:
        signal.signal(name, signal.SIG_IGN)


def _exit_if_set(stop: threading.Event) -> None:
    if stop.is_set():
        os._exit(Interrupted.exit_code)
    stop.set()
