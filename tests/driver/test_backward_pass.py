"""The driver's backward pass over a simulated cluster: order, lifetime of stored data, damage, solving again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from manifests.errors import LostInputError
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import Job
from pipeline.driver.scheduler import Scheduler
from pipeline.methods.method import Moment
from pipeline.units.curves import CurvePieces, Predict
from pipeline.units.sums import Collect
from pipeline.units.units import Forward, Solve, Unit
from tests.driver.simulation import (
    ALL,
    JOBS,
    MLP,
    OUT,
    SHARED,
    MemoryJournal,
    Recorder,
    SimulatedPool,
    World,
    WorldCleaner,
    backwards,
    commits,
    forwards,
    make_gradient_job,
    make_job,
    make_pieces_job,
    make_tasks,
    run,
)

GRADIENT = [name for name in JOBS if name.startswith("gradient")]


def test_back_through_the_layers_after_the_way_forth() -> None:
    world, recorder = run(make_gradient_job(range(3)))
    forth = [f"dense/0000{layer}" for layer in range(3)]
    back = [f"gradient/0000{layer}" for layer in (2, 1, 0)]
    curves, layers = ([f"{kind}/0000{layer}" for layer in range(3)] for kind in ("curves", "layer"))
    assert commits(world) == [*forth, *back, *curves, "ranks", *layers]
    assert recorder.phases == [("statistics", 3, 2), ("gradient", 3, 2), ("curves", 3, 2), ("compress", 3, 2)]
    assert [(unit.layer, unit.shard) for unit in backwards(world)] == [
        (layer, s) for layer in (2, 1, 0) for s in (0, 1)
    ]


def test_only_shards_with_samples_are_kept_and_go_back() -> None:
    world, _ = run(make_gradient_job(ALL, shards=3, gradient_shards=(0, 2)))
    assert {unit.shard for unit in backwards(world)} == {0, 2}
    assert {unit.shard for unit in forwards(world) if unit.keep_inputs} == {0, 2}
    assert [entry is None for entry in world.journal()["dense/00001"]["inputs"]] == [False, True, False]
    collects = [unit for unit in world.done if isinstance(unit, Collect) and unit.lineage == "gradient"]
    assert Counter(unit.layer for unit in collects) == dict.fromkeys(range(4), 2), "of each worker, not of each shard"


def test_each_layer_goes_on_from_the_committed_gradients() -> None:
    world, _ = run(make_gradient_job(range(5), every=2))
    found = {unit.layer: (unit.base, unit.base_record is not None, unit.emit, unit.store) for unit in backwards(world)}
    assert found == {
        4: (5, False, True, True),
        3: (4, True, True, False),
        2: (4, True, True, True),
        1: (2, True, True, False),
        0: (2, True, False, False),
    }
    assert [unit.ahead for unit in backwards(world) if unit.shard == 0] == [3, 2, 1, 0, None]


def test_layers_below_the_lowest_that_is_asked_for_are_left_alone() -> None:
    world, _ = run(make_gradient_job([2, 3], num_layers=5))
    assert sorted({unit.layer for unit in backwards(world)}) == [2, 3, 4]
    assert sorted({unit.layer for unit in forwards(world) if unit.keep_inputs}) == [2, 3, 4]
    assert [unit.moments for unit in backwards(world) if unit.layer == 4] == [(), ()]


def test_local_gradients_know_nothing_of_the_layers_above() -> None:
    world, _ = run(make_gradient_job(ALL, gradient="local"))
    assert all(unit.probe and len(unit.inputs) == 1 and not unit.emit for unit in backwards(world))


def test_stored_inputs_are_dropped_as_the_gradient_passes_them() -> None:
    world = World()
    stored: list[tuple[str, int]] = []

    class Watching(SimulatedPool):
        def _execute(self, unit: Unit) -> Any:
            stored.append((unit.key, len(world.stores["activation"])))
            return super()._execute(unit)

    run(make_gradient_job(ALL), world, Watching(world))
    kept = {key: count for key, count in stored if key.endswith("/0") and key.startswith("backward")}
    assert kept == {"backward/3/0": 8, "backward/2/0": 8, "backward/1/0": 6, "backward/0/0": 4}
    assert not world.stores["activation"]


def with_samples(job: Job) -> Job:
    """A sample of values of each layer beside its sums."""
    sample = Moment("down.in", kind="sample", tokens=9)
    return replace(job, tasks=tuple(replace(task, moments=(*task.moments, sample)) for task in job.tasks))


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", ["dense", "dense-every-2", "compressed", "gradient", "gradient-every-2"])
def test_partial_sums_of_one_layer_at_a_time(name: str, samples: bool) -> None:
    """The sums of a layer are released before those of the next are computed: in large models they fill the memory."""
    job = with_samples(JOBS[name]()) if samples else JOBS[name]()
    most = 0  # of one worker: a grid and a sum of each moment, however many shards; and what is of each shard
    for layer in range(job.num_layers):
        moments = job.layer_moments(layer)
        apart = sum(moment.kind == "sample" for moment in moments)
        sums = 2 * (len(moments) - apart)
        # While a layer's are given away and stored the next one's grids are chosen, and its sums are made, unless these
        # wait for what the first has committed; they are given away while samples are put together.
        before = sums if layer > 0 and job.propagate == "dense" and not (apart and job.is_boundary(layer)) else 0
        forth = max(before * 3 // 2 + sums // 2, (before if apart else 0) + sums * 3 // 2 + job.shards * apart)
        back = 2 * len(job.layer_gradients(layer))
        above = back if layer + 1 < job.num_layers and not job.is_boundary(layer + 1) else 0
        most = max(most, forth, above * 3 // 2 + back // 2, back * 3 // 2)
    world, alive = World(), []

    class Forgetful(SimulatedPool):
        def wait(self) -> tuple[Unit, Any]:
            found = super().wait()
            world.done.clear()
            alive.append(sum(handle() is not None for handle in world.handles))
            return found

    pool = Forgetful(world, size=1)
    pool.cut = 1
    run(job, world, pool)
    assert max(alive) == most


def test_curves_follow_from_both_kinds_of_moments() -> None:
    world, _ = run(make_gradient_job(ALL))
    for unit in world.done:
        if isinstance(unit, Predict | Solve):
            assert {moment.kind for moment in unit.statistics} == {"value", "gradient"}
            assert tuple(unit.statistics) == unit.task.moments
    assert {key: len(world.journal()[key]["curves"]) for key in ("curves/00000", "curves/00003")} == {
        "curves/00000": 2,
        "curves/00003": 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENT)
def test_any_record_may_be_corrupt(name: str) -> None:
    """Whichever stored data is damaged, as soon as it is written: the job computes the same."""
    job = JOBS[name]()
    expected, _ = run(job)
    found = 0
    for number in range(len(expected.values)):
        world, _ = run(job, World(damaged=frozenset({number})))
        assert results(world) == results(expected), f"record {number} damaged"
        found += bool(world.repairs)
        assert all(keys for _, keys in world.repairs)
    assert found > len(expected.values) // 2


def results(world: World) -> dict[str, Any]:
    """All but the hidden states, which a repair forgets."""
    return {
        key: {name: value for name, value in entry.items() if name not in ("activations", "inputs")}
        for key, entry in world.journal().items()
        if not key.startswith("activations/")
    }


def solve_again(world: World) -> World:
    """Another budget: ranks and layers are taken back."""
    entries = {key: text for key, text in world.entries.items() if key != "ranks" and not key.startswith("layer/")}
    return replace(world, entries=entries, done=[], events=[])


def test_curves_alone_are_taken_without_ranks() -> None:
    """What `budget.max_loss` chooses a size by, also when a result was lost; the job goes on from there."""
    job, world = make_gradient_job(ALL), World()
    pool = SimulatedPool(world)
    pool.fail_on["predict/2/0/loss-mlp"] = LostInputError("gone with its worker")
    Driver(job, Scheduler(pool, Recorder(world)), MemoryJournal(world), WorldCleaner(world)).run(until_ranks=True)
    assert {key.partition("/")[0] for key in commits(world)} == {"dense", "gradient", "curves"}
    assert [reason for reason, _ in world.repairs] == ["gone with its worker"]
    world.done.clear()
    run(job, world)
    assert {type(unit).__name__ for unit in world.done} == {"Solve", "Write"}
    assert results(world) == results(run(job)[0])


@pytest.mark.parametrize(
    ("workers", "parts"),
    {1: [0, 0, 0], 2: [0, 0, 2], 3: [0, 0, 0], 5: [0, 0, 0], 6: [2, 2, 2], 9: [3, 3, 3], 40: [3, 3, 3]}.items(),
)
def test_long_curves_are_cut_where_workers_have_none(workers: int, parts: list[int]) -> None:
    """The same bytes for any number of workers, and each piece once; no cut while each worker has a long one."""
    job, world = make_pieces_job(range(3), pieces=3), World()
    run(job, world, SimulatedPool(world, size=workers))
    assert results(world) == results(run(job)[0])
    cut = [unit for unit in world.done if isinstance(unit, CurvePieces)]
    assert [sum(unit.task.layer == layer for unit in cut) for layer in range(3)] == parts
    taken = sorted((unit.task.layer, number) for unit in cut for number in unit.numbers)
    assert taken == [(layer, number) for layer in range(3) if parts[layer] for number in range(3)]


def test_the_layer_before_is_gone_back_through_while_sums_are_stored() -> None:
    """But where gradients are committed: what is begun from is entered first."""
    job = make_gradient_job(range(5), every=2)
    world = World()
    run(job, world, SimulatedPool(world, order="last"))
    order = [key for _, key in world.events]
    for layer in (4, 3, 2, 1):
        begun, entered = order.index(f"backward/{layer - 1}/0"), order.index(f"gradient/0000{layer}")
        assert (entered < begun) == job.is_boundary(layer)


@pytest.mark.parametrize("way", ["narrow", "dies", "dies while summing", "lost"])
@pytest.mark.parametrize("name", ["gradient", "gradient-every-2", "gradient-local"])
def test_gradients_that_are_summed_again(name: str, way: str) -> None:
    """With a wider grid, after a worker's death, or after a sum was lost: nothing else is done or stored again."""
    job, mid = JOBS[name](), "gradient-mid-1-1"
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world)
    if way == "narrow":
        pool.narrow = frozenset({mid})
    elif way == "lost":
        pool.fail_on[f"total/gradient/2/{mid}"] = LostInputError("gone", (f"add/gradient/2/{mid}/0",))
    else:
        pool.die_before["collect/gradient/2/worker-0" if way == "dies" else "backward/2/0"] = "worker-0"
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert pool.drained == 0
    again = Counter(unit.key for unit in backwards(world)) - Counter(unit.key for unit in backwards(expected))
    assert (sum(again.values()) > 0) == (way != "dies while summing")
    stored = [unit.key for unit in backwards(world) if unit.store]
    assert stored == [unit.key for unit in backwards(expected) if unit.store]


