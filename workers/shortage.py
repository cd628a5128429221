"""Reports that a job has fewer workers than it needs, and ends the job if no more can start."""

from __future__ import annotations

import time
from collections.abc import Callable

from manifests.errors import WorkerError

WARNING_SECONDS = 50.0  # before the first message about a shortage, and between messages


class Shortage:
    """Measures how long too few workers have been ready."""

    def __init__(self, limit_s: float, note: Callable[[str], None]) -> None:
        """`limit_s`: how long to wait for resources that the cluster lacks (`workers.start_timeout_s`)."""
        self.limit_s = limit_s
        self.note = note
        self.since: float | None = None
        self.warned_at = 0.0

    def watch(self, ready: int, needed: int, never: Callable[[], str | None], cluster: Callable[[], str]) -> None:
        """Compare the number of ready workers with the needed number.

        `never`: returns why no worker can start, or None. `cluster`: describes the cluster's resources.
        Raises WorkerError after `limit_s` if no worker can start.
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
