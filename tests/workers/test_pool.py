"""The pool over a fake Ray: the worker of each unit, and workers that come, go and fail."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayTaskError,
)

from manifests.errors import InputError, Interrupted, NumericsError, StorageError, WorkerError
from manifests.schema import Workers
from pipeline.methods.method import Moment
from pipeline.units.scores import Score, WindowForward, Windows
from pipeline.units.sums import (
    Add,
    AddDone,
    CheckGrids,
    CheckGridsDone,
    ChooseGrids,
    ChooseGridsDone,
    Collect,
    CollectDone,
    Sums,
)
from pipeline.units.units import Forward, Pair, Reduce, ShardDone, Unit, Write
from tests.workers.fake_ray import FakeActor, FakeRay, Watch
from workers import pool as pool_module
from workers import pool_health
from workers.hardware import software_versions
from workers.outcomes import Outcome
from workers.pool import RayPool
from workers.pool_health import others_hold_most
from workers.tensor_transfer import Handle


@pytest.fixture(autouse=True)
def memory_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "declared_memory", lambda _, asked: asked)


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(pool_health, "GATHER_SECONDS", 0.0)
    found = Watch()
    monkeypatch.setattr(pool_module, "watch_ray", lambda _: found)
    return found


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make(fake, max=2, min=2, shards=8)`: a pool on it."""

    def made(fake: FakeRay, *, shards: int = 8, hardware: dict[str, str] | None = None, **workers: Any) -> RayPool:
        monkeypatch.setattr(pool_module, "ray", fake)
        monkeypatch.setattr(pool_module, "why_unplaceable", lambda *_: None)
        sizes = {"max": 2, **workers}
        sizes.setdefault("min", sizes["max"])
        notes: list[str] = []
        setup: Any = SimpleNamespace(shards=shards, hardware=hardware, manifest=None, memory_bytes=7)
        pool = RayPool(setup, Workers(**sizes), threading.Event(), notes.append)
        pool.notes = notes  # type: ignore[attr-defined]
        return pool

    return made


def forward(layer: int, shards: int = 8) -> list[Unit]:
    return [Forward("dense", layer, shard) for shard in range(shards)]


def do(pool: RayPool, units: list[Unit]) -> list[str]:
    for unit in units:
        pool.submit(unit)
    done = []
    for _ in units:
        unit, result = pool.wait()
        assert result == unit.key
        done.append(unit.key)
    assert sorted(done) == sorted(unit.key for unit in units), "each unit once"
    return done


def shards_of(actor: FakeActor, layer: int) -> list[int]:
    return sorted(unit.shard for unit in actor.done if isinstance(unit, Forward) and unit.layer == layer)


# Who gets what --------------------------------------------------------------------------------------------------------


def test_shards_are_spread_and_stay_where_they_are(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake, max=3, shards=9)
    for layer in range(4):
        do(pool, forward(layer, 9))
    for actor in fake.actors:
        assert len(shards_of(actor, 0)) == 3
        assert [shards_of(actor, layer) for layer in range(1, 4)] == [shards_of(actor, 0)] * 3


