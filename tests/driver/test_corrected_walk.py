"""The driver's walk with corrections over a simulated cluster: the inputs of each part of a layer."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.errors import NumericsError
from pipeline.units.sums import Collect, Total
from pipeline.units.units import Pair, Reduce, Unit, Write
from tests.driver.simulation import JOBS, SimulatedPool, World, commits, make_corrected_job, run


class Remembering(SimulatedPool):
    """Keeps the records of written layers."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.written: list[tuple[Write, Any]] = []

    def _execute(self, unit: Unit) -> Any:
        result = super()._execute(unit)
        if isinstance(unit, Write):
            self.written.append((unit, result))
        return result


def pairs(world: World, shard: int = 0) -> list[Pair]:
    return [unit for unit in world.done if isinstance(unit, Pair) and unit.shard == shard]


def test_each_part_is_solved_behind_those_before() -> None:
    """Two groups: the first by two pairs, the second by the first of these and a later one."""
    world = World()
    pool = Remembering(world)
    run(JOBS["corrected-two"](), world, pool)
    paths = [record.path for write, record in pool.written if write.layer == 0]
    assert [
        (pair.step, pair.staged and pair.staged.path, [moment.point for moment in pair.moments])
        for pair in pairs(world)
        if pair.layer == 0
    ] == [
        (0, None, ["attention.in"]),
        (1, paths[0], ["o.in"]),
        (3, paths[1], ["down.in"]),
        (4, paths[2], []),
    ]
    assert [(pair.emit, pair.store, pair.ahead) for pair in pairs(world)] == [
        *[(False, False, None)] * 3, (True, True, 1), *[(False, False, None)] * 3,
    ]  # fmt: skip
    assert all(set(write.roles) == {"role-first", "role-second"} for write, _ in pool.written)
    assert {len(write.factors) for write, _ in pool.written} == {2}
    sums = [unit for unit in world.done if isinstance(unit, Collect) and unit.lineage == "paired"]
    assert [(unit.layer, *(moment.point for moment in unit.moments)) for unit in sums] == [
        (layer, point) for layer in (0, 1) for point in ("attention.in", "o.in", "down.in")
    ]
    assert not [unit for unit in world.done if isinstance(unit, Total | Reduce) and unit.lineage == "paired"]


def test_what_the_parts_of_a_group_say_is_all_entered() -> None:
    world, recorder = run(JOBS["corrected-two"]())
    entry = world.journal()["layer/00001"]
    parts = {"first": ["first.attention.in", "first.o.in"], "second": ["second.attention.in", "second.down.in"]}
    assert set(entry["forms"]) == {*parts, *parts["first"], *parts["second"]}
    for name, said in parts.items():
        assert set(entry["groups"][name]) == {"method", "ranks", "error", *said}
    assert recorder.layers[-2:] == [("compress", 0), ("compress", 1)]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_hidden_states_of_both_models_are_committed_at_the_boundaries(every: int) -> None:
    job = make_corrected_job(range(5), ["first"], every=every)
    world, recorder = run(job)
    assert [key for key in commits(world) if key.startswith("activations")] == [
        f"activations/{layer:05d}" for layer in range(every, 5, every)
    ]
    for pair in pairs(world):
        assert pair.base == pair.layer - pair.layer % every
    assert recorder.phases[-1] == ("correct", 5, 5 * job.shards)


@pytest.mark.parametrize(("every", "stopped"), [(1, 1), (1, 5), (2, 5)])
def test_an_interrupted_walk_goes_on_from_the_last_boundary(every: int, stopped: int) -> None:
    job = make_corrected_job(range(6), ["first"], every=every)
    world = World()
    pool = SimulatedPool(world)
    pool.fail_on[f"solve/{stopped}/0/first"] = NumericsError("stopped")
    with pytest.raises(NumericsError, match="stopped"):
        run(job, world, pool)
    world.done.clear()
    _, recorder = run(job, world)
    base = stopped - stopped % every
    assert {(pair.layer, pair.base) for pair in pairs(world)} == {
        (layer, layer - layer % every) for layer in range(stopped, 6)
    }
    assert recorder.phases[-1] == ("correct", 6 - base, 5 * job.shards)
