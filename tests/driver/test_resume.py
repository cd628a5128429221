"""The driver over a simulated cluster: killed, stopped, with damaged stores and lost workers, it ends the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from manifests.errors import CorruptError, Interrupted, LostInputError, NumericsError, WorkerError
from pipeline.driver.dense_walk import layers_behind
from pipeline.driver.job_spec import Job, trains_independently
from pipeline.units.sums import Add, Total
from pipeline.units.units import Forward, Solve, SumUnit, Unwritten
from tests.driver.simulation import (
    ALL,
    IMPORTANCE,
    JOBS,
    MLP,
    Killed,
    MemoryJournal,
    SimulatedPool,
    World,
    commits,
    forwards,
    make_job,
    make_tasks,
    number_in,
    run,
    run_with_a_death,
)

# Interruption ---------------------------------------------------------------------------------------------------------


def passes_of_a_layer(job: Job) -> int:
    """From the last commit: here every pass through a layer starts there, and up to two layers are in hand."""
    parts = max(len(job.parts(layer, ())) for layer in range(job.num_layers))
    return job.shards * parts * sum(range(1, job.every + 1))


@pytest.mark.sample(12)
def test_killed_anywhere_it_goes_on(job: Job) -> None:
    left: list[World] = []
    expected, _ = run(job, World(left=left))
    assert len(left) > 4
    for number, world in enumerate(left):
        run(job, world)
        assert world.journal() == expected.journal(), f"killed at {number}"
        assert not world.repairs
        # Corrections go through a layer several times.
        corrects = any(task.corrections or task.refine for task in job.tasks)
        again = passes_of_a_layer(job) * (8 if corrects else 1)
        if any(
            map(trains_independently, job.tasks)
        ):  # the whole dense pass of both models, each layer from the embeddings
            again += job.shards * job.num_layers * (job.num_layers + 1)
        if job.solves_in_pass():  # from a commit on, each from there
            again = job.shards * sum(range(layers_behind(2) + job.every + 1))
        assert world.passes <= expected.passes + again, f"killed at {number}"
        assert world.backward_passes <= expected.backward_passes + passes_of_a_layer(job), f"killed at {number}"
        assert {kind: sorted(live.values()) for kind, live in world.stores.items() if kind != "staged"} == {
            kind: sorted(live.values()) for kind, live in expected.stores.items() if kind != "staged"
        }, f"killed at {number}"
        assert world.life == 2


@pytest.mark.sample(12)
def test_killed_again_and_again_it_gets_there(job: Job) -> None:
    expected, _ = run(job)
    source = random.Random(7)
    world = World()
    most = (
        60 if any(task.corrections or task.refine for task in job.tasks) else 25
    )  # a corrected layer is entered when it is finished
    most = len(expected.events) if job.solves_in_pass() or max(job.experts, default=0) > job.held_experts else most
    for _ in range(10_000):
        world.fuel = source.randrange(5, most)
        try:
            run(job, world, SimulatedPool(world, order=source.randrange(1000)))
            break
        except Killed:
            continue
    assert world.journal() == expected.journal()
    assert world.life > 2


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["compressed", "compressed-every-2", "dense", "free"])
def test_stopped_at_any_wait_it_goes_on(name: str) -> None:
    job = JOBS[name]()
    expected, _ = run(job)
    for waits in range(len(expected.done)):
        world = World()
        pool = SimulatedPool(world)
        pool.stop_after = waits
        with pytest.raises(Interrupted):
            run(job, world, pool)
        assert pool.drained == 0
        run(job, world)
        assert world.journal() == expected.journal()
        repeated = sum((work_of(world) - work_of(expected)).values())
        assert repeated <= max(job.shards + 4, 2 * len(make_tasks([0])) + 1)


def work_of(world: World) -> Counter[str]:
    """All that a worker takes time for."""
    return Counter(unit.key for unit in world.done if not isinstance(unit, SumUnit))


# Damage and loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "compressed",
        "compressed-kept",
        "compressed-every-2",
        "dense",
        "dense-dropped",
        "corrected",
        "corrected-every-2",
    ],
)
def test_any_record_may_be_corrupt(name: str) -> None:
    """Whichever stored data is damaged, as soon as it is written: the job ends with the same journal."""
    job = JOBS[name]()
    expected, _ = run(job)
    found = 0
    for number in range(len(expected.values)):
        world, _ = run(job, World(damaged=frozenset({number})))
        assert world.journal() == drop_unused(expected.journal(), world.journal()), f"record {number} damaged"
        found += bool(world.repairs)
        for reason, keys in world.repairs:
            assert keys or job.tasks[0].corrections, reason  # no entry names what a layer in hand is made of
    assert found > len(expected.values) // 3  # staged layers are not read before the job ends


def drop_unused(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A repair forgets committed hidden states, and walks on without entering them again where nobody needs them."""
    gone = {key for key in expected if key.startswith("activations/") and key not in found}
    kept = {key: entry for key, entry in expected.items() if key not in gone}
    for key, entry in found.items():
        if key.startswith("dense/") and "activations" not in entry:
            kept[key] = {name: value for name, value in kept[key].items() if name != "activations"}
    return kept


