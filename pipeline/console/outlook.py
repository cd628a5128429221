"""How long a whole job still takes."""

from __future__ import annotations

from collections.abc import Sequence


class Outlook:
    """The phases that a job will go through, with planned seconds, held against what the phases before took.

    What counts is how the planned seconds of the phases compare: a machine ten times slower than planned makes all that
    comes ten times longer.
    """

    def __init__(self, planned: Sequence[tuple[str, float]] = (), layers: int = 1) -> None:
        """`planned`: (phase, seconds) in their order, each over all `layers`; without any, nothing is told."""
        self.planned = tuple(planned)
        self.layers = layers
        self.at: int | None = None  # the phase that runs
        self.begun = 0  # phases up to here have begun
        self.part = 1.0
        self.taken_s = self.foreseen_s = 0.0

    def begin(self, phase: str, layers: int | None = None) -> None:
        """A phase begins: so many layers of it, where it has layers and some are done already."""
        names = [name for name, _ in self.planned]
        self.at = names.index(phase, self.begun) if phase in names[self.begun :] else None
        self.begun = self.begun if self.at is None else self.at + 1
        self.part = 1.0 if layers is None else layers / self.layers

    def end(self, seconds: float) -> None:
        """It took so long."""
        if self.at is not None:
            self.taken_s += seconds
            self.foreseen_s += self.planned[self.at][1] * self.part
            self.at = None

    def left(self, spent: float, share: float) -> float | None:
        """Seconds to the end of the job, when the running phase is done to a `share` after `spent` seconds.

        None where nothing can be told: a phase that was not planned, or none of it done.
        """
        if self.at is None or share <= 0:
            return None
        foreseen = self.foreseen_s + self.planned[self.at][1] * self.part * share
        later = sum(seconds for _, seconds in self.planned[self.begun :])
        if later and not foreseen:
            return None
        return spent / share * (1 - share) + (later * (self.taken_s + spent) / foreseen if later else 0.0)
