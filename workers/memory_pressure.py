"""Handles kills by Ray's memory monitor: determines whose memory caused one, and pauses the restart of workers."""

from __future__ import annotations

import re
import time

LONGEST_PAUSE_SECONDS = 60.0
SIZE = r"([0-9.]+) ?([KMGT]?)B"
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def others_hold_most(message: str) -> bool:
    """Return True if Ray's message shows that the killed worker held less than half of the memory in use."""
    used = re.search(rf"was {SIZE} used /", message)
    selected = message.partition("Selected to kill")[2]
    own = max((_bytes(*size) for size in re.findall(rf"actual memory used={SIZE}", selected)), default=0.0)
    return used is None or own < _bytes(*used.groups()) / 2


def _bytes(number: str, unit: str) -> float:
    return float(number) * float(1024 ** POWERS[unit])


class Pause:
    """Pauses the start of workers; each pause is twice as long as the last, until a unit succeeds."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        """`first_s`: length of the first pause. `limit_s`: the longest total of pauses without a successful unit."""
        self.first_s = first_s
        self.limit_s = limit_s
        self.since: float | None = None
        self.seconds = self.until = 0.0

    def begin(self) -> bool:
        """Start the next pause unless one is active. Return True if the limit is reached."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if not self.is_active():
            self.seconds = min(2 * self.seconds or self.first_s, LONGEST_PAUSE_SECONDS)
            self.until = now + self.seconds
        return now - self.since >= self.limit_s

    def is_active(self) -> bool:
        """Return True while no worker may start."""
        return time.monotonic() < self.until

    def end(self) -> None:
        """Reset the pauses after a unit has succeeded."""
        self.since = None
        self.seconds = self.until = 0.0
