"""The dense pass in which layers are solved: what is in memory, what is stored, and that it gives what one pass after
another gives."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from manifests.errors import LostInputError
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import Job
from pipeline.driver.scheduler import Scheduler
from pipeline.methods.method import Moment
from pipeline.units.sums import Add, Collect, Summed, Total
from pipeline.units.units import Forward, Solve, Unit, Write
from tests.driver.simulation import (
    ALL,
    IMPORTANCE,
    JOBS,
    PAIRS,
    Handle,
    MemoryJournal,
    Recorder,
    SimulatedPool,
    World,
    WorldCleaner,
    commits,
    make_gradient_job,
    make_job,
    make_tasks,
    measures,
    number_in,
    run,
    run_with_a_death,
    solves,
)


def make_uniform(layers: int = 12, **settings: Any) -> Job:
    given: dict[str, Any] = {"num_layers": layers, "propagate": "dense", "scores": frozenset(), **settings}
    return make_job(make_tasks(range(layers)), **given)


def driver(job: Job, world: World) -> Driver:
    scheduler = Scheduler(SimulatedPool(world), Recorder(world))
    return Driver(job, scheduler, MemoryJournal(world), WorldCleaner(world))


def compressed(world: World) -> dict[str, Any]:
    return {key: entry for key, entry in world.journal().items() if key.startswith("layer/")}


def one_after_another(job: Job) -> dict[str, Any]:
    """The layers as they are when all statistics are stored before the first is solved."""
    world = World()
    driver(replace(job, keep_statistics=True), world).run(until_ranks=True)
    assert not [unit for unit in world.done if isinstance(unit, Solve)]
    run(replace(job, keep_statistics=True), world)
    assert not [unit for unit in solves(world) if any(isinstance(found, Summed) for found in unit.statistics.values())]
    return compressed(world)


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("dense-uniform")])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8])
def test_layers_are_what_one_pass_after_another_gives(name: str, workers: int) -> None:
    job = JOBS[name]()
    assert job.solves_in_pass()
    for order in ("first", "last", 5):
        world = World()
        run(job, world, SimulatedPool(world, order, workers))
        assert compressed(world) == one_after_another(job)


@pytest.mark.parametrize(
    "settings",
    [
        {"scores": IMPORTANCE},
        {"propagate": "compressed"},
        {"predicts": make_tasks(ALL)},
        {"tasks": make_tasks(ALL, ["free"])},
        {"tasks": make_tasks(ALL, ["loss-mlp"])},
        {"tasks": tuple(replace(task, corrections=(PAIRS["o.in"],)) for task in make_tasks(ALL))},
    ],
    ids=["importance", "compressed", "curves", "data-free", "gradients", "corrections"],
)
def test_what_must_be_known_of_all_layers_before_the_first_is_solved(settings: dict[str, Any]) -> None:
    job = make_uniform(4)
    assert job.solves_in_pass()
    assert not replace(job, **settings).solves_in_pass()


def test_layers_are_solved_while_the_pass_goes_on() -> None:
    """Two at a time, all their first groups before their second ones; none is stored."""
    job, world = make_uniform(), World()
    _, recorder = run(job, world)
    assert not [unit for unit in world.done if isinstance(unit, Total)]
    keys = [unit.key for unit in world.done if isinstance(unit, Solve | Forward) and getattr(unit, "shard", 0) == 0]
    assert keys[:11] == [
        "forward/dense/0/0/dense", "forward/dense/1/0/dense", "forward/dense/2/0/dense",
        "solve/0/0/attention", "solve/1/0/attention", "solve/0/0/mlp", "solve/1/0/mlp", "forward/dense/3/0/dense",
        "forward/dense/4/0/dense",
        "solve/2/0/attention", "solve/3/0/attention",
    ]  # fmt: skip
    order = commits(world)
    assert order.index("layer/00003") < order.index("dense/00007")
    assert recorder.phases == [("statistics", 12, 2), ("compress", 4, 2)]
    assert [layer for phase, layer in recorder.layers if phase == "compress"] == list(range(12))
    assert [layer for phase, layer in recorder.layers if phase == "statistics"] == list(range(12))


class Slow(SimulatedPool):
    """Solves when nothing else is left to do, and writes last. Knows of how many layers sums were held at a time."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world, size=size)
        self.made: list[tuple[int, weakref.ref[Handle]]] = []
        self.most = 0

    def wait(self) -> tuple[Unit, Any]:
        self.most = max(self.most, len({layer for layer, handle in self.made if handle() is not None}))
        self.world.done.clear()  # which holds sums, too
        self.pending.sort(key=lambda unit: 2 * isinstance(unit, Write) + isinstance(unit, Solve))
        return super().wait()

    def _execute(self, unit: Unit) -> Any:
        first, result = len(self.world.handles), super()._execute(unit)
        if isinstance(unit, Collect | Add):
            self.made += [(unit.layer, handle) for handle in self.world.handles[first:]]
        return result


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("keep", [False, True])
def test_sums_of_a_few_layers_are_in_memory(workers: int, keep: bool) -> None:
    """However slow solves and writes are: of two batches of a layer for each worker, and of two on their way."""
    world = World()
    pool = Slow(world, workers)
    run(make_uniform(30, shards=4, keep_statistics=keep), world, pool)
    assert 2 * workers < pool.most <= 2 * workers + 2


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("workers", [1, 2])
def test_two_commits_of_hidden_states_are_stored_at_a_time(every: int, workers: int) -> None:
    """However slow solves and writes are: they stay while a layer behind them may be passed again, and no longer."""
    stored: list[int] = []

    class Watching(Slow):
        def wait(self) -> tuple[Unit, Any]:
            stored.append(len(world.stores["activation"]))
            return super().wait()

    world = World()
    run(make_uniform(40, every=every), world, Watching(world, workers))
    assert max(stored) == 2 * 2  # shards
    boundaries = [int(key[6:]) + 1 for key, entry in world.journal().items() if "activations" in entry]
    apart = -(-(2 + 3 * workers) // every) * every
    assert boundaries == list(range(apart, 40, apart))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("dense-uniform")])
