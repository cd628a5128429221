"""Solves layers on many workers. Each layer is written and entered while others are being solved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

from manifests.records import StagedRecord
from pipeline.driver.scheduler import Coroutine, Fiber, Reached, batch, gather
from pipeline.driver.session import Session, write_unit
from pipeline.units.units import Solve, SolveDone, SolveSizes, Write

SOLVED = "solved"  # the stage of a layer whose factors are being written
GROUPS_PER_WORKER = 8  # submitted groups per worker: enough to keep it busy


def layers_written_together(workers: int, groups: int) -> int:
    """Return how many layers, of this many groups each, are written at a time. One more layer is solved meanwhile.

    Layers with many groups are limited to fewer, because their factors would fill the memory.
    """
    return max(1, min(workers, GROUPS_PER_WORKER * workers // max(1, groups)))


class LayerSolves(NamedTuple):
    """The work on one layer.

    Attributes:
        units: the units that solve its groups.
        writes: builds the units that write the layer from the results of `units`: one for each model.
        enter: commits the layer from the results of `units` and of `writes`.
    """

    units: Sequence[Solve | SolveSizes]
    writes: Callable[[list[Any]], list[Write]]
    enter: Callable[[list[Any], list[StagedRecord]], None]


def solve_layers(
    session: Session,
    layers: Sequence[int],
    solves_of: Callable[[int], LayerSolves],
    entered: Callable[[Sequence[int]], None],
) -> Coroutine[None]:
    """Solve, write and enter layers in order, several at a time (`layers_written_together`).

    `entered`: called with the remaining layers whenever one is entered.
    """
    pending, solving, writing = deque(layers), deque[_LayerFiber](), deque[_LayerFiber]()
    groups = 1
    while pending or solving or writing:
        while pending and len(solving) <= layers_written_together(session.pool.size, groups):
            solves = solves_of(pending[0])
            groups = len(solves.units)
            solving.append(_LayerFiber(pending.popleft(), solves, session.scheduler.spawn(_solve(session, solves))))
        if solving:
            yield solving[0].fiber.stage(SOLVED)
            writing.append(solving.popleft())
        while writing and (not solving or len(writing) > layers_written_together(session.pool.size, groups)):
            first = writing.popleft()
            first.solves.enter(*(yield first.fiber))
            entered([*pending, *(each.layer for each in solving), *(each.layer for each in writing)])


class _LayerFiber(NamedTuple):
    layer: int
    solves: LayerSolves
    fiber: Fiber[tuple[list[Any], list[StagedRecord]]]


def _solve(session: Session, solves: LayerSolves) -> Coroutine[tuple[list[Any], list[StagedRecord]]]:
    """Solve and write a layer. Return the solutions and the records of the written layers."""
    solutions: list[Any] = yield solves.units
    written = session.scheduler.spawn(session.build_on(solutions, solves.units, solves.writes))
    yield Reached(SOLVED)
    return solutions, (yield written)


SolvedLayer = list[tuple[Solve, SolveDone]]  # the groups of a layer


class SolveQueue:
    """Solves and writes layers in order, during the pass that computes their sums.

    The statistics of a layer are dropped when it is solved. If its factors are lost before they are written, they
    cannot be recomputed, and LostInputError is raised.
    """

    def __init__(self, session: Session, enter: Callable[[int, SolvedLayer, StagedRecord], Coroutine[None]]) -> None:
        """`enter`: enters a written layer."""
        self.session = session
        self.enter = enter
        self.solving: deque[list[tuple[Solve, Fiber[list[Any]]]]] = deque()
        self.writing: deque[tuple[SolvedLayer, Write, Fiber[list[Any]]]] = deque()

    def __len__(self) -> int:
        return len(self.solving) + len(self.writing)

    @property
    def groups(self) -> int:
        """The number of groups of the layers being solved."""
        return sum(len(units) for units in self.solving)

    def begin(self, layers: Sequence[list[Solve]]) -> None:
        """Start to solve some layers: the first group of every layer, then the second, and so on. Units submitted
        together then take about the same time, so that no worker waits for another."""
        units = [unit for same_group in zip_longest(*layers) for unit in same_group if unit is not None]
        fibers = {unit.key: self.session.scheduler.spawn(batch([unit])) for unit in units}
        self.solving.extend([(unit, fibers[unit.key]) for unit in layer] for layer in layers)

    def advance(self, solving: float = inf, writing: float = inf) -> Coroutine[None]:
        """Write solved layers and enter written ones. Wait until at most `solving` layers are being solved, then
        until at most `writing` layers are being written."""
        while True:
            if self.solving and all(fiber.done for _, fiber in self.solving[0]):
                yield from self._write()
            elif self.writing and self.writing[0][2].done:
                yield from self._enter()
            elif len(self.solving) > solving:
                yield from self._write()
            elif len(self.writing) > writing:
                yield from self._enter()
            else:
                return

    def _write(self) -> Coroutine[None]:
        units, fibers = zip(*self.solving.popleft(), strict=True)
        solutions = yield from gather(fibers)
        solved = list(_solved(units, solutions))
        write = write_unit(units[0].task.layer, solved)
        self.writing.append((solved, write, self.session.scheduler.spawn(batch([write]))))

    def _enter(self) -> Coroutine[None]:
        solved, write, fiber = self.writing.popleft()
        (record,) = yield fiber
        yield from self.enter(write.layer, solved, record)


def _solved(units: Sequence[Solve], solutions: Sequence[list[SolveDone]]) -> Iterator[tuple[Solve, SolveDone]]:
    """Yield the solved groups of a layer, without their statistics."""
    for unit, (solution,) in zip(units, solutions, strict=True):
        yield replace(unit, statistics={}), solution
