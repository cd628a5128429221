"""SIGTERM and SIGINT end a command with exit code 75, whatever it is doing. Imports nothing that takes time."""

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
GO_ON = "run the same command again to go on"


def exit_on_signals() -> None:
    """Exits at once: for the seconds in which torch and Ray are imported.

    Once everything is done, signals are ignored: Python's own end takes a moment, and has no exit code of its own.
    """
    atexit.register(_ignore_signals)  # the first one registered is the last one called

    def leave(*_: object) -> None:
        print(f"interrupted; {GO_ON}", file=sys.stderr, flush=True)
        os._exit(Interrupted.exit_code)

    for name in STOP_SIGNALS:
        signal.signal(name, leave)


def interrupt_on_signals(stop: threading.Event) -> None:
    """Raises KeyboardInterrupt where the main thread is: every write survives being cut off anywhere.

    Nothing catches that by accident, as `except Exception` would. `stop` is set, too, as Python drops what is raised in
    a callback. The second signal exits at once. Raises Interrupted when one came before, and was only caught.
    """

    def interrupt(number: int, _: object) -> None:
        _exit_if_set(stop)
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    for name in STOP_SIGNALS:
        signal.signal(name, interrupt)
    if stop.is_set():
        raise Interrupted(f"stopped by a signal; {GO_ON}")


@contextmanager
def deferred_signals(stop: threading.Event) -> Iterator[None]:
    """Within it, a signal waits for the end, also if that is an error: to cut Ray's start off crashes the process.

    Signals stay caught (`catch_signals`) afterwards. Raises Interrupted at the end if one came.
    """
    catch_signals(stop)
    try:
        yield
    except LaminaError:
        if not stop.is_set():
            raise
    catch_signals(stop)  # again: Ray's core has put its own in their place,
    signal.alarm(0)  # which would abort the process three seconds after SIGTERM
    if stop.is_set():
        raise Interrupted(f"stopped by a signal; {GO_ON}")


def catch_signals(stop: threading.Event) -> None:
    """Sets `stop`, for the pool to notice between units; the second signal exits at once."""

    def request_stop(number: int, _: object) -> None:
        _exit_if_set(stop)
        name = signal.Signals(number).name
        said = f"{name}: stopping; what is in hand is given up, what is committed stays; once more to end at once\n"
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())  # print might be interrupted

    for name in STOP_SIGNALS:
        signal.signal(name, request_stop)


@contextmanager
def interrupting(stop: threading.Event) -> Iterator[None]:
    """Within it, a signal raises KeyboardInterrupt (`interrupt_on_signals`); before and after, it is caught."""
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
