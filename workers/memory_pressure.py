"""Ray's memory monitor ends workers, also for what other processes hold: whose fault it was, and how long to wait."""

from __future__ import annotations

import re
import time

LONGEST_PAUSE_SECONDS = 60.0
SIZE = r"([0-9.]+) ?([KMGT]?)B"
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def others_hold_most(message: str) -> bool:
    """Whether the worker that was ended held less than half of what was in use on its node, as Ray's message says."""
    used = re.search(rf"was {SIZE} used /", message)
    selected = message.partition("Selected to kill")[2]
    own = max((_bytes(*found) for found in re.findall(rf"actual memory used={SIZE}", selected)), default=0.0)
    return used is None or own < _bytes(*used.groups()) / 2


def _bytes(number: str, unit: str) -> float:
    return float(number) * float(1024 ** POWERS[unit])


class Pause:
    """No worker is started while it lasts: twice as long each time, until a unit is done."""

    def __init__(self, first_s: float, limit_s: float) -> None:
        """`limit_s`: for so long may pause follow pause."""
        self.first_s = first_s
        self.limit_s = limit_s
        self.since: float | None = None
        self.seconds = self.until = 0.0

    def begin(self) -> bool:
        """Starts the next one, unless one lasts. Returns whether the limit is reached."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if not self.lasts():
            self.seconds = min(2 * self.seconds or self.first_s, LONGEST_PAUSE_SECONDS)
            self.until = now + self.seconds
        return now - self.since >= self.limit_s

    def lasts(self) -> bool:
        """Whether it is too early to start a worker."""
        return time.monotonic() < self.until

    def end(self) -> None:
        """Memory was enough for a unit."""
        self.since = None
        self.seconds = self.until = 0.0
