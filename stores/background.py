"""Calls that go on in a thread while the caller computes, in order, and never far behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class Background:
    """Makes calls one after another in a thread of its own.

    What they raise, the caller is told at the next call or at the end. Use in a `with` block, which waits for all of
    them, or call `finish` and `close`.
    """

    def __init__(self, ahead: int = 2) -> None:
        """`ahead`: calls that may wait or run when `submit` returns: what they hold is held so many times."""
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")
        self._pending: deque[Future[Any]] = deque()

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        """Has it called, after those before it; waits while too many are under way. Raises what one of these raised."""
        self._pending.append(self._thread.submit(call, *arguments))
        while len(self._pending) > self._ahead:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Waits for all calls. Raises what the first that failed raised."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drops the calls that have not begun, waits for the one that has, and ends the thread."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()
