"""Deaths of workers: those of a node in one line, and too many in a row end the job."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from manifests.errors import InputError, StorageError, WorkerError
from pipeline.units.sums import Collect
from workers import pool_health
from workers.pool_health import START, Deaths, Failures, failure_key, worker_name

WHERE = {"node": "10.0.0.7", "ray_folder": "/scratch/ray"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pool_health.time, "monotonic", lambda: now[0])
    return now


def test_the_workers_of_a_node_are_said_in_one_line(clock: list[float]) -> None:
    notes: list[str] = []
    gathered = Deaths(notes.append)
    for pid in (7, 8):
        gathered.add({"node": "10.0.0.2", "pid": pid}, [f"forward/3/{pid}", f"forward/3/{pid + 2}"], ActorDiedError())
    gathered.add({"node": "10.0.0.3", "pid": 9}, [], ActorUnavailableError("away", None))
    gathered.report({})
    assert notes == [], "another of them may be missed a moment later"
    clock[0] += pool_health.GATHER_SECONDS
    gathered.report({"10.0.0.3": 3})
    assert notes == [
        "node 10.0.0.2: 2 workers died (process 7, 8; ActorDiedError), none left there; "
        "done again: 4 units (forward/3/7, forward/3/9, forward/3/8 and 1 more)",
        "node 10.0.0.3: 1 worker died (process 9; ActorUnavailableError), 3 left there; no unit was lost",
    ]
    gathered.report({}, now=True)
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("error", "node"), [("died\n\tip: 10.0.0.4\nwhy", "node 10.0.0.4: "), ("died of nothing", "")], ids=["node", "none"]
)
def test_a_worker_that_was_starting(error: str, node: str) -> None:
    notes: list[str] = []
    gathered = Deaths(notes.append)
    gathered.add({}, [], RuntimeError(error))
    gathered.report({}, now=True)
    (note,) = notes
    assert note.startswith(f"{node}1 worker died (process that was starting; RuntimeError)")
    assert "?" not in note + worker_name({})


def test_deaths_in_a_row_end_the_job_at_the_limit() -> None:
    failures = Failures(3)
    for _ in range(2):
        failures.count("forward/0", RuntimeError("first"), WHERE, disk_full=False)
    failures.count("forward/1", RuntimeError("of another unit"), WHERE, disk_full=False)
    with pytest.raises(
        WorkerError, match=r"forward/0: 3 workers died on it \(workers\.max_failures\); the last: third"
    ):
        failures.count("forward/0", RuntimeError("third"), WHERE, disk_full=False)


def test_a_success_forgives() -> None:
    failures = Failures(2)
    failures.count("forward/0", RuntimeError(), WHERE, disk_full=False)
    failures.forgive("forward/0")
    failures.forgive("never counted")
    failures.count("forward/0", RuntimeError(), WHERE, disk_full=False)


def test_the_cause_is_named_where_it_is_known() -> None:
    with pytest.raises(StorageError, match=r"full on node 10\.0\.0\.7, at /scratch/ray; make room there"):
        Failures(1).count("forward/0", OSError(), WHERE, disk_full=True)
    with pytest.raises(InputError, match=r"cannot import lamina\.forms: install the project there"):
        Failures(1).count(START, ImportError("No module named 'lamina.forms'"), {}, disk_full=False)
    with pytest.raises(WorkerError, match=r"^1 workers died before they were ready"):
        Failures(1).count(START, RuntimeError(), {}, disk_full=False)


def test_collecting_units_of_all_workers_count_as_one() -> None:
    units = [Collect("pass", 3, worker, "sums", ()) for worker in ("a", "b")]
    assert {failure_key(unit) for unit in units} == {"collect/pass/3"}
