"""The record of how a run ended."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import InputError, Interrupted, InUseError, StorageError
from pipeline.job import run_record
from pipeline.job.run_record import recorded
from stores.ledger import Ledger
from stores.run_directory import ENDED
from tests.memory_storage import Memory


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(run_record, "open_log", lambda *_: "run/logs/1.log")
    monkeypatch.setattr(run_record, "close_log", lambda: None)
    storage, state = Memory(), {"phase": "solve", "unit": "solve/3/0/mlp"}
    run_dir = SimpleNamespace(logs=storage, storage=storage, lock=SimpleNamespace(token="ours"))
    observer = SimpleNamespace(state=state, say=lambda *_: None)
    return SimpleNamespace(
        run_dir=run_dir, observer=observer, ledger=Ledger(Memory()), seconds=lambda: {"total": 2.0}, name="job"
    )


def ended(job: Any) -> dict[str, Any] | None:
    storage = job.run_dir.storage
    return json.loads(storage.read(ENDED)) if storage.has(ENDED) else None


def test_a_run_that_is_done(job: Any) -> None:
    with recorded(job):
        assert ended(job) is None
    record = ended(job)
    assert record is not None
    assert (record["outcome"], record["exit_code"], record["error"]) == ("done", 0, None)
    assert (record["run"], record["log"], record["texts"]) == ("ours", "run/logs/1.log", None)
    assert record["where"] == "phase solve, after solve/3/0/mlp"


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (InputError("wrong"), 2, "failed"),
        (Interrupted("SIGTERM"), 75, "interrupted"),
        (StorageError("full"), 1, "failed"),
        (ZeroDivisionError("a fault of ours"), 1, "failed"),
        (KeyboardInterrupt(), None, None),
    ],
)
def test_a_run_that_fails_is_recorded_and_the_error_goes_on(
    job: Any, error: BaseException, code: int | None, outcome: str | None
) -> None:
    job.observer.state = {}
    with pytest.raises(type(error)), recorded(job):
        raise error
    record = ended(job)
    assert record is not None
    assert record["where"] is None or isinstance(record["where"], str)
    if code is not None:
        assert (record["exit_code"], record["outcome"]) == (code, outcome)
        assert str(error) in record["error"]


def test_another_s_run_directory_is_left_alone(job: Any) -> None:
    with pytest.raises(InUseError), recorded(job):
        raise InUseError("another process has it")
    assert ended(job) is None


def test_a_record_that_cannot_be_written_hides_no_error(
    job: Any, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def full(name: str, data: bytes) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(job.run_dir.storage, "replace", full)
    with pytest.raises(InputError, match="wrong"), recorded(job):
        raise InputError("wrong")
    assert "could not be entered: no space left" in "\n".join(said)
