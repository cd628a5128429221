"""The walk that trains layers independently, over a simulated cluster: what layers are trained on, and in which order.

`test_resume.py` kills it anywhere, `test_driver.py` changes the order of its units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from manifests.errors import LostInputError
from manifests.method_entry import MIXED_SHARE
from pipeline.driver.job_spec import Job
from pipeline.units.units import Pair, Refine, Solve, Unit, Write
from tests.driver.simulation import (
    MemoryJournal,
    SimulatedPool,
    World,
    commits,
    make_job,
    make_refined_job,
    number_in,
    run,
    run_until,
)

KINDS = (Solve, Write, Pair, Refine)


def job_of(inputs: str, layers: Sequence[int] = range(5), **settings: Any) -> Job:
    return make_refined_job(layers, inputs=inputs, **{"shards": 1, **settings})


def story(world: World) -> list[str]:
    """Return the units of the walk, in order."""
    names = {Solve: "solve", Write: "write", Pair: "pair", Refine: "refine"}
    return [
        f"{'targets' if isinstance(unit, Pair) and unit.targets else names[type(unit)]} "
        f"{unit.task.layer if isinstance(unit, Solve) else unit.layer}"
        for unit in world.done
        if isinstance(unit, KINDS)
    ]


def pairs(world: World) -> list[Pair]:
    return [unit for unit in world.done if isinstance(unit, Pair)]


class Watching(SimulatedPool):
    """Notes how many drafts and hidden states are stored at each wait, and the results of units."""

    def __init__(self, world: World, size: int = 2) -> None:
        super().__init__(world, size=size)
        self.stored: list[int] = []
        self.results: dict[str, list[Any]] = {}

    def wait(self) -> tuple[Unit, Any]:
        self.stored.append(len(self.world.stores["activation"]))
        return super().wait()

    def _execute(self, unit: Unit) -> Any:
        result = super()._execute(unit)
        self.results.setdefault(unit.key, []).append(result)
        return result


@pytest.mark.parametrize("inputs", ["dense", "mixed"])
def test_a_batch_of_layers_is_solved_passed_and_trained_before_the_next(inputs: str) -> None:
    """Two workers: two layers each time, and a last batch of one."""
    world = World()
    run(job_of(inputs), world, Watching(world))
    batches = [(0, 1), (2, 3), (4,)]
    expected: list[str] = []
    for batch in batches:
        for kind in ("solve", "write", "targets", "refine", "write"):
            expected += [f"{kind} {layer}" for layer in batch]
    assert story(world) == expected
    assert commits(world)[-5:] == [f"layer/{layer:05d}" for layer in range(5)]


@pytest.mark.parametrize(("workers", "batches"), [(0, 5), (1, 5), (3, 2), (9, 1)])
def test_there_are_as_many_batches_as_workers_need(workers: int, batches: int) -> None:
    """The bytes do not depend on it."""
    expected, world = World(), World()
    run(job_of("mixed"), expected)
    run(job_of("mixed"), world, SimulatedPool(world, size=workers))
    assert world.journal() == expected.journal()
    trained = [name.partition(" ")[0] == "refine" for name in story(world)]
    assert sum(now and not before for before, now in zip([False, *trained], trained, strict=False)) == batches


def test_targets_of_the_dense_model_are_independent_of_all_solutions() -> None:
    """No unit passes a compressed layer, and none reads hidden states of a commit."""
    world, recorder = run(job_of("dense", shards=2))
    assert {(pair.staged, *pair.replay, pair.base_record) for pair in pairs(world)} <= {
        (None,) * (2 + count) for count in range(5)
    }
    assert {pair.share for pair in pairs(world)} == {1.0}
    assert [(pair.layer, pair.shard) for pair in pairs(world)] == [(layer, s) for layer in range(5) for s in (0, 1)]
    assert not [key for key in commits(world) if key.startswith("activations")]
    assert recorder.phases[-1] == ("correct", 5, 2)


def test_mixed_targets_pass_the_solved_layers_before_they_are_trained() -> None:
    """With a quarter of their error; layers of earlier batches, too, are passed as they were solved."""
    world = World()
    pool = Watching(world)
    run(job_of("mixed"), world, pool)
    drafts = [pool.results[f"write/{layer}"][0].path for layer in range(5)]
    trained = [pool.results[f"write/{layer}"][1].path for layer in range(5)]
    assert {*drafts}.isdisjoint(trained)
    for pair in pairs(world):
        assert [staged and staged.path for staged in (*pair.replay, pair.staged)] == drafts[: pair.layer + 1]
        assert (pair.share, pair.base) == (MIXED_SHARE, 0)
    refined = [unit for unit in world.done if isinstance(unit, Refine)]
    assert [unit.staged.path for unit in refined] == drafts
    assert [world.journal()[f"layer/{layer:05d}"]["staged"] for layer in range(5)] == [
        world.values[path] for path in trained
    ]


@pytest.mark.parametrize("inputs", ["dense", "mixed"])
def test_training_data_is_dropped_with_its_batch(inputs: str) -> None:
    world = World()
    pool = Watching(world)
    run(job_of(inputs, shards=3), world, pool)
    assert max(pool.stored) == 2 * 3
    assert world.stores["activation"] == {}
    assert len(world.stores["staged"]) == 5, "and the drafts"


def test_layers_without_training_are_solved_and_entered() -> None:
    """Layer 1 is unclaimed, layer 2 is not trained: both are passed, for layer 3, and give no targets."""
    tasks = (
        *make_refined_job([0, 3], inputs="dense").tasks,
        *make_refined_job([2], groups=["free"], inputs="dense").tasks,
    )
    tasks = tuple(sorted(tasks, key=lambda task: task.layer))
    job = make_job(tasks, num_layers=6, propagate="dense", keep_statistics=True, scores=frozenset(), shards=1)
    world, _ = run(job)
    assert story(world) == [
        "solve 0", "solve 2", "write 0", "write 2", "targets 0", "pair 1", "pair 2", "refine 0", "write 0",
        "solve 3", "write 3", "targets 3", "refine 3", "write 3",
    ]  # fmt: skip
    entries = world.journal()
    assert [key for key in commits(world) if key.startswith("layer")] == ["layer/00000", "layer/00002", "layer/00003"]
    assert "refined" in entries["layer/00000"]
    assert "refined" not in entries["layer/00002"]


def test_the_last_layer_emits_nothing() -> None:
    world, _ = run(job_of("dense", [0, 2], num_layers=4))
    assert [(pair.layer, pair.emit, pair.store, pair.targets, pair.ahead) for pair in pairs(world)] == [
        (0, True, True, True, 1), (1, True, False, False, 2), (2, False, True, True, None),
    ]  # fmt: skip


def test_a_resumed_walk_of_dense_inputs_repeats_the_layers_in_training() -> None:
    """Of layers 2 and 3 neither is entered. The pass starts at the embeddings, through layers that are not solved."""
    job = job_of("dense")
    expected, _ = run(job)
    world = run_until(job, "refine/3")
    assert commits(world)[-1] == "layer/00001"
    run(job, world)
    assert story(world)[:8] == [
        "solve 2", "solve 3", "write 2", "write 3", "pair 0", "pair 1", "targets 2", "targets 3",
    ]  # fmt: skip
    assert Counter(commits(world))["layer/00001"] == 1
    assert world.journal() == expected.journal()


def test_a_resumed_walk_of_mixed_inputs_solves_all_layers_again() -> None:
    """Because the pass goes through the solved layers, not the trained ones; entered layers are not trained again."""
    job = job_of("mixed", keep_statistics=False)
    expected, _ = run(job)
    world = run_until(job, "refine/3")
    _, recorder = run(job, world)
    assert story(world) == [
        "solve 0", "solve 1", "write 0", "write 1", "pair 0", "pair 1",
        "solve 2", "solve 3", "write 2", "write 3", "targets 2", "targets 3", "refine 2", "refine 3", "write 2",
        "write 3", "solve 4", "write 4", "targets 4", "refine 4", "write 4",
    ]  # fmt: skip
    assert recorder.phases[-1] == ("correct", 3, 1)
    assert world.journal() == expected.journal()
    assert Counter(commits(world))["layer/00001"] == 1


@pytest.mark.parametrize("lost", [2, 3])
@pytest.mark.parametrize("inputs", ["dense", "mixed"])
def test_a_layer_that_is_lost_is_trained_alone(inputs: str, lost: int) -> None:
    """The layers behind it are entered; with mixed inputs, those before it are solved again."""
    job = job_of(inputs)
    world, _ = run(job)
    expected = world.journal()
    MemoryJournal(world).retract(f"layer/{lost:05d}")
    world.done.clear()
    run(job, world)
    trained = [name for name in story(world) if name.startswith(("refine", "targets"))]
    assert trained == [f"targets {lost}", f"refine {lost}"]
    assert world.journal() == expected


def test_a_last_layer_without_training_is_not_passed() -> None:
    first, last = (
        make_refined_job([layer], groups=[name], inputs="dense") for layer, name in ((0, "mlp"), (1, "free"))
    )
    tasks = (*first.tasks, *last.tasks)
    job = make_job(tasks, num_layers=2, propagate="dense", keep_statistics=True, scores=frozenset(), shards=1)
    world, _ = run(job)
    assert [pair.layer for pair in pairs(world)] == [0]
    assert commits(world)[-1] == "layer/00001"


def test_a_finished_walk_does_nothing() -> None:
    job = job_of("mixed")
    world, _ = run(job)
    world.done.clear()
    run(job, world)
    assert world.done == []


@pytest.mark.parametrize("inputs", ["dense", "mixed"])
@pytest.mark.parametrize("unit", ["refine/2", "write/3", "targets/3/0/0"])
def test_a_loss_repeats_the_batch(inputs: str, unit: str) -> None:
    """Layers of earlier batches are not trained again."""
    job = job_of(inputs)
    expected, world = World(), World()
    run(job, expected)
    pool = SimulatedPool(world)
    pool.fail_on[unit] = LostInputError("gone with its node")
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert world.repairs == [("gone with its node", ())]
    trained = Counter(name for name in story(world) if name.startswith("refine"))
    assert (trained["refine 0"], trained["refine 1"]) == (1, 1)


@pytest.mark.parametrize("layer", range(5))
def test_a_draft_that_is_damaged_is_solved_again(layer: int) -> None:
    """No ledger entry names it: read in the pass of later layers, and in the training."""
    job = job_of("mixed")
    expected, world = World(), World()
    pool = Watching(expected)
    run(job, expected, pool)
    draft = pool.results[f"write/{layer}"][0].path
    world.damaged = frozenset({number_in(draft)})
    run(job, world)
    assert world.journal() == expected.journal()
    assert world.repairs == [(f"{draft}: damaged", ())]


def test_training_data_that_is_damaged_is_computed_again() -> None:
    job = job_of("dense")
    expected, world = World(), World()
    pool = Watching(expected)
    run(job, expected, pool)
    targets = pool.results["targets/2/0/0"][0].activation.path
    world.damaged = frozenset({number_in(targets)})
    run(job, world)
    assert world.journal() == expected.journal()
    assert world.repairs == [(f"{targets}: damaged", ())]
