"""The walk behind compressed layers, over a simulated cluster: what is in memory, what is stored, and what a layer is
solved from.

`test_driver.py` has the order of its units and commits, `test_resume.py` kills it anywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from manifests.errors import LostInputError
from manifests.records import ArrayRecord
from pipeline.driver.job_spec import Job
from pipeline.methods.method import Moment
from pipeline.units.sums import Collect, Summed, Total
from pipeline.units.units import Forward, Solve, SolveDone, Unit, Unwritten
from tests.driver.simulation import (
    ALL,
    MID,
    MLP,
    OUT,
    Handle,
    SimulatedPool,
    World,
    commits,
    forwards,
    make_experts_job,
    make_gradient_job,
    make_job,
    make_tasks,
    run,
    run_until,
    solves,
)

SAMPLE = Moment("down.in", kind="sample", tokens=9)


def uniform(layers: Sequence[int] = ALL, **settings: Any) -> Job:
    return make_job(make_tasks(layers), scores=frozenset(), **settings)


class Forgetful(SimulatedPool):
    """Knows how many layers have factors in memory whenever a unit of some kind begins. Holds no unit itself."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.factors: list[tuple[int, weakref.ref[Handle]]] = []
        self.seen: list[tuple[Unit, set[int]]] = []

    def _execute(self, unit: Unit) -> Any:
        self.world.done.clear()
        held = {layer for layer, handle in self.factors if handle() is not None}
        self.seen.append((replace(unit, factors=()) if hasattr(unit, "factors") else unit, held))
        result = super()._execute(unit)
        if isinstance(unit, Solve):
            assert isinstance(result, SolveDone)
            self.factors += [(unit.task.layer, weakref.ref(handle)) for handle in result.handles]
        if isinstance(unit, Forward) and isinstance(unit.staged, Unwritten):
            self.seen[-1] = (replace(unit, staged=None, emit=True), held)
        return result


def test_the_factors_of_one_layer_are_in_memory() -> None:
    """They are freed before the next layer's moments are computed."""
    world = World()
    pool = Forgetful(world)
    run(uniform(range(6), num_layers=6), world, pool)
    summing = [(unit.layer, held) for unit, held in pool.seen if isinstance(unit, Forward) and unit.moments]
    assert [layer for layer, _ in summing] == [layer for layer in range(6) for _ in range(2)]
    assert all(held == set() for _, held in summing)
    passing = [(unit.layer, held) for unit, held in pool.seen if isinstance(unit, Forward) and unit.emit]
    assert passing == [(layer, {layer}) for layer in range(5) for _ in range(2)]


def test_each_layer_is_solved_from_moments_behind_the_compressed_ones() -> None:
    """Moments are those of hidden states that passed the layers before it with their solutions."""
    world, _ = run(uniform(shards=1))
    summing = [unit for unit in forwards(world) if unit.moments]
    assert [unit.staged for unit in summing] == [None] * 4, "the layer itself is dense"
    last = summing[-1]
    assert (last.lineage, last.base, last.replay) == ("compressed", 3, ())
    assert last.base_record is not None
    without = make_job(make_tasks([3]), num_layers=4, scores=frozenset(), shards=1)
    other, _ = run(without)
    assert other.journal()["layer/00003"] != world.journal()["layer/00003"]


@pytest.mark.parametrize("keep", [False, True])
def test_kept_moments_are_stored_beside_the_solves(keep: bool) -> None:
    """Layers are solved from sums in memory either way; only the entry needs the stored ones."""
    world, _ = run(uniform(keep_statistics=keep))
    assert all(isinstance(found, Summed) for unit in solves(world) for found in unit.statistics.values())
    totals = [unit for unit in world.done if isinstance(unit, Total)]
    assert len(totals) == (4 * 3 if keep else 0)
    assert [key for key in commits(world) if key.startswith("statistics")] == [
        f"statistics/{layer:05d}" for layer in ALL if keep
    ]


def test_samples_are_stored_and_moments_are_not() -> None:
    tasks = tuple(replace(task, moments=(*task.moments, SAMPLE)) for task in make_tasks(ALL, ["mlp"]))
    world, _ = run(make_job(tasks, scores=frozenset()))
    for unit in solves(world):
        kinds = {moment.kind: type(found) for moment, found in unit.statistics.items()}
        assert kinds == {"value": Summed, "sample": ArrayRecord}
    assert world.stores["statistic"] == {}


@pytest.mark.parametrize("keep", [False, True])
def test_moments_of_gradients_come_from_the_dense_model(keep: bool) -> None:
    """They are read from the backward pass, and are not entered again among those of the walk."""
    job = make_gradient_job(ALL, propagate="compressed", keep_statistics=keep)
    world, _ = run(job)
    backward = {layer: world.journal()[f"gradient/{layer:05d}"]["statistics"] for layer in ALL}
    for unit in solves(world):
        gradient = MID if unit.task.name == "loss-attention" else OUT
        found = unit.statistics[gradient]
        assert isinstance(found, ArrayRecord)
        assert world.values[found.path] == backward[unit.task.layer][gradient.key]
    if keep:
        entered = [world.journal()[f"statistics/{layer:05d}"]["statistics"].keys() for layer in ALL]
        assert entered == [{MLP.key, "q.in-1-1"}] * 4


def parts(world: World, kind: type[Any], layer: int) -> list[int | None]:
    return [unit.part for unit in world.done if isinstance(unit, kind) and unit.layer == layer and not unit.shard]


