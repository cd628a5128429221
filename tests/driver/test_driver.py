"""The driver over a simulated cluster: the units, and the order in which results become durable."""

from __future__ import annotations

import math
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from manifests.entries import GroupReport
from manifests.records import FormSpec
from pipeline.driver.driver import Driver
from pipeline.driver.job_spec import Job
from pipeline.driver.scheduler import Scheduler
from pipeline.methods.method import Moment
from pipeline.units.sums import Add, Collect, Total
from pipeline.units.units import Forward, Reduce, Solve, Unit, Write
from tests.driver.simulation import (
    ALL,
    IMPORTANCE,
    JOBS,
    MemoryJournal,
    Recorder,
    SimulatedPool,
    World,
    WorldCleaner,
    commits,
    digest,
    forwards,
    make_gradient_job,
    make_job,
    make_tasks,
    run,
)

# How deep -------------------------------------------------------------------------------------------------------------


class CallChains(MemoryJournal):
    """Records the calls that lead from the driver to the commit of each layer, without the scheduler's own."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.chains: list[list[str]] = []

    def commit(self, key: Any, record: Any) -> None:
        super().commit(key, record)
        if key.startswith("layer/"):
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
            chain = [frame.f_code.co_qualname for frame in reversed(frames)]
            begin = chain.index("Driver.run")
            self.chains.append([name for name in chain[begin:] if not name.startswith("Scheduler.")])


@pytest.mark.parametrize("name", JOBS)
def test_a_layer_is_committed_by_its_walk(name: str) -> None:
    """docs/architecture.md#from-the-command-to-the-ledger. One helper at most stands between a walk and the commit."""
    world, job = World(), JOBS[name]()
    journal = CallChains(world)
    Driver(job, Scheduler(SimulatedPool(world), Recorder(world)), journal, WorldCleaner(world)).run()
    assert len(journal.chains) == len({task.layer for task in job.tasks})
    for chain in journal.chains:
        assert chain[:2] == ["Driver.run", "Driver._run_phases"]
        assert chain[2] == "Driver._solve_all" or chain[2].endswith("Walk.run")
        assert chain[-1] == "Session.commit_layer"
        assert len(chain) <= 5


# What is done ---------------------------------------------------------------------------------------------------------


def test_compressed_walk_commits_in_order() -> None:
    world, recorder = run(make_job(make_tasks(range(3)), num_layers=3))
    walk = ["layer/00000", "activations/00001", "layer/00001", "activations/00002", "layer/00002"]
    assert commits(world) == ["dense/00000", "dense/00001", "dense/00002", "ranks", *walk]
    assert recorder.phases == [("importance", 3, 2), ("walk", 3, 4)]
    assert recorder.layers == [("importance", layer) for layer in range(3)] + [
        ("compress", layer) for layer in range(3)
    ]
    assert recorder.units == [unit.key for unit in world.done]


def test_dense_takes_everything_in_one_pass() -> None:
    world, recorder = run(make_job(make_tasks(range(3)), num_layers=3, propagate="dense"))
    done = ["dense/00000", "dense/00001", "dense/00002", "ranks", "layer/00000", "layer/00001", "layer/00002"]
    assert commits(world) == done
    assert recorder.phases == [("statistics", 3, 2), ("compress", 3, 2)]
    assert [(unit.layer, unit.shard) for unit in forwards(world)] == [(layer, s) for layer in range(3) for s in (0, 1)]
    assert all(len(unit.moments) == 3 and unit.cosine for unit in forwards(world))


def test_units_of_one_layer_of_the_walk() -> None:
    world, _ = run(make_job(make_tasks([0, 1]), num_layers=2, scores=frozenset()))
    assert [unit.key for unit in world.done[:17]] == [
        "choosegrids/compressed/0",
        "forward/compressed/0/0/dense",
        "forward/compressed/0/1/dense",
        "collect/compressed/0/worker-0",
        "collect/compressed/0/worker-1",
        "checkgrids/compressed/0",
        *[f"add/compressed/0/{key}/{part}" for key in ("down.in-1-1", "o.in-2-1", "q.in-1-1") for part in (0, 1)],
        "solve/0/0/attention",
        "solve/0/0/mlp",
        "write/0",
        "forward/compressed/0/0/staged",
        "forward/compressed/0/1/staged",
    ]
    first, again = world.done[1], world.done[15]
    assert isinstance(first, Forward)
    assert isinstance(again, Forward)
    assert (first.emit, first.store, first.cosine, first.ahead) == (False, False, False, None)
    assert (again.emit, again.store, again.moments, again.ahead) == (True, True, (), 1)
    assert all(unit.ahead is None for unit in forwards(world) if unit.layer == 1)


