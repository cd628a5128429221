"""When there are fewer workers than a job needs to go on: it is said now and then, and ends when it will stay so."""

from __future__ import annotations

import time
from collections.abc import Callable

from manifests.errors import WorkerError

WARNING_SECONDS = 50.0  # from the start of a shortage, and between one line and the next


class Shortage:
    """One watch over the number of ready workers; it begins anew whenever there were enough."""

    def __init__(self, limit_s: float, note: Callable[[str], None]) -> None:
        """`limit_s`: how long to wait for what no node has and nobody adds (`workers.start_timeout_s`)."""
        self.limit_s = limit_s
        self.note = note
        self.since: float | None = None
        self.warned_at = 0.0

    def watch(self, ready: int, needed: int, never: Callable[[], str | None], cluster: Callable[[], str]) -> None:
        """Takes in how many are ready. `never`: why no worker will come, if so; `cluster`: what there is, in words.

        Raises WorkerError when none will come, after `limit_s`.
        """
        now = time.monotonic()
        if ready >= needed:
            self.since = None
            return
        if self.since is None:
            self.since = self.warned_at = now
        waited_s = now - self.since
        if now - self.warned_at < WARNING_SECONDS and waited_s < self.limit_s:
            return
        reason = never()
        if reason and waited_s >= self.limit_s:
            raise WorkerError(f"{reason}; waited {waited_s:.0f} s (workers.start_timeout_s)")
        if now - self.warned_at >= WARNING_SECONDS:
            self.warned_at = now
            self.note(f"waiting for {needed} workers, {ready} are ready: {reason or cluster()}")
