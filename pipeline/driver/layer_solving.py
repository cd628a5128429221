"""Layers solved on many workers: each is written and entered while others are being solved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

from manifests.records import StagedRecord
from pipeline.driver.scheduler import Task, TaskStream, batch, gather
from pipeline.driver.session import Session, write_unit
from pipeline.units.units import Solve, SolveDone, SolveSizes, Write


class LayerSolves(NamedTuple):
    """The work on a layer.

    Attributes:
        units: solve its groups.
        writes: their results -> the units that write it, for one model or for several.
        enter: takes their results and the records of what is written, one for each of `writes`.
    """

    units: Sequence[Solve | SolveSizes]
    writes: Callable[[list[Any]], list[Write]]
    enter: Callable[[list[Any], list[StagedRecord]], None]


def solve_layers(
    session: Session,
    layers: Sequence[int],
    solves_of: Callable[[int], LayerSolves],
    entered: Callable[[Sequence[int]], None],
) -> TaskStream[None]:
    """Solves, writes and enters layers in their order, one more than there are workers at a time.

    `entered`: is called with the layers that are left, whenever one is entered.
    """
    pending, solving, writing = deque(layers), deque[_Solving](), deque[_Writing]()
    while pending or solving or writing:
        while pending and len(solving) <= session.pool.size:
            layer = pending.popleft()
            solves = solves_of(layer)
            solving.append(_Solving(layer, solves, session.scheduler.spawn(batch(solves.units))))
        if solving:
            layer, solves, task = solving.popleft()
            solutions = yield task
            written = session.scheduler.spawn(session.build_on(solutions, solves.units, solves.writes))
            writing.append(_Writing(layer, solves, solutions, written))
        while writing and (not solving or len(writing) > session.pool.size):
            layer, solves, solutions, written = writing.popleft()
            solves.enter(solutions, (yield written))
            entered([*pending, *(left.layer for left in solving), *(left.layer for left in writing)])


class _Solving(NamedTuple):
    layer: int
    solves: LayerSolves
    task: Task[list[Any]]


class _Writing(NamedTuple):
    layer: int
    solves: LayerSolves
    solutions: list[Any]
    task: Task[list[Any]]


Solved = list[tuple[Solve, SolveDone]]  # a layer's groups


class LayersInHand:
    """Layers that are solved and written while something else goes on, one after another.

    The statistics of a layer are dropped when it is solved: factors that are lost before they are written raise
    LostInputError, as they cannot be made again here.
    """

    def __init__(self, session: Session, enter: Callable[[int, Solved, StagedRecord], TaskStream[None]]) -> None:
        """`enter`: enters a layer that is written."""
        self.session = session
        self.enter = enter
        self.solving: deque[list[tuple[Solve, Task[list[Any]]]]] = deque()
        self.writing: deque[tuple[Solved, Write, Task[list[Any]]]] = deque()

    def __len__(self) -> int:
        return len(self.solving) + len(self.writing)

    @property
    def groups(self) -> int:
        """The groups of the layers that are being solved."""
        return sum(len(units) for units in self.solving)

    def begin(self, layers: Sequence[list[Solve]]) -> None:
        """Starts to solve some layers, the first groups of all of them before their second ones: units that are given
        out at a time take about equally long, so that no worker waits for another."""
        alike = (unit for units in zip_longest(*layers) for unit in units if unit is not None)
        tasks = {unit.key: self.session.scheduler.spawn(batch([unit])) for unit in alike}
        self.solving.extend([(unit, tasks[unit.key]) for unit in units] for units in layers)

    def advance(self, solving: float = inf, writing: float = inf) -> TaskStream[None]:
        """Writes solved layers and enters written ones. Waits until at most `solving` layers are being solved, and then
        until at most `writing` are being written."""
        while True:
            if self.solving and all(task.done for _, task in self.solving[0]):
                yield from self._write()
            elif self.writing and self.writing[0][2].done:
                yield from self._enter()
            elif len(self.solving) > solving:
                yield from self._write()
            elif len(self.writing) > writing:
                yield from self._enter()
            else:
                return

    def _write(self) -> TaskStream[None]:
        units, tasks = zip(*self.solving.popleft(), strict=True)
        solutions = yield from gather(tasks)
        solved = list(_solved(units, solutions))
        write = write_unit(units[0].task.layer, solved)
        self.writing.append((solved, write, self.session.scheduler.spawn(batch([write]))))

    def _enter(self) -> TaskStream[None]:
        solved, write, task = self.writing.popleft()
        (record,) = yield task
        yield from self.enter(write.layer, solved, record)


def _solved(units: Sequence[Solve], solutions: Sequence[list[SolveDone]]) -> Iterator[tuple[Solve, SolveDone]]:
    """The groups of a layer without the statistics that they were solved from."""
    for unit, (solution,) in zip(units, solutions, strict=True):
        yield replace(unit, statistics={}), solution
