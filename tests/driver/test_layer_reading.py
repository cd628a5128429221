"""Layers that are read once for all nodes, ahead of the pass."""

from __future__ import annotations

import pytest

from manifests.errors import LostInputError
from pipeline.units.reads import ReadLayer
from pipeline.units.sums import ChooseGrids
from pipeline.units.units import Unit
from tests.driver.simulation import SimulatedPool, World, forwards, make_job, make_tasks, run

LAYERS = range(5)


def reads(world: World) -> list[ReadLayer]:
    return [unit for unit in world.done if isinstance(unit, ReadLayer)]


def pool_of(world: World, nodes: int, order: str | int = "first") -> SimulatedPool:
    pool = SimulatedPool(world, order=order, size=2 * nodes)
    pool.workers_per_node = 2
    return pool


@pytest.mark.parametrize("order", ["first", "last", 3])
@pytest.mark.parametrize("propagate", ["dense", "compressed"])
def test_each_node_reads_a_part_of_every_layer_of_the_dense_pass(propagate: str, order: str | int) -> None:
    job = make_job(make_tasks(LAYERS), num_layers=len(LAYERS), propagate=propagate)
    expected, _ = run(job)
    world = World()
    run(job, world, pool_of(world, 3, order))
    assert world.journal() == expected.journal()
    near = [("worker-0", "worker-1"), ("worker-2", "worker-3"), ("worker-4", "worker-5")]
    found = sorted(reads(world), key=lambda unit: (unit.layer, unit.part))
    assert found == [ReadLayer(layer, part, 3, near[part]) for layer in LAYERS for part in range(3)]
    for unit in forwards(world):
        assert len(unit.weights) == (3 if unit.lineage == "dense" else 0)
        assert len(unit.ahead_weights) == (3 if unit.lineage == "dense" and unit.layer < LAYERS[-1] else 0)


def test_on_one_node_every_worker_reads_for_itself() -> None:
    world, _ = run(make_job(make_tasks(LAYERS), num_layers=len(LAYERS), propagate="dense"))
    assert not reads(world)
    assert not any(unit.weights or unit.ahead_weights for unit in forwards(world))


def test_a_layer_is_let_go_of_when_its_pass_is_over() -> None:
    """Of a long model three layers are held: the one in hand, the next, and the one that is being read."""
    most = 0

    class Counting(SimulatedPool):
        def submit(self, unit: Unit) -> None:
            nonlocal most
            super().submit(unit)
            if not isinstance(unit, ChooseGrids):  # once for each layer
                return
            held = [handle for ref in world.handles if (handle := ref()) and handle.value.startswith("weights")]
            most = max(most, len({handle.value.split()[1] for handle in held}))
            world.done.clear()  # which would hold them all

    world = World()
    pool = Counting(world, size=4)
    pool.workers_per_node = 2
    run(make_job(make_tasks(range(12)), num_layers=12, propagate="dense", scores=frozenset()), world, pool)
    assert most == 3


def test_a_pass_goes_on_when_a_read_is_lost_with_its_worker() -> None:
    job = make_job(make_tasks(LAYERS), num_layers=len(LAYERS), propagate="dense")
    expected, _ = run(job)
    world = World()
    pool = pool_of(world, 2)
    pool.fail_on["readlayer/2/1"] = LostInputError("gone with its node")
    run(job, world, pool)
    assert world.journal() == expected.journal()
