"""The estimate of a job's remaining time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

KINDS = {  # kind of work, by the first word of a phase's name; any other phase is a kind of its own
    "importance": "products", "statistics": "products", "gradient": "products",
    "score": "products", "evaluate": "products",
}  # fmt: skip
START = "start"  # a phase of waiting: its pace does not predict that of computations


class PlannedPhase(NamedTuple):
    """A phase ahead, with its planned seconds over all layers.

    Attributes:
        of: the methods of a sweep's point, as phases of one kind differ between points.
        layers: the number of layers in `seconds`; None: all of the model's.
    """

    phase: str
    seconds: float
    of: str = ""
    layers: int | None = None

    @property
    def kind(self) -> str:
        """The kind of work. Phases of one kind have one pace."""
        word = self.phase.partition(" ")[0]
        return f"{KINDS.get(word, word)} {self.of}".rstrip()


Paces = Mapping[str, tuple[float, float]]  # kind of work -> measured seconds, and planned ones


def read_paces(value: object) -> Paces:
    """Read the paces that an earlier run stored as JSON. Drop other entries."""
    entries = value.items() if isinstance(value, dict) else ()
    return {str(kind): (float(pair[0]), float(pair[1])) for kind, pair in entries if _is_pace(pair)}


def _is_pace(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    return all(isinstance(amount, int | float) and math.isfinite(amount) and amount >= 0 for amount in pair)


class Eta:
    """The phases of a job with planned seconds, corrected by the measured seconds of finished phases.

    If a pass takes ten times as long as planned, later passes are expected to take ten times as long. So is each other
    kind of work, until this run or an earlier run of the job has measured it.
    """

    def __init__(
        self, planned: Sequence[PlannedPhase] = (), layers: int = 1, earlier: Paces = MappingProxyType({})
    ) -> None:
        """`planned`: the phases ahead, in order; without any there is no estimate. `layers`: the model's. `earlier`:
        the paces that an earlier run stored."""
        self.planned = tuple(planned)
        self.layers = layers
        self.at: int | None = None  # the running phase
        self.begun = 0  # the number of phases that have begun
        self.part = 1.0  # of the running phase's layers, the share that this run goes through
        self.measured: dict[str, tuple[float, float]] = {}  # paces of this run
        self.earlier = earlier

    def begin(self, phase: str, layers: int | None = None) -> None:
        """Note that a phase begins. `layers`: the remaining ones, of a phase with layers.

        A phase that is not ahead but has begun before is repeated, with the phases after it.
        """
        names = [each.phase for each in self.planned]
        if layers != 0 and phase in names[: self.begun] and phase not in names[self.begun :]:
            first = self.begun - 1 - names[: self.begun][::-1].index(phase)
            again = self.planned[first : self.begun]
            self.planned = (*self.planned[: self.begun], *again, *self.planned[self.begun :])
            names = [each.phase for each in self.planned]
        self.at = names.index(phase, self.begun) if phase in names[self.begun :] else None
        self.begun = self.begun if self.at is None else self.at + 1
        of = self.layers if self.at is None else self.planned[self.at].layers or self.layers
        self.part = 1.0 if layers is None else layers / of

    def end(self, seconds: float) -> None:
        """Record the duration of the phase that ends."""
        if self.at is not None:
            self.measured = self._with(seconds, 1.0)
            self.at = None

    def left(self, spent: float, share: float, phase_s: float | None = None) -> float | None:
        """Return the seconds to the end of the job, when a `share` of the running phase is done after `spent` seconds.

        None if there is no estimate: the phase was not planned, or none of it is done. `phase_s`: the seconds to the
        end of the running phase, if it has an estimate of its own.
        """
        if self.at is None or share <= 0:
            return None
        running = self.planned[self.at]
        rest = self.phase_left(spent, share) if phase_s is None else phase_s
        measured = self._with(spent, share)
        if running.kind not in self.measured and running.seconds and self._pace(self.measured, running) is not None:
            measured[running.kind] = (spent + rest, running.seconds * self.part)
        later = 0.0
        for phase in self.planned[self.begun :]:
            if (pace := self._pace(measured, phase)) is None:
                return None
            later += phase.seconds * pace
        return rest + later

    def phase_left(self, spent: float, share: float) -> float:
        """Return the seconds to the end of the running phase, of which a `share` above 0 is done.

        Beside an earlier pace, the speed of the running phase counts by the share that is done, because first units may
        differ from the others.
        """
        rest = spent / share * (1 - share)
        running = None if self.at is None else self.planned[self.at]
        if running is None or (pace := self._pace(self.measured, running)) is None:
            return rest
        return share * rest + (1 - share) * running.seconds * self.part * (1 - share) * pace

    def paces(self) -> dict[str, tuple[float, float]]:
        """Return the paces of this run, and for other kinds those of an earlier run, for a run that resumes."""
        return {**self.earlier, **self.measured}

    def _pace(self, measured: Paces, phase: PlannedPhase) -> float | None:
        """Return the ratio of measured to planned seconds: of the phase's kind, otherwise of all computations, in this
        run or otherwise in an earlier one. None if nothing was measured."""
        amounts = [paces[phase.kind] for paces in (measured, self.earlier) if phase.kind in paces]
        amounts += [_computations(paces) for paces in (measured, self.earlier)]
        return next((seconds / planned for seconds, planned in amounts if planned), None)

    def _with(self, seconds: float, share: float) -> dict[str, tuple[float, float]]:
        """Return the measured paces, with a share of the running phase added."""
        assert self.at is not None
        phase = self.planned[self.at]
        measured, planned = self.measured.get(phase.kind, (0.0, 0.0))
        return {**self.measured, phase.kind: (measured + seconds, planned + phase.seconds * self.part * share)}


def _computations(paces: Paces) -> tuple[float, float]:
    amounts = [pair for kind, pair in paces.items() if kind != START]
    return sum(measured for measured, _ in amounts), sum(planned for _, planned in amounts)
