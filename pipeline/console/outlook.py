"""How long a whole job still takes."""

from __future__ import annotations

from collections.abc import Sequence

KINDS = {  # of work, by the first word of a phase's name; others are of their own
    "importance": "passes", "statistics": "passes", "gradient": "passes",
    "curves": "solves", "compress": "solves",
    "score": "scores", "evaluate": "scores",
}  # fmt: skip


class Outlook:
    """The phases that a job will go through, with planned seconds, held against what the phases before took.

    What counts is how the planned seconds compare: a machine that takes ten times as long as planned for the passes
    makes those to come ten times longer, and with them all of another kind, until one of these has been seen.
    """

    def __init__(self, planned: Sequence[tuple[str, float]] = (), layers: int = 1) -> None:
        """`planned`: (phase, seconds) in their order, each over all `layers`; none: nothing can be told."""
        self.planned = tuple(planned)
        self.layers = layers
        self.at: int | None = None  # the phase that runs
        self.begun = 0  # phases up to here have begun
        self.part = 1.0
        self.seen: dict[str, tuple[float, float]] = {}  # kind -> seconds taken, and foreseen

    def begin(self, phase: str, layers: int | None = None) -> None:
        """A phase begins: so many layers of it, where it has layers and some are done already."""
        names = [name for name, _ in self.planned]
        self.at = names.index(phase, self.begun) if phase in names[self.begun :] else None
        self.begun = self.begun if self.at is None else self.at + 1
        self.part = 1.0 if layers is None else layers / self.layers

    def end(self, seconds: float) -> None:
        """It took so long."""
        if self.at is not None:
            self.seen = self._with(seconds, 1.0)
            self.at = None

    def left(self, spent: float, share: float) -> float | None:
        """Seconds to the end of the job, when the running phase is done to a `share` after `spent` seconds.

        None where nothing can be told: a phase that was not planned, or none of it done.
        """
        if self.at is None or share <= 0:
            return None
        seen = self._with(spent, share)
        taken, foreseen = (sum(part) for part in zip(*seen.values(), strict=True))
        later = 0.0
        for name, seconds in self.planned[self.begun :]:
            of_kind = seen.get(_kind(name), (0.0, 0.0))
            if not (of_kind[1] or foreseen):
                return None
            later += seconds * (of_kind[0] / of_kind[1] if of_kind[1] else taken / foreseen)
        return spent / share * (1 - share) + later

    def _with(self, seconds: float, share: float) -> dict[str, tuple[float, float]]:
        """What was seen, and a share of the running phase besides."""
        assert self.at is not None
        name, planned = self.planned[self.at]
        taken, foreseen = self.seen.get(_kind(name), (0.0, 0.0))
        return {**self.seen, _kind(name): (taken + seconds, foreseen + planned * self.part * share)}


def _kind(phase: str) -> str:
    word = phase.partition(" ")[0]
    return KINDS.get(word, word)
