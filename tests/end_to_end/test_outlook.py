"""The phases that a job is expected to go through are those that it goes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.console.outlook import Outlook
from pipeline.console.progress import JobObserver
from tests.end_to_end.jobs import Job

pytestmark = pytest.mark.usefixtures("inline_everywhere")

ALONE = {"checks", "verify", "measure"}
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
}


@pytest.mark.parametrize("name", JOBS)
def test_phases_come_as_they_are_planned(
    name: str, job: Callable[..., Job], scored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Outlook] = []
    observers: list[JobObserver] = []
    expect = JobObserver.expect

    def kept(self: JobObserver, outlook: Outlook) -> None:
        seen.append(outlook)
        observers.append(self)
        expect(self, outlook)

    monkeypatch.setattr(JobObserver, "expect", kept)
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 16, "dense": True}}
    ended = job(**{**JOBS[name], "evaluation": evaluation}).run()
    assert ended.code == 0, ended.err
    (outlook,), (observer,) = seen, observers
    assert outlook.begun == len(outlook.planned), outlook.planned
    assert {ahead.phase for ahead in outlook.planned} == set(observer.seconds) - ALONE
    assert all(ahead.seconds > 0 for ahead in outlook.planned)
