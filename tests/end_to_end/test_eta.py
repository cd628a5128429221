"""The phases that a job is expected to go through are those that it goes through."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import Interrupted
from pipeline.console.eta import Eta, PlannedPhase
from pipeline.console.progress import JobObserver
from pipeline.job import heartbeat
from stores.ledger import Ledger
from tests.end_to_end.jobs import MakeJob

pytestmark = pytest.mark.usefixtures("inline")

ALONE = {"checks", "verify", "measure"}
NIGHTLY = ("dense", "by loss", "within a loss")
JOBS: dict[str, dict[str, Any]] = {
    "compressed": {},
    "dense": {"calibration.propagate": "dense"},
    "data-free": {"methods": [{"method": "lorc"}], "calibration": None, "budget.keep": 0.9},
    "by loss": {"methods": [{"method": "loss_aware"}], "calibration.propagate": "dense"},
    "within a loss": {
        "methods": [{"method": "loss_aware"}],
        "calibration.propagate": "dense",
        "budget": {"max_loss": 0.4},
    },
    "corrected": {"methods": [{"method": "loss_aware", "correct": "output"}], "calibration.propagate": "dense"},
    "corrected rounding": {
        "methods": [],
        "budget": None,
        "quantize": {"bits": 4, "group": None, "correct": "output"},
        "calibration.propagate": "dense",
    },
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in JOBS])
def test_phases_come_as_they_are_planned(
    name: str, job: MakeJob, scored: Path, expected: list[tuple[JobObserver, Eta, tuple[PlannedPhase, ...]]]
) -> None:
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 16, "dense": True}}
    ended = job(**{**JOBS[name], "evaluation": evaluation}).run()
    assert ended.code == 0, ended.err
    ((observer, eta, _),) = expected
    assert eta.begun == len(eta.planned), eta.planned
    assert {ahead.phase for ahead in eta.planned} == set(observer.seconds) - ALONE
    assert all(ahead.seconds > 0 for ahead in eta.planned)


CUTS = {  # job -> the entry that an interruption prevents
    "compressed": "layer/00001",
    "dense": "layer/00001",
    "by loss": "curves/00001",
    "within a loss": "tries/",
    "corrected": "layer/00001",
    "corrected rounding": "layer/00001",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in CUTS])
def test_a_resumed_job_counts_what_is_left_alone(
    name: str,
    job: MakeJob,
    scored: Path,
    expected: list[tuple[JobObserver, Eta, tuple[PlannedPhase, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each planned phase comes, none that is committed is planned, and the paces of the first run are known."""
    begun: list[str] = []
    begin, commit = Eta.begin, Ledger.commit

    def noted(self: Eta, phase: str, layers: int | None = None) -> None:
        begin(self, phase, layers)
        begun.extend([phase] if self.at is not None else [])

    def cut(self: Ledger, key: Any, record: Any) -> None:
        if key.startswith(CUTS[name]):
            time.sleep(0.1)  # for a beat of the heart
            raise Interrupted("cut")
        commit(self, key, record)

    monkeypatch.setattr(Eta, "begin", noted)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 16, "dense": True}}
    made = job(**{**JOBS[name], "evaluation": evaluation})
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", cut)
        assert made.run().code == Interrupted.exit_code
    begun.clear()
    ended = made.run()
    assert ended.code == 0, ended.err
    (*_, before), (_, eta, left) = expected
    planned = eta.planned
    assert PlannedPhase("statistics", 0.0).kind in eta.earlier
    assert len(begun) == eta.begun == len(planned), (begun, planned)
    assert all(ahead.seconds > 0 for ahead in planned)
    phase = planned[1].phase
    first, second = (sum(ahead.seconds for ahead in one if ahead.phase == phase) for one in (before, left))
    assert second < first, "layers that are committed are not counted"
