"""The end of a command whose output goes into a pipe, such as to `head`, that nobody reads any more."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

READER_LEFT = 128 + signal.SIGPIPE  # as shells report it of other programs


def until_reader_leaves(body: Callable[[], int]) -> int:
    """Return the exit code of a body that prints: `READER_LEFT` if the reader of its pipe has left.

    The rest of the output is discarded. Otherwise Python would print it at its end, and report that it cannot.
    """
    try:
        return body()
    except BrokenPipeError:
        with suppress(io.UnsupportedOperation):  # no file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT


def flushed(code: int) -> int:
    """Print what is buffered, and return the exit code. Raises OSError."""
    print(end="", flush=True)
    return code
