"""How long a whole job still takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KINDS = {  # of work, by the first word of a phase's name; others are of their own
    "importance": "products", "statistics": "products", "gradient": "products",
    "score": "products", "evaluate": "products",
}  # fmt: skip
START = "start"  # waits rather than computes: its pace tells nothing of other work, and theirs nothing of it


class Ahead(NamedTuple):
    """A phase that is to come, with its planned seconds over all layers.

    Attributes:
        of: whose work it is, where phases of one kind are not alike: the methods of a sweep's point.
    """

    phase: str
    seconds: float
    of: str = ""

    @property
    def kind(self) -> str:
        """Phases of one kind go at one pace."""
        word = self.phase.partition(" ")[0]
        return f"{KINDS.get(word, word)} {self.of}".rstrip()


class Outlook:
    """The phases that a job will go through, with planned seconds, held against what the phases before took.

    What counts is how the planned seconds compare: a machine that takes ten times as long as planned for the passes
    makes those to come ten times longer, and with them all of another kind, until one of these has been seen.
    """

    def __init__(self, planned: Sequence[Ahead] = (), layers: int = 1) -> None:
        """`planned`: in their order, each over all `layers`; none: nothing can be told."""
        self.planned = tuple(planned)
        self.layers = layers
        self.at: int | None = None  # the phase that runs
        self.begun = 0  # phases up to here have begun
        self.part = 1.0
        self.seen: dict[str, tuple[float, float]] = {}  # kind -> seconds taken, and foreseen

    def begin(self, phase: str, layers: int | None = None) -> None:
        """A phase begins: so many layers of it, where it has layers and some are done already.

        One that is not ahead but has been comes again, with what came behind it.
        """
        names = [ahead.phase for ahead in self.planned]
        if layers != 0 and phase in names[: self.begun] and phase not in names[self.begun :]:
            first = self.begun - 1 - names[: self.begun][::-1].index(phase)
            again = self.planned[first : self.begun]
            self.planned = (*self.planned[: self.begun], *again, *self.planned[self.begun :])
            names = [ahead.phase for ahead in self.planned]
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
        running, before = self.planned[self.at], self.seen
        rest, seen = spent / share * (1 - share), self._with(spent, share)
        if (pace := _pace(before, running)) is not None:
            # Its first units may not be like the others: what they tell weighs as much as is done.
            foreseen = running.seconds * self.part * (1 - share)
            rest = share * rest + (1 - share) * foreseen * pace
            if running.kind not in before and running.seconds:
                seen[running.kind] = (spent + rest, running.seconds * self.part)
        later = 0.0
        for ahead in self.planned[self.begun :]:
            if (pace := _pace(seen, ahead)) is None:
                return None
            later += ahead.seconds * pace
        return rest + later

    def _with(self, seconds: float, share: float) -> dict[str, tuple[float, float]]:
        """What was seen, and a share of the running phase besides."""
        assert self.at is not None
        ahead = self.planned[self.at]
        taken, foreseen = self.seen.get(ahead.kind, (0.0, 0.0))
        return {**self.seen, ahead.kind: (taken + seconds, foreseen + ahead.seconds * self.part * share)}


def _pace(seen: dict[str, tuple[float, float]], ahead: Ahead) -> float | None:
    """Seconds taken for each foreseen: of its kind, else of all that computes; None where nothing was seen."""
    working = [amounts for kind, amounts in seen.items() if kind != START]
    overall = sum(taken for taken, _ in working), sum(foreseen for _, foreseen in working)
    for taken, foreseen in (seen.get(ahead.kind, (0.0, 0.0)), overall):
        if foreseen:
            return taken / foreseen
    return None
