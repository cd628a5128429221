"""Layers that are solved and written at a time, and the queue of a pass in which layers are solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from manifests.entries import LayerEntry
from pipeline.driver.layer_solving import LayerQueue, LayerSolves, PassQueue, layers_written_together
from pipeline.driver.scheduler import Coroutine, Scheduler
from pipeline.driver.session import Session, solve_units, write_units
from pipeline.methods.method import Task
from pipeline.units.units import Solve
from tests.driver.simulation import MLP, MemoryJournal, Recorder, SimulatedPool, World, WorldCleaner, make_job

LAYERS = range(6)
TASKS = tuple(Task(layer, name, (f"role-{name}",), method=0) for layer in LAYERS for name in "ab")
JOB = make_job(TASKS, num_layers=6, scores=frozenset(), shards=1)
RANKS = {task.key: {"rank": 1} for task in JOB.tasks}


@pytest.mark.parametrize(
    ("workers", "groups", "count"),
    [
        (1, 1, 1), (4, 1, 4), (4, 8, 4), (4, 9, 3), (4, 16, 2), (4, 31, 1), (4, 32, 1), (4, 1000, 1), (0, 1, 1),
        (3, 0, 3), (100, 3, 100),
    ],
)  # fmt: skip
def test_layers_of_many_groups_are_written_fewer_at_a_time(workers: int, groups: int, count: int) -> None:
    """Eight groups per worker in all, and at least one layer."""
    assert layers_written_together(workers, groups) == count


class Bench:
    """A session over a simulated cluster, and the events of its layers."""

    def __init__(self, workers: int = 2) -> None:
        self.world = World()
        self.pool = SimulatedPool(self.world, size=workers)
        self.scheduler = Scheduler(self.pool, Recorder(self.world))
        self.session = Session(JOB, self.scheduler, MemoryJournal(self.world), WorldCleaner(self.world))
        self.entered: list[int] = []
        self.left: list[list[int]] = []

    def work(self, layer: int) -> LayerSolves:
        solves = solve_units(JOB, layer, {}, RANKS)
        return LayerSolves(solves, lambda solutions: write_units(layer, solves, solutions))

    def solve(self, layers: Sequence[int]) -> list[str]:
        """Solve some layers. Return the units, in order."""
        queue = LayerQueue(self.session, layers, self.work)

        def coroutine() -> Coroutine[None]:
            while queue.remaining:
                written = yield from queue.next_written()
                assert [self.world.load("staged", record) for record in written.records]
                assert len(written.solved) == 2
                self.entered.append(written.layer)
                self.left.append([*queue.remaining])

        self.scheduler.run(coroutine())
        return [unit.key for unit in self.world.done]


def test_no_layers() -> None:
    bench = Bench()
    assert bench.solve([]) == []
    assert (bench.entered, bench.left) == ([], [])


@pytest.mark.parametrize("workers", [0, 1, 2, 9])
def test_layers_are_entered_in_order(workers: int) -> None:
    """With the layers that are not entered yet, whose statistics have to stay."""
    bench = Bench(workers)
    keys = bench.solve([0, 2, 3, 5])
    assert bench.entered == [0, 2, 3, 5]
    assert [{*left} for left in bench.left] == [{2, 3, 5}, {3, 5}, {5}, set()]
    assert sorted(keys) == sorted(
        [
            *(f"solve/{layer}/0/{name}" for layer in (0, 2, 3, 5) for name in "ab"),
            "write/0",
            "write/2",
            "write/3",
            "write/5",
        ]
    )


def test_one_worker_solves_two_layers_ahead_of_a_write() -> None:
    """Two layers are being solved: the second keeps the worker busy while the first is written."""
    assert Bench(1).solve(range(3)) == [
        "solve/0/0/a", "solve/0/0/b", "solve/1/0/a", "solve/1/0/b", "write/0", "solve/2/0/a", "solve/2/0/b",
        "write/1", "write/2",
    ]  # fmt: skip


class Queue:
    """A queue over a bench, and the layers that it has returned."""

    def __init__(self, workers: int = 2) -> None:
        self.bench = Bench(workers)
        self.entered: list[tuple[int, LayerEntry]] = []
        self.queue = PassQueue(self.bench.session)

    def advance(self, solving: float = inf, writing: float = inf) -> Coroutine[None]:
        while written := (yield from self.queue.next_written(solving, writing)):
            assert self.bench.world.load("staged", written[1].staged)
            self.entered.append(written)

    def run(self, layers: Sequence[int], *limits: tuple[float, float]) -> list[tuple[int, int]]:
        """Begin some layers, and advance to some limits. Return how many layers were waiting and entered each time."""
        found = []

        def coroutine() -> Coroutine[None]:
            statistics: Any = {MLP: "a sum"}
            units = [solve_units(JOB, layer, {}, RANKS) for layer in layers]
            self.queue.begin([[replace(unit, statistics=statistics) for unit in layer] for layer in units])
            for solving, writing in limits:
                yield from self.advance(solving, writing)
                found.append((len(self.queue), len(self.entered)))

        self.bench.pool = self.bench.scheduler.pool = self.bench.session.pool = Unchecked(self.bench.world)
        self.bench.scheduler.run(coroutine())
        return found


class Unchecked(SimulatedPool):
    """Solves groups with any statistics."""

    def _solve(self, unit: Solve) -> Any:
        return super()._solve(replace(unit, statistics={}))


def test_a_queue_solves_the_first_groups_of_all_layers_first() -> None:
    queue = Queue()
    assert queue.run([0, 1, 2], (0, 0)) == [(0, 3)]
    assert [unit.key for unit in queue.bench.world.done][:6] == [
        f"solve/{layer}/0/{name}" for name in "ab" for layer in (0, 1, 2)
    ]


def test_statistics_of_solved_layers_are_dropped() -> None:
    """The units of layers being written have none, so that the sums are freed."""
    queue = Queue()
    queue.run([0, 1], (0, inf))
    assert queue.queue.writing
    assert all(solve.statistics == {} for solved, _ in queue.queue.writing for solve, _ in solved)
    queue.run([], (0, 0))
    assert [layer for layer, _ in queue.entered] == [0, 1]
    assert [[*entry.groups] for _, entry in queue.entered] == [["a", "b"]] * 2


def test_an_empty_queue_has_nothing_to_wait_for() -> None:
    assert Queue().run([], (0, 0), (inf, inf)) == [(0, 0), (0, 0)]


def test_a_queue_waits_until_few_layers_are_left() -> None:
    """Without a limit it takes what is done; then three, one and no layers may still be solved or written."""
    queue = Queue()
    found = queue.run([0, 1, 2, 3], (inf, inf), (3, inf), (1, 2), (0, 0))
    assert found[0] == (4, 0)
    assert queue.queue.groups == 0
    assert {waits + entered for waits, entered in found} == {4}
    waiting = [waits for waits, _ in found]
    assert waiting == sorted(waiting, reverse=True)
    assert found[2][0] <= 1 + 2
    assert found[-1] == (0, 4)
    assert [layer for layer, _ in queue.entered] == [0, 1, 2, 3]


def test_groups_of_a_queue_are_counted_until_they_are_solved() -> None:
    queue = Queue()
    units = [solve_units(JOB, layer, {}, RANKS) for layer in (0, 1)]
    counts = []

    def coroutine() -> Coroutine[None]:
        queue.queue.begin(units)
        counts.append(queue.queue.groups)
        yield from queue.advance(solving=1)
        counts.append(queue.queue.groups)
        yield from queue.advance(0, 0)
        counts.append(queue.queue.groups)

    queue.bench.scheduler.run(coroutine())
    assert counts[0] == 4
    assert counts[1] <= 2
    assert counts[2] == 0
