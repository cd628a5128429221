"""How long a whole job still takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
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
        layers: how many layers `seconds` is of; None: all of the model's.
    """

    phase: str
    seconds: float
    of: str = ""
    layers: int | None = None

    @property
    def kind(self) -> str:
        """Phases of one kind go at one pace."""
        word = self.phase.partition(" ")[0]
        return f"{KINDS.get(word, word)} {self.of}".rstrip()


Paces = Mapping[str, tuple[float, float]]  # kind of work -> seconds taken, and foreseen


def read_paces(value: object) -> Paces:
    """Returns what an earlier run stored as JSON, without entries that are no paces."""
    entries = value.items() if isinstance(value, dict) else ()
    return {str(kind): (float(pair[0]), float(pair[1])) for kind, pair in entries if _is_pace(pair)}


def _is_pace(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    return all(isinstance(amount, int | float) and math.isfinite(amount) and amount >= 0 for amount in pair)


class Outlook:
    """The phases that a job will go through, with planned seconds, held against what the phases before took.

    What counts is how the planned seconds compare: a machine that takes ten times as long as planned for the passes
    makes those to come ten times longer, and with them all of another kind, until one of these has been seen: in this
    run, or in an earlier one of the same job.
    """

    def __init__(self, planned: Sequence[Ahead] = (), layers: int = 1, earlier: Paces = MappingProxyType({})) -> None:
        """`planned`: what is left, in order; none: nothing can be told. `layers`: the model's. `earlier`: the paces
        that an earlier run stored."""
        self.planned = tuple(planned)
        self.layers = layers
        self.at: int | None = None  # the phase that runs
        self.begun = 0  # phases up to here have begun
        self.part = 1.0
        self.seen: dict[str, tuple[float, float]] = {}  # in this run
        self.earlier = earlier

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
        of = self.layers if self.at is None else self.planned[self.at].layers or self.layers
        self.part = 1.0 if layers is None else layers / of

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
        if (pace := self._pace(before, running)) is not None:
            # Its first units may not be like the others: what they tell weighs as much as is done.
            foreseen = running.seconds * self.part * (1 - share)
            rest = share * rest + (1 - share) * foreseen * pace
            if running.kind not in before and running.seconds:
                seen[running.kind] = (spent + rest, running.seconds * self.part)
        later = 0.0
        for ahead in self.planned[self.begun :]:
            if (pace := self._pace(seen, ahead)) is None:
                return None
            later += ahead.seconds * pace
        return rest + later

    def paces(self) -> dict[str, tuple[float, float]]:
        """Returns those of this run, and of other kinds those of an earlier one, for a run that resumes."""
        return {**self.earlier, **self.seen}

    def _pace(self, seen: Paces, ahead: Ahead) -> float | None:
        """Returns seconds taken for each foreseen: of the phase's kind, else of all that computes, in this run or else
        in an earlier one. None where nothing was seen."""
        amounts = [paces[ahead.kind] for paces in (seen, self.earlier) if ahead.kind in paces]
        amounts += [_all_that_computes(paces) for paces in (seen, self.earlier)]
        return next((taken / foreseen for taken, foreseen in amounts if foreseen), None)

    def _with(self, seconds: float, share: float) -> dict[str, tuple[float, float]]:
        """What was seen, and a share of the running phase besides."""
        assert self.at is not None
        ahead = self.planned[self.at]
        taken, foreseen = self.seen.get(ahead.kind, (0.0, 0.0))
        return {**self.seen, ahead.kind: (taken + seconds, foreseen + ahead.seconds * self.part * share)}


def _all_that_computes(paces: Paces) -> tuple[float, float]:
    working = [amounts for kind, amounts in paces.items() if kind != START]
    return sum(taken for taken, _ in working), sum(foreseen for _, foreseen in working)