@pytest.mark.parametrize(
    ("propagate", "kind"),
    [
        ("dense", "statistic"),
        ("dense", "activation"),
        *(("compressed", kind) for kind in ("activation", "staged")),
    ],
)
def test_deep_models_are_repaired_in_a_few_rounds(kind: str, propagate: str) -> None:
    """The way back is the number of layers long, as older hidden states are gone; the number of rounds is not."""
    every = 3 if kind == "staged" else 1  # else nobody reads what was written
    tasks = make_tasks(range(30), ["mlp"])
    scores = IMPORTANCE if propagate == "dense" else frozenset()  # else layers are solved from memory
    job = make_job(tasks, num_layers=30, shards=1, propagate=propagate, scores=scores, every=every)
    expected, _ = run(job)
    numbers = [number_in(path) for path in expected.values if path.startswith(kind)]
    last_read = -2 if kind == "staged" else -1
    world, _ = run(job, World(damaged=frozenset({numbers[last_read]})))
    entries, wanted = world.journal(), expected.journal()
    for layer in range(30):
        assert entries[f"layer/{layer:05d}"] == wanted[f"layer/{layer:05d}"]
    assert 1 <= len(world.repairs) <= 4


def test_everything_staged_may_vanish() -> None:
    job = make_job(make_tasks(range(12)), num_layers=12, shards=1)
    expected, _ = run(job)
    whole, _ = run(job, World(fuel=10_000))
    assert whole.fuel is not None
    world = World(fuel=(10_000 - whole.fuel) * 5 // 6)
    with pytest.raises(Killed):
        run(job, world)
    world.fuel = None
    assert 6 < len(world.stores["staged"]) < 12
    world.stores = {kind: {} for kind in world.stores}
    run(job, world)
    for layer in range(12):
        assert world.journal()[f"layer/{layer:05d}"] == expected.journal()[f"layer/{layer:05d}"]


def test_corrupt_statistics_are_taken_back_and_taken_anew() -> None:
    job = make_job(make_tasks(ALL), propagate="dense", keep_statistics=True)
    expected, _ = run(job)
    key = "dense/00002"
    value = next(iter(expected.journal()[key]["statistics"].values()))
    number = expected.number_of(value)
    world = World(damaged=frozenset({number}))
    pool = SimulatedPool(world)
    _, recorder = run(job, world, pool)
    assert world.repairs[0] == (f"statistic/{number:032x}: damaged", (key,))
    assert ("retract", key) in world.events
    assert commits(world).count(key) == 2
    assert pool.drained == len(world.repairs)
    # Layers that were entered before are not run again for their statistics.
    assert Counter(commits(world))["dense/00003"] == 1
    assert recorder.summaries.keys() == set(ALL)


def test_corrupt_hidden_states_take_the_way_back_to_the_embeddings() -> None:
    job = JOBS["compressed-uniform"]()
    expected, _ = run(job)
    number = expected.number_of(expected.journal()["activations/00002"]["activations"][0])
    world, _ = run(job, World(damaged=frozenset({number})))
    assert world.repairs == [(f"activation/{number:032x}: damaged", ("activations/00002",))]
    retracted = [key for event, key in world.events if event == "retract"]
    assert sorted(retracted) == ["activations/00001", "activations/00002"]
    walked = [unit.layer for unit in forwards(world) if unit.shard == 0 and unit.staged]
    assert walked == [0, 1, 0, 1, 2]
    assert commits(world).count("activations/00002") == 2
    assert commits(world).count("layer/00001") == 1


def test_dense_statistics_outlive_their_hidden_states() -> None:
    """Hidden states of the dense pass are damaged: its cosines and statistics stay entered."""
    job = JOBS["dense"]()
    expected, _ = run(job)
    (first, *_) = expected.journal()["dense/00001"]["activations"]
    number = expected.number_of(first)
    world, _ = run(job, World(damaged=frozenset({number})))
    assert len(world.repairs) == 1
    assert commits(world).count("dense/00001") == 2
    assert not [key for event, key in world.events if event == "retract"]
    assert Counter(unit.key for unit in world.done if isinstance(unit, Total)).most_common(1)[0][1] == 1


def test_data_that_stays_corrupt_ends_the_job() -> None:
    with pytest.raises(CorruptError, match="damaged") as raised:
        run(JOBS["compressed"](), World(damaged=frozenset(range(10_000))))
    assert raised.value.path


def test_corrupt_data_that_no_entry_names_ends_the_job() -> None:
    world = World()
    pool = SimulatedPool(world)
    pool.fail_on["forward/dense/1/0/dense"] = CorruptError("tokens: damaged", "tokens/0")
    with pytest.raises(CorruptError, match="tokens: damaged"):
        run(JOBS["compressed"](), world, pool)
    assert not world.repairs


@pytest.mark.parametrize(
    "key",
    [
        "add/compressed/1/down.in-1-1/0",
        "total/compressed/1/down.in-1-1",
        "checkgrids/compressed/3",
        "choosegrids/compressed/2",
        "collect/compressed/1/worker-0",
        "write/2",
        "forward/dense/1/0/dense",
        "solve/3/0/mlp",
    ],
)
def test_lost_results_are_made_again(key: str) -> None:
    job = JOBS["compressed-kept"]()
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world, order="last")
    pool.fail_on[key] = LostInputError("gone with its worker")
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert world.repairs == [("gone with its worker", ())]
    assert pool.drained == 1
    assert not [event for event, _ in world.events if event == "retract"]


