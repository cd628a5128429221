"""Deaths of workers in a row, and how the job ends by them."""

from __future__ import annotations

import pytest

from manifests.errors import InputError, StorageError, WorkerError
from pipeline.units.sums import Collect
from workers.failures import START, Failures, failure_key

WHERE = {"node": "10.0.0.7", "ray_folder": "/scratch/ray"}


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
