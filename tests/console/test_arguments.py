"""How commands end."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from manifests.errors import (
    CorruptError,
    InputError,
    Interrupted,
    InUseError,
    LaminaError,
    LostInputError,
    NumericsError,
    StorageError,
    WorkerError,
)
from pipeline.console.arguments import parser, run_command
from pipeline.console.signals import catch_signals, deferred_signals, interrupt_on_signals


def run(error: BaseException | None, debug: bool = False, result: int = 0) -> int:
    def body(_: argparse.Namespace) -> int:
        if error is not None:
            raise error
        return result

    return run_command(body, argparse.Namespace(debug=debug))


@pytest.mark.parametrize(
    ("error", "code", "headline"),
    [
        (InputError("budget: bad"), 2, "wrong input: budget: bad"),
        (NumericsError("layer 3: NaN"), 2, "wrong input: layer 3: NaN"),
        (InUseError("held by 7"), 2, "wrong input: held by 7"),
        (Interrupted("stopped"), 75, "interrupted: stopped"),
        (StorageError("disk full"), 1, "failed: disk full"),
        (CorruptError("damaged", "staged/x"), 1, "failed: damaged"),
        (WorkerError("three died"), 1, "failed: three died"),
        (LostInputError("gone"), 1, "failed: gone"),
        (LaminaError("other"), 1, "failed: other"),
    ],
)
def test_errors_for_users(error: LaminaError, code: int, headline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(error) == code
    assert capsys.readouterr() == ("", headline + "\n")
    assert run(error, debug=True) == code
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith(headline + "\n")


@pytest.mark.parametrize(
    ("error", "code", "headline"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1, "failed: using /x/y: No space left on device"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "failed: standard output, or a connection or file without",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/x/y"), 2, "wrong input: using /x/y: File name too long"),
        (MemoryError(), 1, "failed: out of memory"),
    ],
)
def test_what_the_system_refuses(
    error: Exception, code: int, headline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(error) == code
    shown = capsys.readouterr().err
    assert shown.startswith(headline)
    assert "internal error" not in shown


def test_the_body_s_result_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None) == 0
    assert run(None, result=3) == 3
    assert capsys.readouterr() == ("", "")


def test_control_c_is_resumable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(KeyboardInterrupt()) == 75
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_after_a_signal_is_the_interruption(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """Native code that is interrupted while it is imported fails with an error of its own."""

    def body(_: argparse.Namespace) -> int:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None
        return 0

    assert run_command(body, argparse.Namespace(debug=False), interrupts=True) == 75
    assert "ImportError" not in capsys.readouterr().err


def test_letters_that_the_locale_lacks_end_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    assert run_command(lambda _: print("output: /für/out") or 0, argparse.Namespace(debug=False)) == 0
    assert printed.getvalue() == b"output: /f\\xfcr/out\n"


def test_an_internal_error_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ZeroDivisionError("by zero")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("internal error: ZeroDivisionError: by zero (")
    assert "test_arguments.py:" in shown
    assert "--debug shows more" in shown
    assert "Traceback" not in shown
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError("by zero"), debug=True)


def test_a_parser_knows_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser("plan", "Says what would be done.")
    assert made.prog == "python -m pipeline.plan"
    assert made.parse_args(["--debug"]).debug is True
    with pytest.raises(SystemExit) as ended:
        made.parse_args(["--help"])
    assert ended.value.code == 0
    assert "75 interrupted" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as ended:
        made.parse_args(["--unknown"])
    assert ended.value.code == 2


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_signals_set_the_event(name: signal.Signals) -> None:
    stop = threading.Event()
    catch_signals(stop)
    os.kill(os.getpid(), name)
    assert stop.wait(5)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_is_no_exception(name: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """A library that goes on after any error does not go on after a signal."""
    stop = threading.Event()
    interrupt_on_signals(stop)

    def body(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), name)
            time.sleep(5)
        except Exception:
            return 0
        return 0

    assert run_command(body, argparse.Namespace(debug=False)) == 75
    assert f"interrupted: stopped by {name.name}; run the same command again" in capsys.readouterr().err
    assert stop.is_set()


@pytest.mark.usefixtures("_handlers")
def test_a_signal_that_was_only_caught_interrupts_what_comes_next() -> None:
    """Between the last unit and the output, say, which may take minutes to copy."""
    stop = threading.Event()
    catch_signals(stop)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="run the same command again"):
        interrupt_on_signals(stop)


@pytest.mark.usefixtures("_handlers")
def test_deferred_signals() -> None:
    with deferred_signals(threading.Event()):
        pass
    with pytest.raises(InputError), deferred_signals(threading.Event()):
        raise InputError("no cluster")
    reached = []

    def go(error: InputError | None) -> None:
        with deferred_signals(threading.Event()):
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(error)
            if error:
                raise error

    for error in (None, InputError("no cluster")):
        with pytest.raises(Interrupted):
            go(error)
    assert len(reached) == 2