@pytest.mark.parametrize("name", ["compressed", "dense"])
def test_sums_that_were_given_up_are_in_no_later_driver_s(name: str) -> None:
    """Its workers may be another's before: of a size that was tried, of a draft, of an attempt before."""
    job = JOBS[name]()
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world)
    pool.fail_on[f"forward/{name}/1/1/dense"] = LostInputError("gone with its node")
    run(job, world, pool)
    given_up = {passed for passes in pool.sums.values() for passed in passes}
    for key in world.journal():
        MemoryJournal(world).retract(key)
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert not given_up, "what was given up is let go of when the next pass but one begins"


@pytest.mark.parametrize(
    ("consumer", "producers"),
    [
        ("add/compressed/1/down.in-1-1/1", ["collect/compressed/1/worker-1"]),
        ("checkgrids/compressed/1", ["collect/compressed/1/worker-1"]),
        (
            "add/compressed/2/q.in-1-1/0",
            ["collect/compressed/2/worker-0", "collect/compressed/2/worker-1"],
        ),
        ("write/2", ["solve/2/0/mlp"]),
    ],
)
def test_only_what_was_lost_is_made_again(consumer: str, producers: list[str]) -> None:
    """A node is gone with the results of some units: what the others did stands."""
    job = JOBS["compressed"]()
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world)
    pool.fail_on[consumer] = LostInputError("gone with its node", tuple(producers))
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert world.repairs == [("gone with its node", ())]
    kinds = (Forward, Solve)
    again = Counter(unit.key for unit in world.done if isinstance(unit, kinds))
    again -= Counter(unit.key for unit in expected.done if isinstance(unit, kinds))
    # What a worker gave away was summed over the shards that it had: one of two.
    lost = [key if key.startswith("solve") else shard_of(key, world) for key in producers]
    assert sorted(again.elements()) == lost