@pytest.mark.parametrize("keep", [False, True])
def test_slices_of_experts_are_passed_one_after_another(keep: bool) -> None:
    """Moments of earlier slices are stored even if they are not kept; those of the last are in memory."""
    world, _ = run(make_experts_job(scores=frozenset(), keep_statistics=keep))
    layer = [unit for unit in forwards(world) if unit.layer == 1 and unit.shard == 0]
    assert [(unit.part, unit.emit, bool(unit.moments)) for unit in layer] == [
        (0, False, True), (1, False, True), (2, False, True), (0, True, False), (1, True, False), (2, True, False),
    ]  # fmt: skip
    assert [unit.store for unit in layer] == [False] * 5 + [True]
    (solve,) = (unit for unit in solves(world) if unit.task.layer == 1 and unit.task.name == "expert-4")
    kinds = {moment.point: type(found) for moment, found in solve.statistics.items()}
    assert kinds == {"q.in": ArrayRecord, "experts.4.down.in": Summed}
    stored = {unit.moment.point for unit in world.done if isinstance(unit, Total) and unit.layer == 1}
    assert ("experts.4.down.in" in stored) == keep
    assert stored >= {"q.in", "o.in", "experts.0.down.in", "experts.3.down.in"}
    assert bool(world.stores["statistic"]) == keep


def test_entered_moments_are_not_computed_again() -> None:
    """The layer behind them was not entered, because the process ended in between."""
    job = uniform(keep_statistics=True)
    expected, world = World(), World()
    left: list[World] = []
    run(job, expected)
    run(job, World(left=left))
    world = next(each for each in left if "statistics/00002" in each.entries and "layer/00002" not in each.entries)
    world.done.clear()
    run(job, world)
    assert not [unit for unit in forwards(world) if unit.layer == 2 and unit.moments]
    assert {type(found) for unit in solves(world) if unit.task.layer == 2 for found in unit.statistics.values()} == {
        ArrayRecord
    }
    assert world.journal() == expected.journal()


def test_an_entered_layer_is_passed_as_it_was_written() -> None:
    """Its outputs were not committed; it is not solved again, and no dense pass stands in for it."""
    job = uniform()
    expected, _ = run(job)
    world = run_until(job, "forward/compressed/1/1/staged")
    if "layer/00001" not in world.entries:
        world = run_until(job, "collect/compressed/2/worker-0")
    run(job, world)
    assert not [unit for unit in solves(world) if unit.task.layer < 1]
    assert world.journal() == expected.journal()


@pytest.mark.parametrize("every", [2, 3])
def test_layers_since_the_last_commit_are_passed_again(every: int) -> None:
    """From the committed hidden states, through the layers that are entered, as they were written."""
    job = uniform(range(7), num_layers=7, every=every)
    expected, _ = run(job)
    world = run_until(job, "collect/compressed/5/worker-0")
    base = 5 - 5 % every
    _, recorder = run(job, world)
    first = forwards(world)[0]
    assert (first.layer, first.base) == (base, base)
    assert {unit.layer for unit in forwards(world)} == {*range(base, 7)}
    through = [unit for unit in forwards(world) if unit.layer < 5]
    assert all(unit.staged is not None and not isinstance(unit.staged, Unwritten) for unit in through)
    assert recorder.phases[-1] == ("walk", 7 - base, 4)
    assert world.journal() == expected.journal()


def test_factors_lost_while_the_layer_is_passed_cost_no_solve() -> None:
    """The layer is written by then, and is read from the disk. Any other loss goes through the driver's repair."""
    job = uniform()
    expected, _ = run(job)
    for producer, drained in (("solve/1/0/mlp", 0), ("forward/compressed/0/0/staged", 1)):
        world = World()
        pool = SimulatedPool(world, order="last")
        pool.fail_on["forward/compressed/1/0/staged"] = LostInputError("gone with its node", (producer,))
        run(job, world, pool)
        assert (pool.drained, world.repairs) == (drained, [("gone with its node", ())])
        assert len([unit for unit in solves(world) if unit.task.layer == 1]) == 2
        assert world.journal() == expected.journal()


def test_moments_that_are_not_kept_go_with_their_layer() -> None:
    """Nothing of an earlier layer is stored when the next one is summed."""
    tasks = tuple(replace(task, moments=(*task.moments, SAMPLE)) for task in make_tasks(ALL, ["mlp"]))

    class Watching(SimulatedPool):
        def _execute(self, unit: Unit) -> Any:
            if isinstance(unit, Collect):
                assert not world.stores["statistic"]
            return super()._execute(unit)

    world = World()
    run(make_job(tasks, scores=frozenset()), world, Watching(world))
    assert len(solves(world)) == 4


@pytest.mark.parametrize("every", [1, 2])
def test_hidden_states_of_one_commit_are_stored(every: int) -> None:
    """Those of the next one are written beside them, and the older ones are then dropped."""
    stored: list[int] = []

    class Watching(SimulatedPool):
        def wait(self) -> tuple[Unit, Any]:
            stored.append(len(world.stores["activation"]))
            return super().wait()

    world = World()
    run(uniform(range(6), num_layers=6, every=every, shards=3), world, Watching(world))
    assert max(stored) == 2 * 3 - 1, "the last shard is being passed"
    assert world.stores["activation"] == {}


def test_one_layer_alone() -> None:
    """It is solved and entered, and nothing is passed behind it."""
    world, recorder = run(uniform([0], num_layers=1))
    assert commits(world) == ["ranks", "layer/00000"]
    assert recorder.phases == [("walk", 1, 4)]
    assert [unit.emit for unit in forwards(world)] == [False, False]
