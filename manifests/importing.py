"""Imports of many modules without Python's looks for unreachable cycles among what they make."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """In here nothing is collected, and what is there at the end is never looked at again.

    Modules stay: the collector goes through their hundreds of thousands of objects time and again, for an eighth of the
    seconds that torch and transformers take to import, and once more whenever it runs in full.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()
