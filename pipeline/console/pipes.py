"""Ends a command quietly when the reader of its output has left, as `head` does."""

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

    Discards the rest of the output. Python would try to print it when it exits, and report an error.
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