@pytest.mark.parametrize("lost", ["first", "last"])
def test_factors_lost_before_they_were_gone_through_are_read_as_written(lost: str) -> None:
    """No group is solved again: by then the layer is entered."""
    job = JOBS["compressed"]()
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world, order=lost)
    pool.fail_on["forward/compressed/1/1/staged"] = LostInputError("gone with its node", ("solve/1/0/mlp",))
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert world.repairs == [("gone with its node", ())]
    assert pool.drained == 0
    assert Counter(unit.key for unit in world.done if isinstance(unit, Solve)).most_common(1)[0][1] == 1
    through = [unit.staged for unit in forwards(world) if unit.staged and unit.layer == 1]
    assert [isinstance(staged, Unwritten) for staged in through].count(False) == job.shards


def test_outputs_are_made_while_their_layer_is_written() -> None:
    """And nothing is entered of them before it."""
    world = World()
    run(JOBS["compressed"](), world, SimulatedPool(world, order="last"))
    order = [key for _, key in world.events]
    assert order.index("forward/compressed/2/0/staged") < order.index("write/2") < order.index("layer/00002")
    assert order.index("layer/00002") < order.index("activations/00003")


@pytest.mark.parametrize("name", ["dense-uniform-kept", "dense-every-3", "compressed-kept"])
def test_sums_lost_on_their_way_to_the_store_are_taken_again(name: str) -> None:
    """Added, their parts are with nobody any more: all shards are summed again, and nothing else is done again."""
    job = JOBS[name]()
    lineage = "compressed" if name.startswith("compressed") else "dense"
    expected, _ = run(job, pool=None)
    world = World()
    pool = SimulatedPool(world, size=3)
    gone = f"add/{lineage}/1/down.in-1-1/0" if job.shards > 1 else "collect/dense/1/worker-1"
    pool.fail_on[f"total/{lineage}/1/down.in-1-1"] = LostInputError("gone with its node", (gone,))
    run(job, world, pool)
    assert world.journal() == expected.journal()
    assert world.repairs == [("gone with its node", ())]
    again = [unit for unit in forwards(world) if unit.sums is not None and unit.layer == 1]
    assert len(again) == 2 * job.shards
    assert Counter(unit.key for unit in world.done if isinstance(unit, Solve)).most_common(1)[0][1] == 1


@pytest.mark.parametrize("lost", [None, "add/dense/1/q.in-1-1/1/node-0", "add/dense/1/q.in-1-1/0"])
def test_sums_are_added_on_each_node_before_they_cross(lost: str | None) -> None:
    """Five workers on three nodes: what crosses are three sums of each part; the last node's as its worker gave it."""
    job = make_job(make_tasks(range(2)), num_layers=2, shards=10, propagate="dense")
    expected, world = World(), World()
    run(job, expected, SimulatedPool(expected, size=1))
    pool = SimulatedPool(world, size=5)
    pool.workers_per_node = 2
    if lost is not None:
        pool.fail_on["total/dense/1/q.in-1-1"] = LostInputError("gone with its node", (lost,))
    run(job, world, pool)
    assert world.journal() == expected.journal()
    adds = [unit for unit in world.done if isinstance(unit, Add) and unit.layer == 0]
    near = {unit.node: unit.near for unit in adds}
    assert near == {"node-0": ("worker-0", "worker-1"), "node-1": ("worker-2", "worker-3"), "": ()}
    assert {len(unit.partials) for unit in adds if unit.node} == {2}
    assert {len(unit.partials) for unit in adds if not unit.node} == {3}
    assert len(forwards(world)) == (20 if lost is None else 30)


def shard_of(collect: str, world: World) -> str:
    _, lineage, layer, worker = collect.split("/")
    return f"forward/{lineage}/{layer}/{worker[-1]}/dense"