def test_a_run_that_took_all_statistics_first_is_gone_on_with(name: str) -> None:
    """As an earlier version left it, at any moment, with or without the rest of its statistics."""
    job, left = JOBS[name](), list[World]()
    expected, _ = run(job)
    driver(job, World(left=left)).run(until_ranks=True)
    for number, world in enumerate(left):
        run(job, world, SimulatedPool(world, size=3))
        assert compressed(world) == compressed(expected), f"killed at {number}"
        assert not world.repairs
    assert len(left) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense-uniform-every-3", "dense-uniform-kept"])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_another_number_of_workers_goes_on(name: str, before: int, after: int) -> None:
    job, left = JOBS[name](), list[World]()
    expected, _ = run(job)
    first = World(left=left)
    run(job, first, SimulatedPool(first, size=before))
    for number, world in enumerate(left):
        run(job, world, SimulatedPool(world, size=after))
        assert compressed(world) == compressed(expected), f"killed at {number}"
        assert not world.repairs


@pytest.mark.parametrize(
    ("unit", "producers"),
    [
        ("solve/3/0/mlp", ("add/dense/3/down.in-1-1/0",)),
        ("solve/3/0/mlp", ("collect/dense/3/worker-1",)),
        ("write/4", ("solve/4/0/attention",)),
        ("add/dense/2/q.in-1-1/0", ("collect/dense/2/worker-0",)),
        ("checkgrids/dense/5", ("collect/dense/5/worker-0",)),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_what_goes_with_a_node_is_made_again(unit: str, producers: tuple[str, ...], every: int) -> None:
    """Layers that were entered are not; hidden states are there that the others are made of."""
    job = make_uniform(9, every=every)
    expected, world = World(), World()
    run(job, expected)
    pool = SimulatedPool(world)
    pool.fail_on[unit] = LostInputError("gone with its node", producers)
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert world.repairs == [("gone with its node", ())]
    assert max(Counter(commits(world)[: commits(world).index("layer/00008")]).values()) <= 2
    assert not [key for key, times in Counter(commits(world)).items() if key.startswith("layer/") and times > 1]


@pytest.mark.parametrize("when", ["forward/dense/4/2/dense", "collect/dense/4/worker-0"])
def test_a_worker_s_death_costs_the_shards_in_its_sums(when: str) -> None:
    job = make_uniform(9, shards=6)
    _, again = run_with_a_death(job, when)
    assert 0 < sum(again.values()) <= 4


def test_samples_are_stored_until_their_layer_is_entered() -> None:
    sample = Moment("down.in", kind="sample", tokens=9)
    tasks = tuple(replace(task, moments=(*task.moments, sample)) for task in make_tasks(range(12)))
    job, most = make_job(tasks, num_layers=12, propagate="dense", scores=frozenset()), 0

    class Watching(SimulatedPool):
        def wait(self) -> tuple[Unit, Any]:
            nonlocal most
            most = max(most, len(world.stores["statistic"]))
            return super().wait()

    world = World()
    run(job, world, Watching(world))
    assert compressed(world) == one_after_another(job)
    assert 0 < most <= 2 * 2 + 2
    assert not world.stores["statistic"]


def test_measured_weights_come_first() -> None:
    job = make_uniform(4, measures=measures(range(4)))
    assert job.solves_in_pass()
    world, recorder = run(job)
    assert commits(world)[:5] == [*(f"measured/{layer:05d}" for layer in range(4)), "ranks"]
    assert [name for name, _, _ in recorder.phases] == ["measure", "statistics", "compress"]


def test_gradients_want_all_statistics_first() -> None:
    world, recorder = run(make_gradient_job(ALL, predicts=()))
    assert [name for name, _, _ in recorder.phases] == ["statistics", "gradient", "compress"]
    assert [unit for unit in world.done if isinstance(unit, Total)]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_any_hidden_states_may_be_corrupt(keep: bool) -> None:
    """Those that are read are made again; what is entered stays."""
    job = make_uniform(20, keep_statistics=keep, shards=1)
    expected, _ = run(job)
    numbers = [number_in(path) for path in expected.values if path.startswith("activation")]
    assert len(numbers) == (19 if keep else 2)
    for number in numbers:
        world, _ = run(job, World(damaged=frozenset({number})))
        assert compressed(world) == compressed(expected)
        assert world.repairs
        assert not [key for key, times in Counter(commits(world)).items() if key.startswith("layer/") and times > 1]
