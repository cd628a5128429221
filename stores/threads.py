"""The same done of several things at a time, by threads: for what leaves Python's lock, as files and digests do."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = min(16, os.cpu_count() or 1)  # of what nobody says otherwise of

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(take: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """`take` of each, in their order. Raises what the first that fails raises; what is not begun by then never is. One
    thread is the caller's own."""
    if threads == 1:
        return list(map(take, items))
    with ThreadPoolExecutor(threads, thread_name_prefix="side-by-side") as pool:
        return list(pool.map(take, items))


def parallel_imap(take: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> Iterator[R]:
    """The same, as they are asked for: as many are begun or wait as there are threads."""
    if threads == 1:
        yield from map(take, items)
        return
    begun: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="side-by-side") as pool:
        try:
            for item in items:
                if len(begun) == threads:
                    yield begun.popleft().result()
                begun.append(pool.submit(take, item))
            while begun:
                yield begun.popleft().result()
        finally:
            for left in begun:
                left.cancel()