def test_the_last_layer_emits_nothing(job: Job) -> None:
    world, _ = run(job)
    last = job.num_layers - 1
    assert not [unit.key for unit in forwards(world) if unit.layer == last and (unit.emit or unit.store)]
    for unit in forwards(world):
        assert unit.emit or not unit.store


def test_importance_ranks_the_layers() -> None:
    ranked, _ = run(JOBS["compressed"]())
    ranks = ranked.journal()["ranks"]
    assert len(ranks["importance"]) == 4
    assert len({ranks["ranks"][f"{layer}/0/mlp"]["rank"] for layer in ALL}) == 4
    for unit in ranked.done:
        if isinstance(unit, Solve):
            group = unit.task
            assert unit.ranks == ranks["ranks"][f"{group.layer}/0/{group.name}"]


@pytest.mark.parametrize("shards", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize(("propagate", "group"), [("compressed", "mlp"), ("dense", "mlp"), ("dense", "free")])
def test_importance_is_the_mean_over_its_shards(shards: tuple[int, ...], propagate: str, group: str) -> None:
    """With moments, all shards pass; without, only the shards of importance."""
    seen: list[dict[int, float]] = []
    tasks = make_tasks([0], [group])
    job = make_job(tasks, num_layers=1, shards=3, propagate=propagate, importance_shards=shards)
    world, recorder = run(
        replace(job, allocate=lambda scores: seen.append(dict(scores.importance)) or job.allocate(scores))  # type: ignore[func-returns-value]
    )
    cosines = [int(digest("embedded", shard)[:4], 16) / 65536 for shard in shards]
    assert seen == [{0: pytest.approx(math.acos(sum(cosines) / len(cosines)) / math.pi)}]
    through = [unit.shard for unit in forwards(world) if unit.lineage == "dense"]
    assert through == [0, 1, 2] if (propagate, group) == ("dense", "mlp") else list(shards)
    assert recorder.phases[0][2] == len(through)
    assert [unit.shard for unit in forwards(world) if unit.cosine] == list(shards)


def test_a_pass_for_importance_goes_on_from_what_one_of_all_shards_committed() -> None:
    """As in a sweep, whose points share that pass: one of them also takes gradients, and so needs all shards."""
    alone = make_job(make_tasks(range(4)), shards=3, importance_shards=(1,))
    together = make_gradient_job(range(4), shards=3, importance_shards=(1,), propagate="compressed", scores=IMPORTANCE)
    left: list[World] = []
    run(together, World(left=left))
    half = next(world for world in left if "dense/00001" in world.journal() and "dense/00002" not in world.journal())
    assert len(half.journal()["dense/00001"]["activations"]) == 3
    run(replace(alone, gradient_shards=together.gradient_shards), half)
    expected, _ = run(alone)
    assert half.journal()["ranks"] == expected.journal()["ranks"]


def test_uniform_allocation_needs_no_dense_pass() -> None:
    world, recorder = run(JOBS["compressed-uniform"]())
    assert not [unit for unit in forwards(world) if unit.lineage == "dense" or unit.cosine]
    assert recorder.phases == [("walk", 4, 4)]
    assert world.journal()["ranks"]["importance"] == {}


def test_data_free_groups_need_no_forward_pass() -> None:
    world, recorder = run(JOBS["free"]())
    assert {type(unit) for unit in world.done} == {Solve, Write}
    assert commits(world) == ["ranks", *(f"layer/{layer:05d}" for layer in ALL)]
    assert recorder.phases == [("compress", 4, 1)]


def test_data_free_groups_ranked_by_importance_take_one_pass() -> None:
    world, _ = run(JOBS["free-ranked"]())
    assert Counter(type(unit) for unit in world.done) == {Forward: 8, Solve: 4, Write: 4}
    assert not [unit for unit in forwards(world) if unit.moments]


def test_sums_are_given_away_while_the_next_layer_is_computed() -> None:
    """By workers that give away when they have nothing else to do; none has the sums of three layers."""

    class Giving(SimulatedPool):
        def wait(self) -> tuple[Unit, Any]:
            self.pending.sort(key=lambda unit: isinstance(unit, Collect))
            return super().wait()

    job = make_job(make_tasks(ALL), propagate="dense", every=9)
    expected, _ = run(job)
    world = World()
    run(job, world, Giving(world, size=8))
    assert world.journal() == expected.journal()
    kinds = [(type(unit), unit.layer) for unit in world.done if isinstance(unit, Forward | Collect)]
    done = {kind: place for place, kind in enumerate(kinds)}
    for layer in range(3):
        assert kinds.index((Forward, layer + 1)) < kinds.index((Collect, layer))
        assert layer == 2 or done[Collect, layer] < kinds.index((Forward, layer + 2))


def test_solving_goes_on_while_layers_are_written() -> None:
    """Every worker has a layer, one is ready for who is done first, and no more than that wait to be written."""
    world = World()
    run(
        make_job(make_tasks(range(5), ["free"]), num_layers=5, scores=frozenset()),
        world,
        SimulatedPool(world, size=2),
    )
    done = ["".join(unit.key[:7].split("/")[:2]) for unit in world.done]
    assert done == [
        "solve0", "solve1", "solve2", "write0", "solve3", "write1", "solve4", "write2", "write3", "write4",
    ]  # fmt: skip
    assert commits(world) == ["ranks", *(f"layer/{layer:05d}" for layer in range(5))]


@pytest.mark.parametrize("name", ["dense", "free-measured"])
def test_no_worker_ready_is_no_reason_to_spin(name: str) -> None:
    world = World()
    run(JOBS[name](), world, SimulatedPool(world, size=0))
    assert commits(world)[-1] == "layer/00003"


def test_what_ranks_follow_is_measured_before_they_are_chosen() -> None:
    world, recorder = run(JOBS["free-measured"]())
    assert commits(world)[:5] == [*(f"measured/{layer:05d}" for layer in ALL), "ranks"]
    assert [unit.key for unit in world.done[:3]] == ["measure/0/1/first", "measure/0/1/second", "measure/1/1/first"]
    assert set(world.journal()["measured/00002"]["measured"]) == {"2/1/first", "2/1/second"}
    assert recorder.phases == [("measure", 4, 2), ("compress", 4, 1)]
    assert recorder.layers[:4] == [("measure", layer) for layer in ALL]
    with_measures, without = (run(JOBS[name]())[0].journal()["ranks"]["ranks"] for name in ("free-measured", "free"))
    assert with_measures != without


def test_layers_before_the_first_claimed_only_pass_on() -> None:
    world, recorder = run(JOBS["compressed-last-2"]())
    walk = [unit for unit in forwards(world) if unit.lineage == "compressed"]
    assert [unit.key for unit in walk if unit.layer < 2] == [
        f"forward/compressed/{layer}/{shard}/dense" for layer in (0, 1) for shard in (0, 1)
    ]
    assert all(unit.emit and not unit.moments for unit in walk if unit.layer < 2)
    assert [unit.task.layer for unit in world.done if isinstance(unit, Solve)] == [2, 2, 3, 3]
    assert commits(world)[4:] == [
        "ranks", "activations/00001", "activations/00002", "layer/00002", "activations/00003", "layer/00003",
    ]  # fmt: skip
    assert recorder.phases[-1] == ("walk", 4, 4)


def test_layers_after_the_last_claimed_are_not_walked() -> None:
    world, _ = run(JOBS["compressed-some"]())
    assert max(unit.layer for unit in forwards(world)) == 3
    assert [(unit.layer, unit.staged is not None) for unit in forwards(world) if unit.shard == 0] == [
        (0, False), (1, False), (1, True), (2, False), (3, False),
    ]  # fmt: skip


def test_a_shared_moment_is_taken_once() -> None:
    world, _ = run(JOBS["compressed-uniform"]())
    taken = [unit for unit in forwards(world) if unit.moments]
    assert {tuple(moment.key for moment in unit.moments) for unit in taken} == {("down.in-1-1", "o.in-2-1", "q.in-1-1")}
    assert Counter(unit.moment.key for unit in world.done if isinstance(unit, Add) and unit.part == 0) == {
        "down.in-1-1": 4, "o.in-2-1": 4, "q.in-1-1": 4,
    }  # fmt: skip
    assert not [unit for unit in world.done if isinstance(unit, Total)], "what is solved at once is not stored"


def test_a_group_without_moments_beside_one_with() -> None:
    world, _ = run(JOBS["compressed-mixed"]())
    entries = world.journal()
    assert set(entries["layer/00000"]["groups"]) == {"free", "mlp"}
    assert set(entries["layer/00001"]["groups"]) == {"free"}
    assert not [unit for unit in forwards(world) if unit.layer == 1 and unit.moments]
    assert "layer/00003" not in entries


def test_what_a_layer_entry_holds() -> None:
    world, recorder = run(make_job(make_tasks([1]), num_layers=2))
    entry = MemoryJournal(world).get("layer/00001")
    assert entry is not None
    assert entry.forms == {name: FormSpec(form="test", rank=2) for name in ("attention", "mlp")}
    assert world.load("staged", entry.staged)
    rank = world.journal()["ranks"]["ranks"]["1/0/mlp"]["rank"]
    assert entry.groups["mlp"] == GroupReport(method=0, ranks={"rank": rank}, error=0.5)
    assert recorder.summaries == {1: entry.groups}


# Replay ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("propagate", ["dense", "compressed"])
def test_replay_begins_at_the_last_committed_layer(every: int, propagate: str) -> None:
    keep = propagate == "dense"  # else commits of a dense pass are far apart
    tasks = make_tasks(range(7))
    job = make_job(tasks, num_layers=7, every=every, propagate=propagate, scores=frozenset(), keep_statistics=keep)
    world, _ = run(job)
    for unit in forwards(world):
        # A layer's own boundary is reached, and its inputs are entered, before anything runs on it.
        assert unit.base == unit.layer - unit.layer % every
        assert len(unit.replay) == unit.layer % every
        assert (unit.base_record is None) == (unit.base == 0)
        staged = [record.forms["mlp"].rank - 1 if record else None for record in unit.replay]
        assert staged == (list(range(unit.base, unit.layer)) if propagate == "compressed" else [None] * len(staged))
        assert unit.store == (unit.emit and (unit.layer + 1) % every == 0)
    stored = [key for key in commits(world) if key.startswith("activations")]
    if propagate == "compressed":
        assert stored == [f"activations/{layer:05d}" for layer in range(1, 7) if layer % every == 0]
    else:
        entries = world.journal()
        assert [layer + 1 for layer in range(7) if "activations" in entries[f"dense/{layer:05d}"]] == list(
            range(every, 7, every)
        )


def test_how_often_hidden_states_are_kept_changes_no_result() -> None:
    for propagate in ("dense", "compressed"):
        found = []
        for every in (1, 2, 3, 9):
            world, _ = run(make_job(make_tasks(range(7)), num_layers=7, every=every, propagate=propagate))
            entries = world.journal()
            found.append({key: entries[key] for key in entries if key.startswith(("layer", "ranks"))})
        assert all(entries == found[0] for entries in found)


def test_every_shard_gets_its_own_record() -> None:
    world, _ = run(make_job(make_tasks(ALL), shards=3))
    records = [unit.base_record.path for unit in forwards(world) if unit.base_record]
    by_shard = {
        shard: {unit.base_record.path for unit in forwards(world) if unit.base_record and unit.shard == shard}
        for shard in range(3)
    }
    assert len(set(records)) == sum(len(paths) for paths in by_shard.values())


# Order of completion, order of durability -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["last", 1, 2, 3])
def test_the_order_of_completion_changes_nothing(job: Job, order: str | int) -> None:
    expected, world = World(), World()
    run(job, expected, SimulatedPool(expected, size=3))
    run(job, world, SimulatedPool(world, order, size=3))
    assert world.journal() == expected.journal()
    assert {key for _, key in world.repairs} == set()


def test_samples_and_factors_stay_in_order() -> None:
    world, sample = World(), Moment("down.in", kind="sample", tokens=9)
    tasks = tuple(replace(t, moments=(*t.moments, sample)) for t in make_tasks(ALL))
    run(make_job(tasks, shards=5), world, SimulatedPool(world, order="last"))
    reduced = [unit for unit in world.done if isinstance(unit, Reduce)]
    assert [(unit.layer, unit.moment) for unit in reduced] == [(layer, sample) for layer in ALL]
    values = [digest("moment", sample.key, 0, digest("embedded", shard)) for shard in range(5)]
    assert [handle.value for handle in reduced[0].partials] == values
    assert {len(unit.factors) for unit in world.done if isinstance(unit, Write)} == {2}


class OrderChecks(WorldCleaner):
    """Nothing may go before what replaces it is entered."""

    def retain_activations(self, records: tuple[Any, ...]) -> None:
        self._check_entered(records)
        super().retain_activations(records)

    def retain_statistics(self, records: tuple[Any, ...]) -> None:
        doomed = set(self.world.stores["statistic"]) - {record.path for record in records}
        for layer in range(8):
            for kind in ("statistics", "dense"):
                entry = MemoryJournal(self.world).get(f"{kind}/{layer:05d}")
                paths = {record.path for record in entry.statistics.values()} if entry else set()
                assert not paths & doomed or f"layer/{layer:05d}" in self.world.entries, "needed, and dropped"
        super().retain_statistics(records)

    def _check_entered(self, records: tuple[Any, ...]) -> None:
        for record in records:
            assert any(f'"{record.path}"' in text for text in self.world.entries.values())


def test_nothing_is_dropped_before_its_successor_is_entered(job: Job) -> None:
    world = World()
    scheduler = Scheduler(SimulatedPool(world), Recorder(world))
    Driver(job, scheduler, MemoryJournal(world), OrderChecks(world)).run()
    assert not world.repairs
    retained = [index for index, (event, key) in enumerate(world.events) if event == "retain" and key[:4] == "acti"]
    for index in retained:
        if not world.events[index][1].endswith(" 0"):
            before = [event for event in world.events[:index] if event[1][:11] != "choosegrids"]
            assert before[-1][0] == "commit"
    if job.propagate == "compressed" and any(task.moments for task in job.tasks):
        for layer in {task.layer for task in job.tasks}:
            kinds = ("statistics", "layer") if job.keep_statistics else ("layer",)
            at = [commits(world).index(f"{kind}/{layer:05d}") for kind in kinds]
            after = f"activations/{layer + 1:05d}"
            assert at == sorted(at)
            assert after not in commits(world) or commits(world).index(after) > at[-1]


def test_nothing_is_left_over(job: Job) -> None:
    world, _ = run(job)
    assert world.stores["activation"] == {}
    kept = job.keep_statistics
    has_moments = any(task.moments for task in job.tasks)
    assert bool(world.stores["statistic"]) == (kept and has_moments)
    assert len(world.stores["staged"]) == len({task.layer for task in job.tasks})


def test_done_again_does_nothing(job: Job) -> None:
    world, _ = run(job)
    before = dict(world.entries), len(world.done)
    run(job, world)
    assert (world.entries, len(world.done)) == before


def test_statistics_of_the_dense_pass_are_kept_until_their_layer_is_entered() -> None:
    world = World()
    run(JOBS["dense-dropped"](), world, SimulatedPool(world, size=1))
    kept: Sequence[int] = [int(key.split()[1]) for event, key in world.events if event == "retain" and "stat" in key]
    assert kept == [0, 9, 6, 3, 0, 0]


def test_the_walk_stores_no_statistics_that_are_not_kept() -> None:
    """Layers are solved from memory; samples, which are stored, go with their layer."""
    world, live = World(), []

    class Watching(SimulatedPool):
        def wait(self) -> tuple[Unit, Any]:
            live.append(len(world.stores["statistic"]))
            return super().wait()

    sample = Moment("down.in", kind="sample", tokens=9)
    tasks = make_tasks(ALL) + tuple(
        replace(task, name="sampled", roles=("role-s",), moments=(sample,)) for task in make_tasks(ALL, ["mlp"])
    )
    job = make_job(tasks, keep_statistics=False)
    assert job.propagate == "compressed"
    run(job, world, Watching(world))
    assert max(live) == 1
    kept = make_job(make_tasks(ALL), keep_statistics=True)
    world, live = World(), []
    run(kept, world, Watching(world))
    assert len(world.stores["statistic"]) == sum(len(kept.layer_moments(layer)) for layer in ALL)


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("corrected")])
def test_corrected_layers_are_solved_at_each_of_their_points(name: str) -> None:
    job = JOBS[name]()
    world, _ = run(job)
    for task in job.tasks:
        solves = [unit for unit in world.done if isinstance(unit, Solve) and unit.task == task]
        found = [[moment for moment in unit.statistics if moment.kind == "pair"] for unit in solves]
        assert found == ([[moment] for moment in task.corrections] or [[]])
