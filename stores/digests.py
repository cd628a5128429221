"""Digests of many files or tensors, taken side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = min(16, os.cpu_count() or 1)  # OpenSSL takes digests outside Python's lock

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(take: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`take` of each, in their order. Raises what the first that fails raises; what is not begun by then never is."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        return list(pool.map(take, items))
