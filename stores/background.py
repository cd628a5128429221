"""Runs calls in order in a background thread, with a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self


class Background:
    """Runs calls one after another in a thread of its own.

    An exception in a call is raised by a later `submit` or by `finish`. Use it in a `with` block, which waits for all
    calls, or call `finish` and `close`.
    """

    def __init__(self, ahead: int = 2) -> None:
        """`ahead`: calls that may be pending when `submit` returns; their arguments stay in memory."""
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")
        self._pending: deque[Future[Any]] = deque()

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        """Queue a call; waits while too many are pending. Raises the exception of a call that failed."""
        self._pending.append(self._thread.submit(call, *arguments))
        while len(self._pending) > self._ahead:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait for all calls. Raises the exception of the first that failed."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Cancel the calls that have not begun, wait for the running one, and end the thread."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()