def test_sums_that_are_taken_again_store_no_inputs_again() -> None:
    world = World()
    pool = SimulatedPool(world)
    pool.narrow = frozenset({"q.in-1-1"})
    run(make_gradient_job(ALL), world, pool)
    kept = [unit.keep_inputs for unit in forwards(world) if not unit.cosine]
    assert kept == [False] * (2 * len(ALL))


def test_another_budget_takes_no_pass_over_the_model() -> None:
    job = make_gradient_job(ALL)
    first, _ = run(job)
    again = solve_again(first)
    run(replace(job, allocate=lambda scores: {key: {"rank": 7} for key in job.allocate(scores)}), again)
    assert {type(unit).__name__ for unit in again.done} == {"Solve", "Write"}
    assert not again.repairs


def test_gradients_asked_for_later_need_no_moment_again() -> None:
    """An allocation by loss after one without: the dense pass only keeps what the backward pass needs."""
    tasks = make_tasks(ALL, ["loss-mlp"])
    plain = tuple(replace(task, moments=(MLP,)) for task in tasks)
    world, _ = run(make_job(plain, propagate="dense", keep_statistics=True, scores=frozenset()))
    again = solve_again(world)
    job = make_gradient_job(ALL, ["loss-mlp"])
    run(job, again)
    assert all(unit.moments == () and unit.keep_inputs for unit in forwards(again))
    assert {unit.moments for unit in backwards(again)} == {(OUT,)}
    fresh, _ = run(job)
    assert results(again) == results(fresh)


def test_moments_asked_for_later_are_added_to_those_there_are() -> None:
    few = tuple(replace(task, moments=(MLP,)) for task in make_tasks(ALL, ["mlp"]))
    world, _ = run(make_job(few, propagate="dense", keep_statistics=True, scores=frozenset()))
    again = solve_again(world)
    run(make_job(make_tasks(ALL, ["mlp"]), propagate="dense", keep_statistics=True, scores=frozenset()), again)
    assert {unit.moments for unit in again.done if isinstance(unit, Forward)} == {(SHARED,)}
