"""Layers solved on many workers: each is written and entered while others are being solved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

from manifests.records import StagedRecord
from pipeline.driver.scheduler import Steps, write_unit
from pipeline.units.units import Solve, SolveDone, SolveSizes, Write


class LayerSolves(NamedTuple):
    """What a layer takes.

    Attributes:
        units: solve its groups.
        writes: their results -> the units that write it, for one model or for several.
        enter: takes their results and the records of what is written, one for each of `writes`.
    """

    units: Sequence[Solve | SolveSizes]
    writes: Callable[[list[Any]], list[Write]]
    enter: Callable[[list[Any], list[StagedRecord]], None]


def solve_layers(
    steps: Steps,
    layers: Sequence[int],
    solves_of: Callable[[int], LayerSolves],
    entered: Callable[[Sequence[int]], None],
) -> None:
    """Solves, writes and enters layers in their order, one more than there are workers at a time.

    `entered`: told of the layers that are left, whenever one is entered.
    """
    pending, solving, writing = deque(layers), deque[tuple[int, LayerSolves]](), deque[_Written]()
    while pending or solving or writing:
        while pending and len(solving) <= steps.pool.size:
            layer = pending.popleft()
            solving.append((layer, solves_of(layer)))
            steps.begin(solving[-1][1].units)
        if solving:
            layer, solves = solving.popleft()
            writing.append(_Written(layer, solves, steps.results(solves.units)))
            steps.begin(solves.writes(writing[-1].solutions))
        while writing and (not solving or len(writing) > steps.pool.size):
            layer, solves, solutions = writing.popleft()
            records = steps.build_on(solutions, solves.units, solves.writes, begun=True)
            solves.enter(solutions, records)
            entered([*pending, *(layer for layer, _ in solving), *(written.layer for written in writing)])


class _Written(NamedTuple):
    layer: int
    solves: LayerSolves
    solutions: list[Any]


Solved = list[tuple[Solve, SolveDone]]  # a layer's groups


class LayersInHand:
    """Layers that are solved and written while something else goes on, one after another.

    What a layer is solved from is let go of when it is solved: factors that are lost before they are written are not
    made again here. That is raised (LostInputError).
    """

    def __init__(self, steps: Steps, enter: Callable[[int, Solved, StagedRecord], None]) -> None:
        """`enter`: takes a layer that is written."""
        self.steps = steps
        self.enter = enter
        self.solving: deque[list[Solve]] = deque()
        self.writing: deque[tuple[Solved, Write]] = deque()

    def __len__(self) -> int:
        return len(self.solving) + len(self.writing)

    def begin(self, layers: Sequence[list[Solve]]) -> None:
        """Begins some layers, the first groups of all of them before their second ones: what is given out at a time is
        of one length, so that no worker waits for another."""
        self.solving.extend(layers)
        groups = zip_longest(*layers)
        self.steps.begin([unit for alike in groups for unit in alike if unit is not None])

    def go_on(self, solving: float = inf, writing: float = inf) -> None:
        """Writes what is solved and enters what is written. Waits until no more layers than `solving` are being solved,
        and then no more than `writing` written."""
        while True:
            if self.solving and self.steps.there(self.solving[0]):
                self._write()
            elif self.writing and self.steps.there([self.writing[0][1]]):
                self._enter()
            elif len(self.solving) > solving:
                self._write()
            elif len(self.writing) > writing:
                self._enter()
            else:
                return

    def _write(self) -> None:
        units = self.solving.popleft()
        solutions: list[SolveDone] = self.steps.results(units)
        solved = [(replace(unit, statistics={}), done) for unit, done in zip(units, solutions, strict=True)]
        self.writing.append((solved, write_unit(units[0].task.layer, solved)))
        self.steps.begin([self.writing[-1][1]])

    def _enter(self) -> None:
        solved, write = self.writing.popleft()
        (record,) = self.steps.results([write])
        self.enter(write.layer, solved, record)
