"""Maps over threads, for work that releases Python's lock, such as reading files and hashing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = min(16, os.cpu_count() or 1)  # by default

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(function: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return `function` of each item, in order. With one thread, or one item, it runs in the caller's thread.

    Raises the exception of the first item that fails; items not begun by then are skipped.
    """
    listed = list(items)
    if threads == 1 or len(listed) < 2:
        return list(map(function, listed))
    with ThreadPoolExecutor(threads, thread_name_prefix="parallel-map") as pool:
        return list(pool.map(function, listed))


def parallel_imap(function: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> Iterator[R]:
    """Yield the results of `parallel_map` lazily: at most `threads` results are pending or waiting to be consumed."""
    if threads == 1:
        yield from map(function, items)
        return
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="parallel-map") as pool:
        try:
            for item in items:
                if len(pending) == threads:
                    yield pending.popleft().result()
                pending.append(pool.submit(function, item))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