@pytest.mark.parametrize("when", ["forward/compressed/1/2/dense", "collect/compressed/1/worker-0"])
def test_a_worker_s_death_costs_the_shards_in_its_sums(when: str) -> None:
    """Three workers have two shards each: those of the dead are done again, by whoever is there, and nothing else."""
    job = make_job(make_tasks(ALL), shards=6)
    world, again = run_with_a_death(job, when)
    lost = [unit for unit in forwards(world) if unit.key in again and not unit.emit and not unit.cosine]
    assert {unit.layer for unit in lost} == {1}
    assert len(again) == (1 if when.startswith("forward") else 2)


def test_a_moment_beyond_its_grid_is_taken_again_alone() -> None:
    job = make_job(make_tasks(ALL), propagate="dense")
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world)
    pool.narrow = frozenset({"down.in-1-1"})
    run(job, world, pool)
    assert world.journal() == expected.journal()
    again = [unit for unit in forwards(world) if not unit.cosine]
    assert [(unit.layer, unit.shard) for unit in again] == [(layer, shard) for layer in ALL for shard in range(2)]
    assert {unit.moments for unit in again} == {(MLP,)}
    assert not any(unit.emit or unit.store for unit in again)


class Losing(SimulatedPool):
    """Loses the first result of every layer's statistics, `times` times each."""

    def __init__(self, world: World, times: int) -> None:
        super().__init__(world)
        self.left = Counter({f"checkgrids/compressed/{layer}": times for layer in range(40)})

    def wait(self) -> tuple[Any, Any]:
        key = self.pending[0].key
        if self.left[key] > 0:
            self.left[key] -= 1
            error = LostInputError(f"{key}: lost")
            error.unit = self.pending.pop(0).key
            raise error
        return super().wait()


def test_a_long_job_survives_any_number_of_losses_that_it_gets_past() -> None:
    job = make_job(make_tasks(range(20)), num_layers=20, shards=1, scores=frozenset())
    expected, _ = run(job)
    world = World()
    run(job, world, Losing(world, times=2))
    assert world.journal() == expected.journal()
    assert len(world.repairs) == 40


def test_a_loss_that_comes_back_each_time_ends_the_job() -> None:
    world = World()
    with pytest.raises(LostInputError):
        run(JOBS["compressed-uniform"](), world, Losing(world, times=1000))
    assert 1 <= len(world.repairs) <= 8


def test_a_pool_is_drained_before_anything_new_is_given_to_it() -> None:
    calls: list[str] = []

    class Watched(SimulatedPool):
        def submit(self, unit: Any) -> None:
            calls.append("submit")
            super().submit(unit)

        def cancel_pending(self) -> None:
            calls.append("drain")
            super().cancel_pending()

    world = World()
    pool = Watched(world, order="last")
    pool.fail_on["forward/dense/0/0/dense"] = LostInputError("gone")
    run(JOBS["compressed"](), world, pool)
    assert calls[:4] == ["submit", "submit", "drain", "submit"]


@pytest.mark.parametrize("error", [NumericsError("layer 1: NaN"), WorkerError("three workers died")])
def test_other_errors_end_the_job_and_leave_it_resumable(error: Exception) -> None:
    job = JOBS["compressed"]()
    expected, _ = run(job)
    world = World()
    pool = SimulatedPool(world)
    pool.fail_on["solve/1/0/mlp"] = error
    with pytest.raises(type(error), match=str(error)):
        run(job, world, pool)
    run(job, world)
    assert world.journal() == expected.journal()


def test_ranks_are_decided_once() -> None:
    """A resumed job keeps the ranks that were entered, whatever it would decide now."""
    job = JOBS["compressed"]()
    world = World(fuel=40)
    with pytest.raises(Killed):
        run(job, world)
    assert "ranks" in world.entries
    world.fuel = None

    def refuse(importance: Any) -> Any:
        raise AssertionError("decided again")

    run(replace(job, allocate=refuse), world)
    expected, _ = run(job)
    assert world.journal() == expected.journal()