def test_scores_go_where_the_hidden_states_are(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    do(pool, forward(0))
    do(pool, [Score(Windows.even(8, 8, "float32", 1), "m", 1, shard) for shard in range(8)])
    for actor in fake.actors:
        assert sorted(unit.shard for unit in actor.done if isinstance(unit, Score)) == shards_of(actor, 0)


def test_windows_that_were_scored_are_no_longer_held(make: Any) -> None:
    """The worker has dropped their hidden states, so that they do not count when other windows are shared out."""
    pool = make(FakeRay())
    cut = Windows.even(8, 8, "float32", 1)
    do(pool, [WindowForward(cut, "m", 0, shard) for shard in range(8)])
    assert sum(len(member.shards) for member in pool.members) == 8
    do(pool, [Score(cut, "m", 1, shard) for shard in range(8)])
    assert not any(member.shards for member in pool.members)


def test_all_workers_forget_before_their_next_unit(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    do(pool, forward(0))
    pool.forget()
    do(pool, forward(1))
    for actor in fake.actors:
        layers = [call if call == "forget" else call.layer for call in actor.done]
        assert layers == sorted(layers, key=[0, "forget", 1].index)
        assert layers.count("forget") == 1


def test_other_units_go_to_whoever_has_room(make: Any) -> None:
    fake = FakeRay((0, 9, None), (0, 1, None))
    pool = make(fake)
    do(pool, [Write(layer, (), (), {}) for layer in range(12)])
    slow, fast = (len(actor.done) for actor in fake.actors)
    assert slow + fast == 12
    assert fast >= 9


def test_no_worker_is_given_more_than_it_needs_to_be_busy(make: Any) -> None:
    fake = FakeRay((0, 3, None))
    do(make(fake), [*forward(0), *(Reduce("dense", 0, Moment(f"point-{n}.in"), ()) for n in range(5))])
    assert {actor.most_in_hand for actor in fake.actors} == {pool_module.DEPTH}


def test_who_is_fast_gets_more_of_the_shards(make: Any) -> None:
    fake = FakeRay((0, 8, None), (0, 1, None))
    do(make(fake), forward(0))
    assert len(shards_of(fake.actors[1], 0)) > len(shards_of(fake.actors[0], 0))


def test_who_joins_late_gets_shards(make: Any) -> None:
    """One worker is enough to begin with; the second must not stand idle for the rest of the job."""
    fake = FakeRay((0, 5, None), (150, 5, None))
    pool = make(fake, min=1, shards=8)
    assert pool.size == 1
    for layer in range(12):
        do(pool, forward(layer))
    assert pool.size == 2
    assert shards_of(fake.actors[0], 0) == list(range(8))
    assert len(shards_of(fake.actors[1], 11)) >= 3
    assert [shards_of(actor, 11) for actor in fake.actors] == [shards_of(actor, 10) for actor in fake.actors]


def test_one_shard_more_is_no_reason_to_take_one_over(make: Any) -> None:
    """An idle worker leaves units with the worker that holds their hidden states."""
    fake = FakeRay((0, 9, None), (100, 3, None))
    pool = make(fake, min=1, shards=19)
    for layer in range(20):
        do(pool, forward(layer, 19))
    assert [len(shards_of(actor, 19)) for actor in fake.actors] == [10, 9]
    assert [shards_of(actor, 19) for actor in fake.actors] == [shards_of(actor, 15) for actor in fake.actors]


def test_two_shards_more_are_shared(make: Any) -> None:
    """A new worker takes shards over until no worker holds two more than it does."""
    fake = FakeRay((0, 5, None), (150, 5, None))
    pool = make(fake, min=1, shards=4)
    for layer in range(20):
        do(pool, forward(layer, 4))
    assert pool.size == 2
    assert [len(shards_of(actor, 19)) for actor in fake.actors] == [2, 2]


def test_who_joins_in_the_middle_of_a_layer_takes_part(make: Any) -> None:
    fake = FakeRay((0, 10, None), (25, 10, None))
    pool = make(fake, min=1, shards=8)
    do(pool, forward(0))
    assert len(shards_of(fake.actors[1], 0)) >= 3


def test_no_more_workers_than_shards(make: Any) -> None:
    fake = FakeRay()
    assert make(fake, max=5, min=5, shards=3).size == 3
    assert len(fake.actors) == 3


def test_memory_that_no_node_declares_is_not_asked_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "declared_memory", lambda *_: 0)
    fake = FakeRay()
    pool = make(fake, max=1)
    assert "memory" not in fake.options_given
    assert any("without reserving the planned" in line for line in pool.notes)


def test_what_an_actor_takes_is_asked_of_ray(make: Any) -> None:
    fake = FakeRay()
    make(fake, max=1, cpus=3, gpus=0.5)
    assert fake.options_given == {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 3, "num_gpus": 0.5, "memory": 7}


# Loss -----------------------------------------------------------------------------------------------------------------


def test_a_dead_worker_s_units_are_done_by_others(make: Any) -> None:
    fake = FakeRay((0, 3, None), (0, 3, 11), (40, 3, None))
    pool = make(fake)
    do(pool, forward(0))
    kept = shards_of(fake.actors[0], 0)
    for layer in range(1, 5):
        do(pool, forward(layer))
    assert len(fake.actors) == 3
    assert pool.size == 2
    (note,) = pool.notes
    unit = "forward/dense/[0-9]/[0-9]/dense"
    again = f"(1 unit \\({unit}\\)|2 units \\({unit}, {unit}\\))"
    assert re.fullmatch(
        f"node fake: 1 worker died \\(process 1; ActorDiedError\\), 1 left there; done again: {again}", note
    )
    # Who did not die keeps what it holds, but for what the newcomer takes over.
    assert set(kept) & set(shards_of(fake.actors[0], 4))
    assert len(shards_of(fake.actors[2], 4)) >= 3
    assert not fake.actors[0].killed


@pytest.mark.parametrize("error", [ObjectLostError("aa", None, "bb"), OutOfMemoryError("too much")])
def test_a_lost_result_is_a_lost_worker(make: Any, error: Exception) -> None:
    fake = FakeRay()
    pool = make(fake)
    fake.failures["forward/dense/0/3/dense"] = error
    do(pool, forward(0))
    assert len(fake.actors) == 3
    assert sum(actor.killed for actor in fake.actors) == 1


def test_a_unit_on_which_every_worker_dies_ends_the_job(make: Any) -> None:
    fake = FakeRay((0, 100, 20))
    pool = make(fake, max=1)
    pool.submit(Write(7, (), (), {}))
    with pytest.raises(WorkerError, match=r"write/7: 3 workers died on it \(workers.max_failures\); the last: "):
        pool.wait()


def test_deaths_long_apart_are_forgiven(make: Any) -> None:
    """A unit with the same key runs again when a layer is repaired. Units that succeeded in between count."""
    fake = FakeRay((0, 2, 5), (0, 2, 9), (0, 2, 9), (0, 2, 9), (0, 2, None))
    pool = make(fake, max=1, shards=1)
    for _ in range(12):
        do(pool, [Write(0, (), (), {})])
    assert len(fake.actors) == 5


def test_workers_that_never_start_end_the_job(make: Any) -> None:
    with pytest.raises(WorkerError, match=r"^3 workers died before they were ready"):
        make(FakeRay((50, 1, 3)), max=1)


def test_an_error_while_starting_says_so(make: Any) -> None:
    fake = FakeRay()
    fake.start_error = RayTaskError("ready", "Traceback ...", ZeroDivisionError()).as_instanceof_cause()
    with pytest.raises(WorkerError, match=r"^starting a worker: "):
        make(fake)


def test_failed_starts_are_forgiven_after_a_good_one(make: Any) -> None:
    dying, living = (50, 1, 3), (0, 1, 12)
    fake = FakeRay(dying, dying, living, dying, dying, living, dying, dying, (0, 1, None))
    pool = make(fake, max=1, shards=1)
    for _ in range(40):
        do(pool, forward(0, 1))
    assert len(fake.actors) == 9


def test_an_error_for_users_arrives_as_it_was_raised(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    error = NumericsError("layer 3: NaN")
    fake.failures["write/1"] = Outcome(None, error, 1.0, 0.5, 10)
    pool.submit(Write(1, (), (), {}))
    with pytest.raises(NumericsError) as raised:
        pool.wait()
    assert raised.value is error


def test_any_other_error_names_the_unit(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    trace = 'Traceback (most recent call last):\n  File "worker.py", line 1, in execute\nZeroDivisionError: by zero'
    fake.failures["write/1"] = RayTaskError("execute", trace, ZeroDivisionError("by zero")).as_instanceof_cause()
    pool.submit(Write(1, (), (), {}))
    with pytest.raises(WorkerError, match=r"(?s)write/1: .*by zero"):
        pool.wait()


def test_how_often_workers_may_die_is_given(make: Any) -> None:
    pool = make(FakeRay((0, 100, 20)), max=1, max_failures=1)
    pool.submit(Write(7, (), (), {}))
    with pytest.raises(WorkerError, match="write/7: 1 workers died on it"):
        pool.wait()


def test_what_a_unit_leaves_behind_is_known_by_its_handle(make: Any) -> None:
    """The references come from the driver's call, which owns them, not from the worker, which may die."""
    moments = (Moment("q.in", kind="sample"), Moment("v.out"), Moment("o.in", kind="sample"))
    fake = FakeRay()
    pool = make(fake)
    result = ShardDone({moments[2]: 0, moments[0]: 1}, None, None, 5)
    unit = Forward("dense", 2, 3, moments=moments)
    fake.failures[unit.key] = Outcome(result, None, 1.0, 0.5, 10)
    pool.submit(unit)
    partials = pool.wait()[1].partials
    assert partials == {moments[2]: Handle(unit.key, "tensors 0"), moments[0]: Handle(unit.key, "tensors 1")}


def test_what_is_summed_is_known_by_its_handle(make: Any) -> None:
    fake, moments = FakeRay(), (Moment("q.in"), Moment("v.out"))
    pool = make(fake)
    chosen = ChooseGrids(Forward("dense", 2, 3, moments=moments))
    found = answer(pool, chosen, ChooseGridsDone({moments[1]: 0, moments[0]: 1}))
    assert found.grids == {
        moments[1]: Handle(chosen.key, "tensors 0"),
        moments[0]: Handle(chosen.key, "tensors 1"),
    }
    collect = Collect("dense", 2, "worker-0", "pass-0", moments)
    found = answer(
        pool, collect, CollectDone({moments[0]: (0,), moments[1]: (2,)}, {moments[0]: 1, moments[1]: 3}, (3, 5))
    )
    assert found.shards == (3, 5)
    handles = [Handle(collect.key, f"tensors {n}") for n in range(4)]
    assert found.partials == {moments[0]: (handles[0],), moments[1]: (handles[2],)}
    assert found.diagonals == {moments[0]: handles[1], moments[1]: handles[3]}
    check = CheckGrids("dense", 2, dict.fromkeys(moments, "grid"), dict.fromkeys(moments, ()))
    found = answer(pool, check, CheckGridsDone({moments[1]: 0}))
    assert found.wider == {moments[1]: Handle(check.key, "tensors 0")}
    add = Add("dense", 2, moments[0], 0, ())
    assert answer(pool, add, AddDone(0)) == AddDone(Handle(add.key, "tensors 0"))


def test_some_units_go_beside_the_others(make: Any) -> None:
    """A worker with its hands full of forward passes still stores; and of neither kind it has more than two, beside
    what it is to give away."""
    fake = FakeRay()
    pool = make(fake, max=1, shards=8)
    for unit in forward(0) + [Write(layer, (), (), {}) for layer in range(4)] + collects(0):
        pool.submit(unit)
    pool._dispatch()
    (member,) = pool.members
    assert (member.unit_count(beside=False), member.unit_count(beside=True), len(member.running)) == (2, 2, 5)
    assert [group for group in fake.groups if group] == ["collect", "beside", "beside"]
    assert fake.beside == {"beside": 1, "collect": 1}
    for _ in range(13):
        pool.wait()


def answer(pool: RayPool, unit: Unit, result: Any) -> Any:
    """Return the pool's result for a worker's result."""
    return answers(pool, [unit], [result])[0]


def answers(pool: RayPool, units: Sequence[Unit], results: Sequence[Any]) -> list[Any]:
    """Return the pool's results for workers' results, in the order of arrival."""
    fake: Any = pool_module.ray
    for unit, result in zip(units, results, strict=True):
        fake.failures[unit.key] = Outcome(result, None, 1.0, 0.5, 10)
        pool.submit(unit)
    return [pool.wait()[1] for _ in units]


# Sums that workers keep -----------------------------------------------------------------------------------------------


SUMS = Sums("pass-0", {})


def summing(layer: int, shards: int = 8) -> list[Unit]:
    return [Forward("dense", layer, shard, sums=SUMS) for shard in range(shards)]


def collects(*workers: int) -> list[Unit]:
    return [Collect("dense", 0, f"worker-{number}", SUMS.name, ()) for number in workers]


def test_sums_are_collected_from_the_worker_that_has_them(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake, max=3)
    do(pool, summing(0))
    do(pool, collects(2, 0, 1))
    assert [[u.worker for u in actor.done if isinstance(u, Collect)] for actor in fake.actors] == [
        ["worker-0"], ["worker-1"], ["worker-2"],
    ]  # fmt: skip


@pytest.mark.parametrize("dies_at", [40, 9])
def test_of_a_worker_that_is_gone_there_is_nothing_to_collect(make: Any, dies_at: int) -> None:
    """The result is empty, if the worker was known to be dead or dies on the unit; no other worker is asked."""
    fake = FakeRay((0, 1, None), (0, 30, dies_at), (0, 1, None))
    pool = make(fake)
    do(pool, summing(0, 1))
    for unit in collects(1):
        pool.submit(unit)
    unit, result = pool.wait()
    assert (unit.key, result) == ("collect/dense/0/worker-1", None if dies_at == 9 else unit.key)
    do(pool, summing(1))
    for unit in collects(17):
        pool.submit(unit)
    assert pool.wait()[1] is None


def test_workers_that_die_of_collecting_end_the_job(make: Any) -> None:
    pool = make(FakeRay((0, 50, 20)), max=1)
    for number in range(3):
        while pool.size < 1:
            pool._step(1.0)
        pool.submit(collects(number)[0])
        if number < 2:
            assert pool.wait()[1] is None
    with pytest.raises(WorkerError, match="collect/dense/0: 3 workers died on it"):
        pool.wait()


@pytest.mark.parametrize("paired", [False, True])
def test_who_is_sent_away_stays_until_its_sums_are_collected(make: Any, paired: bool) -> None:
    fake = FakeRay()
    pool = make(fake)
    do(pool, [Pair(0, shard, 0, sums=SUMS) for shard in range(8)] if paired else summing(0))
    pool.resize(1)
    do(pool, [Write(layer, (), (), {}) for layer in range(4)])
    assert [actor.killed for actor in fake.actors] == [False, False]
    do(pool, collects(0, 1))
    do(pool, [Write(0, (), (), {})])
    assert [actor.killed for actor in fake.actors] == [True, False]


def test_sums_that_nobody_will_collect_keep_nobody(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    do(pool, summing(0))
    pool.resize(1)
    pool.cancel_pending()
    do(pool, [Write(layer, (), (), {}) for layer in range(2)])
    assert [actor.killed for actor in fake.actors] == [True, False]


# Growing and shrinking ------------------------------------------------------------------------------------------------


def test_more_workers_join_and_take_shards(make: Any) -> None:
    fake = FakeRay((0, 5, None))
    pool = make(fake, max=1)
    do(pool, forward(0))
    pool.resize(3)
    for layer in range(1, 12):
        do(pool, forward(layer))
    assert pool.size == 3
    assert [len(shards_of(actor, 11)) for actor in fake.actors] == [3, 3, 2]


def test_workers_are_sent_away_when_they_are_done(make: Any) -> None:
    fake = FakeRay((0, 4, None))
    pool = make(fake, max=4)
    do(pool, forward(0))
    for unit in forward(1):
        pool.submit(unit)
    pool.wait()
    pool.resize(1)
    assert len([pool.wait() for _ in range(7)]) == 7
    do(pool, forward(2))
    assert pool.size == 1
    assert sum(actor.killed for actor in fake.actors) == 3
    assert sum(len(shards_of(actor, 1)) for actor in fake.actors) == 8, "nothing in hand is done twice"
    (left,) = [actor for actor in fake.actors if not actor.killed]
    assert shards_of(left, 2) == list(range(8))
    assert sum("is dismissed: the job needs only 1" in note for note in pool.notes) == 3


def test_who_is_not_there_yet_goes_first(make: Any) -> None:
    fake = FakeRay((0, 2, None), (10_000, 2, None))
    pool = make(fake, max=2, min=1)
    pool.resize(1)
    do(pool, forward(0))
    assert [actor.killed for actor in fake.actors] == [False, True]


@pytest.mark.parametrize(("asked", "wanted"), [(0, 1), (-4, 1), (1, 1), (8, 8), (1000, 8)])
def test_there_is_work_for_one_worker_per_shard(asked: int, wanted: int, make: Any) -> None:
    pool = make(FakeRay(), max=2, shards=8)
    pool.resize(asked)
    do(pool, forward(0))
    assert pool.size == wanted


def test_one_that_dies_while_it_leaves_is_not_replaced(make: Any) -> None:
    fake = FakeRay((0, 30, 40), (0, 30, None))
    pool = make(fake, max=2, shards=4)
    for unit in forward(0, 4):
        pool.submit(unit)
    pool.wait()
    pool.resize(1)
    assert len([pool.wait() for _ in range(3)]) == 3
    assert len(fake.actors) == 2


def test_a_cluster_that_lost_all_its_workers_is_said(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_health, "WARNING_SECONDS", 0.0)
    fake = FakeRay((0, 5, 12), (3000, 5, None))
    pool = make(fake, max=1)
    do(pool, forward(0))
    assert any(note.startswith("waiting for 1 workers, 0 are ready") for note in pool.notes)


# Memory, disks, hardware ----------------------------------------------------------------------------------------------

MONITOR = """1 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 10.0.0.7, ID: f9) was \
22.66GB used / 23.54GB limit (0.962)
OOM kill reason: Memory usage 24330675328B exceeded threshold of 24012676915B (95.0% of 25276502016B limit)
Selected to kill: (Actor(91): job ID=01, task name=A.__init__, pid=18584, actual memory used={own}, worker ID=33)
"""  # of Ray 2.60


@pytest.mark.parametrize(
    ("own", "others"), [("0.05GB", True), ("11.2GB", True), ("11.4GB", False), ("22GB", False), ("700.5MB", True)]
)
def test_whose_memory_it_was(own: str, others: bool) -> None:
    assert others_hold_most(MONITOR.format(own=own)) is others


@pytest.mark.slow
def test_memory_that_others_hold_is_no_death_of_the_unit(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five in a row, with max_failures 3: the job goes on with the other worker, then with a new one."""
    monkeypatch.setattr(pool_module, "MEMORY_PAUSE_SECONDS", 0.001)
    fake = FakeRay()
    pool = make(fake)
    for _ in range(5):
        fake.failures["write/7"] = OutOfMemoryError(MONITOR.format(own="0.05GB"))
        do(pool, forward(0))
        pool.submit(Write(7, (), (), {}))
        time.sleep(0.1)
        assert pool.wait()[0].key == "write/7"
    said = [note for note in pool.notes if "Ray's memory monitor" in note]
    assert len(said) == 5
    assert "22.66GB used / 23.54GB" in said[0]
    assert "continues with 1 workers" in said[0]
    assert "Selected to kill" not in said[0]  # of Ray's report, the first line


def test_memory_of_its_own_is_a_death_of_the_unit(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake, max=1)
    fake.on_wait = lambda: fake.failures.update({"write/7": OutOfMemoryError(MONITOR.format(own="21GB"))})
    pool.submit(Write(7, (), (), {}))
    with pytest.raises(WorkerError, match="write/7: 3 workers died on it"):
        pool.wait()


def test_memory_that_others_hold_for_good_ends_the_job(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MEMORY_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(pool_module, "POLL_SECONDS", 0.01)
    fake = FakeRay()
    pool = make(fake, max=1, start_timeout_s=0.3)
    fake.on_wait = lambda: fake.failures.update({"write/7": OutOfMemoryError(MONITOR.format(own="0.05GB"))})
    pool.submit(Write(7, (), (), {}))
    with pytest.raises(WorkerError, match=r"workers.start_timeout_s.*other processes hold the memory"):
        pool.wait()


@pytest.mark.parametrize("error", [OutOfDiskError(), ObjectStoreFullError()])
def test_a_full_disk_is_named(make: Any, error: Exception) -> None:
    """Once is a lost result, three times on a unit end the job."""
    fake = FakeRay()
    pool = make(fake)
    fake.failures["write/7"] = error
    do(pool, [Write(7, (), (), {})])
    fake.on_wait = lambda: fake.failures.update({"write/8": error})
    pool.submit(Write(8, (), (), {}))
    with pytest.raises(StorageError, match=r"write/8: the disk .* is full on node fake, at /tmp/ray/fake") as raised:
        pool.wait()
    assert type(error).__name__ in str(raised.value)


def test_a_worker_of_another_kind_is_refused(make: Any) -> None:
    fake = FakeRay((0, 1, None), (3, 1, None))
    fake.hardware[1] = {"device": "NVIDIA L4"}
    pool = make(fake, min=1)
    do(pool, forward(0))
    assert (pool.size, pool.wanted, fake.actors[1].killed, fake.actors[1].done) == (1, 1, True, [])
    assert pool.hardware == {"device": "CPU"}
    assert any("worker fake:1 has device NVIDIA L4 instead of CPU" in note for note in pool.notes)


def test_one_that_is_refused_is_one_less(make: Any) -> None:
    fake = FakeRay((0, 1, None), (3, 1, None), (0, 1, None), (0, 1, None))
    fake.hardware[1] = {"device": "NVIDIA L4"}
    pool = make(fake, max=4, min=1)
    do(pool, forward(0))
    assert (pool.size, pool.wanted, len(fake.actors)) == (3, 3, 4)


def test_a_job_does_not_wait_for_one_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`workers.min` of them never come: it begins with those that there can be."""
    stop, notes = threading.Event(), list[str]()
    fake = FakeRay((0, 1, None), (3, 1, None))
    fake.hardware[1] = {"device": "NVIDIA L4"}
    monkeypatch.setattr(pool_module, "ray", fake)
    monkeypatch.setattr(pool_module, "POLL_SECONDS", 0.01)
    patience = threading.Timer(20.0, stop.set)
    patience.start()
    setup: Any = SimpleNamespace(shards=4, hardware=None, manifest=None, memory_bytes=0)
    pool = RayPool(setup, Workers(min=2, max=2), stop, notes.append)
    patience.cancel()
    assert (pool.size, pool.wanted) == (1, 1)
    assert "the job continues with at most 1 workers" in notes[0]
    do(pool, forward(0, 4))


def test_a_job_goes_on_where_it_began(make: Any) -> None:
    fake = FakeRay()
    with pytest.raises(InputError, match=r"device CPU instead of NVIDIA H200.*nodes of the first kind"):
        make(fake, max=1, hardware={"device": "NVIDIA H200"})


def test_more_threads_than_a_node_has_cores_are_refused(make: Any) -> None:
    """Whatever the node has declared to Ray; a job whose other nodes have the cores goes on there."""
    fake = FakeRay()
    fake.cores[0] = 2
    refusal = r"workers.cpus: 3 threads for each worker are more than the cores of the node of worker fake:0, 2; set"
    with pytest.raises(InputError, match=refusal):
        make(fake, max=1, cpus=3)
    assert make(fake, max=1, cpus=2).size == 1
    fake = FakeRay()
    fake.cores[0] = 2
    pool = make(fake, min=1, max=2, cpus=3)
    do(pool, forward(0))
    assert (pool.size, pool.wanted) == (1, 1)
    assert not fake.actors[0].done
    assert any("set workers.cpus: 2 or fewer" in line and "at most 1 workers" in line for line in pool.notes)


def test_other_versions_are_named(make: Any) -> None:
    fake = FakeRay()
    fake.versions[0] = {**software_versions(), "torch": "2.9.1"}
    with pytest.raises(InputError, match=r"worker fake:0 has torch 2.9.1 instead of 2.13"):
        make(fake)


def test_a_node_without_the_project_is_said_in_one_line(make: Any) -> None:
    fake = FakeRay((50, 1, None))
    trace = "Traceback (most recent call last):\n ...\nModuleNotFoundError: No module named 'workers'"
    fake.start_error = ActorDiedError(RayTaskError("ready", trace, RuntimeError()))
    with pytest.raises(InputError, match="cannot import workers: install the project there"):
        make(fake)


# Stopping -------------------------------------------------------------------------------------------------------------


def test_a_signal_ends_waiting(make: Any) -> None:
    fake = FakeRay((0, 10_000, None))
    pool = make(fake)
    pool.submit(Write(1, (), (), {}))
    fake.on_wait = pool.stop.set
    with pytest.raises(Interrupted, match="run the same command again"):
        pool.wait()
    with pytest.raises(Interrupted):
        pool.cancel_pending()


def test_a_signal_ends_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    fake = FakeRay((10_000, 1, None))
    fake.on_wait = stop.set
    monkeypatch.setattr(pool_module, "ray", fake)
    with pytest.raises(Interrupted, match="before any worker was ready"):
        RayPool(
            SimpleNamespace(shards=2, hardware=None, manifest=None, memory_bytes=0), Workers(), stop, lambda _: None
        )  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_job_that_can_never_start_ends(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said within a minute, ended after `workers.start_timeout_s`; with an autoscaler it is waited for."""
    notes: list[str] = []
    monkeypatch.setattr(pool_module, "ray", FakeRay((10**9, 1, None)))
    monkeypatch.setattr(pool_module, "why_unplaceable", lambda workers, _: f"a worker asks for {workers.cpus} CPUs")
    monkeypatch.setattr(pool_health, "WARNING_SECONDS", 0.1)
    setup: Any = SimpleNamespace(shards=2, hardware=None, manifest=None, memory_bytes=0)
    with pytest.raises(WorkerError, match=r"asks for 64 CPUs; waited \d+ s \(workers.start_timeout_s\)"):
        RayPool(setup, Workers(cpus=64, start_timeout_s=0.4), threading.Event(), notes.append)
    assert notes[0] == "waiting for 1 workers, 0 are ready: a worker asks for 64 CPUs"


def test_waiting_long_for_workers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(pool_module, "ray", FakeRay((250, 1, None)))
    monkeypatch.setattr(pool_health, "WARNING_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "why_unplaceable", lambda *_: None)
    RayPool(
        SimpleNamespace(shards=2, hardware=None, manifest=None, memory_bytes=0),
        Workers(),
        threading.Event(),
        notes.append,
    )  # type: ignore[arg-type]
    assert notes
    assert "for 1 workers, 0 are ready: the cluster has {'CPU': 2.0}" in notes[0]


def test_draining_waits_for_what_runs_and_forgets_the_rest(make: Any) -> None:
    fake = FakeRay((0, 4, None))
    pool = make(fake)
    for unit in forward(0):
        pool.submit(unit)
    pool.wait()
    pool.cancel_pending()
    before = [len(actor.done) for actor in fake.actors]
    assert sum(before) < 8
    assert not any(actor.calls for actor in fake.actors)
    assert pool.busy() == {}
    assert do(pool, forward(1))
    for actor, count in zip(fake.actors, before, strict=True):
        assert {unit.layer for unit in actor.done[count:]} == {1}


def test_draining_survives_a_death(make: Any) -> None:
    fake = FakeRay((0, 4, None), (0, 4, 7), (0, 4, None))
    pool = make(fake)
    for unit in forward(0):
        pool.submit(unit)
    pool.wait()
    pool.cancel_pending()
    assert do(pool, forward(1))


def test_closing_ends_every_worker(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    pool.close()
    assert all(actor.killed for actor in fake.actors)
    assert pool.size == 0


# Figures --------------------------------------------------------------------------------------------------------------


def test_figures_are_summed_by_kind_of_unit(make: Any) -> None:
    fake = FakeRay()
    pool = make(fake)
    do(pool, [*forward(0), Write(0, (), (), {})])
    assert pool.seconds == {"forward": [8, 16.0, 12.0], "write": [1, 2.0, 1.5]}
    assert pool.peak_bytes == {"fake:0": 0, "fake:1": 1000}


def test_who_is_at_what(make: Any) -> None:
    fake = FakeRay((0, 50, None))
    pool = make(fake)
    for unit in forward(0, 4):
        pool.submit(unit)
    seen: list[dict[str, str]] = []
    fake.on_wait = lambda: seen.append(pool.busy())
    pool.wait()
    assert seen[0] == {"fake:0": "forward/dense/0/0/dense", "fake:1": "forward/dense/0/1/dense"}


def test_a_ray_that_has_ended_ends_the_pool(make: Any, watch: Watch) -> None:
    """Before anybody asks it for anything, and whether or not units are waiting."""
    pool = make(FakeRay((0, 10**6, None), (0, 10**6, None)))
    pool.submit(forward(0)[0])
    watch.fault = WorkerError("its raylet is gone")
    with pytest.raises(WorkerError, match="its raylet is gone"):
        pool.wait()
    with pytest.raises(WorkerError, match="its raylet is gone"):
        pool.cancel_pending()
    with pytest.raises(WorkerError, match="its raylet is gone"):
        make(FakeRay())
    assert not watch.closed
    pool.close()
    assert watch.closed
