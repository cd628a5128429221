"""The exit code and the line of each kind of error."""

from __future__ import annotations

import errno
import os

import pytest

from manifests.errors import InputError, Interrupted, StorageError
from pipeline.console.exit_status import ending_of


def system_error(number: int, *names: str) -> OSError:
    return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("error", "code", "outcome", "line"),
    [
        (InputError("budget: 2"), 2, "failed", "wrong input: budget: 2"),
        (StorageError("a/b: full"), 1, "failed", "failed: a/b: full"),
        (Interrupted("stopped by SIGTERM"), 75, "interrupted", "interrupted: stopped by SIGTERM"),
        (KeyboardInterrupt(), 75, "interrupted", "interrupted: stopped; "),
        (MemoryError(), 1, "failed", "failed: out of memory; "),
        (system_error(errno.EPIPE), 1, "failed", "failed: standard output, or a connection"),
        (system_error(errno.ENOSPC, "x/y"), 1, "failed", "failed: using x/y: No space left"),
        (system_error(errno.ENAMETOOLONG, "x" * 9), 2, "failed", "wrong input: using xxxxxxxxx: File name too long"),
        (ZeroDivisionError("by zero"), 1, "failed", "internal error: ZeroDivisionError: by zero (nowhere)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_code_outcome_and_line(error: BaseException, code: int, outcome: str, line: str) -> None:
    ending = ending_of(error)
    assert (ending.exit_code, ending.outcome) == (code, outcome)
    assert ending.line.startswith(line)


def test_an_internal_error_names_its_line() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        ending = ending_of(error)
    assert ending.where is not None
    assert f"({__file__}:" in ending.line
