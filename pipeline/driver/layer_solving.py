"""Solves layers on many workers. Each layer is written while others are being solved, and entered by the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

from manifests.entries import LayerEntry
from manifests.records import StagedRecord
from pipeline.driver.scheduler import Coroutine, Fiber, Reached, batch
from pipeline.driver.session import Session, layer_entry, write_unit
from pipeline.units.units import Solve, SolveDone, SolveSizes, Write

SOLVED = "solved"  # the stage of a layer whose factors are being written
GROUPS_PER_WORKER = 8  # submitted groups per worker: enough to keep it busy
SolvedLayer = list[tuple[Solve, SolveDone]]  # the groups of a layer


def layers_written_together(workers: int, groups: int) -> int:
    """Return how many layers, of this many groups each, are written at a time. One more layer is solved meanwhile.

    Layers with many groups are limited to fewer, because their factors would fill the memory.
    """
    return max(1, min(workers, GROUPS_PER_WORKER * workers // max(1, groups)))


class LayerSolves(NamedTuple):
    """The units that solve the groups of a layer. `writes`: builds the units that write it from their results, one for
    each model."""

    units: Sequence[Solve | SolveSizes]
    writes: Callable[[list[Any]], list[Write]]


class WrittenLayer(NamedTuple):
    """A solved and written layer, which is not entered yet.

    Attributes:
        units, solutions: the units that solved its groups, and their results.
        records: the written layer, of each model.
    """

    layer: int
    units: Sequence[Any]
    solutions: list[Any]
    records: list[StagedRecord]

    @property
    def solved(self) -> SolvedLayer:
        """The groups of the layer, solved for one model."""
        return list(zip(self.units, self.solutions, strict=True))


class LayerQueue:
    """Solves and writes layers in order, several at a time (`layers_written_together`).

    Attributes:
        remaining: the layers that `next_written` has not returned, ascending.
    """

    def __init__(self, session: Session, layers: Sequence[int], solves_of: Callable[[int], LayerSolves]) -> None:
        """`solves_of`: returns the units of a layer, when it is begun."""
        self.session = session
        self.remaining = list(layers)
        self.solves_of = solves_of
        self.pending = deque(layers)
        self.solving: deque[Fiber[WrittenLayer]] = deque()
        self.writing: deque[Fiber[WrittenLayer]] = deque()
        self.groups = 1  # of the latest layer

    def next_written(self) -> Coroutine[WrittenLayer]:
        """Wait for the next written layer, and return it."""
        while not self.writing or (self.solving and len(self.writing) <= self._together):
            while self.pending and len(self.solving) <= self._together:
                self._begin(self.pending.popleft())
            yield self.solving[0].stage(SOLVED)
            self.writing.append(self.solving.popleft())
        written: WrittenLayer = yield self.writing.popleft()
        self.remaining.remove(written.layer)
        return written

    @property
    def _together(self) -> int:
        return layers_written_together(self.session.pool.size, self.groups)

    def _begin(self, layer: int) -> None:
        solves = self.solves_of(layer)
        self.groups = len(solves.units)
        self.solving.append(self.session.scheduler.spawn(self._solve(layer, solves)))

    def _solve(self, layer: int, solves: LayerSolves) -> Coroutine[WrittenLayer]:
        """Solve and write a layer."""
        solutions: list[Any] = yield solves.units
        writing = self.session.scheduler.spawn(self.session.build_on(solutions, solves.units, solves.writes))
        yield Reached(SOLVED)
        return WrittenLayer(layer, solves.units, solutions, (yield writing))


class PassQueue:
    """Solves and writes layers in order, during the pass that computes their sums.

    The statistics of a layer are dropped when it is solved. If its factors are lost before they are written, they
    cannot be recomputed, and LostInputError is raised.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.solving: deque[list[tuple[Solve, Fiber[list[SolveDone]]]]] = deque()
        self.writing: deque[tuple[SolvedLayer, Fiber[list[StagedRecord]]]] = deque()

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

    def next_written(self, solving: float = inf, writing: float = inf) -> Coroutine[tuple[int, LayerEntry] | None]:
        """Start to write solved layers. Return the next written one, and its entry.

        Wait until at most `solving` layers are being solved, then until at most `writing` are being written. Return
        None when that is so and no layer is ready.
        """
        while True:
            if self.solving and all(fiber.done for _, fiber in self.solving[0]):
                yield from self._write()
            elif self.writing and self.writing[0][1].done:
                break
            elif len(self.solving) > solving:
                yield from self._write()
            elif len(self.writing) > writing:
                break
            else:
                return None
        solved, fiber = self.writing.popleft()
        (record,) = yield fiber
        layer = solved[0][0].task.layer
        return layer, layer_entry(layer, solved, record)

    def _write(self) -> Coroutine[None]:
        """Wait until the first layer is solved, and start to write it."""
        solved: SolvedLayer = []
        for unit, fiber in self.solving.popleft():
            (solution,) = yield fiber
            solved.append((replace(unit, statistics={}), solution))
        write = write_unit(solved[0][0].task.layer, solved)
        self.writing.append((solved, self.session.scheduler.spawn(batch([write]))))
