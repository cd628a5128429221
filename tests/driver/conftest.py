"""Fixtures of several files about the driver."""

from __future__ import annotations

import pytest

from pipeline.driver.job_spec import Job
from tests.driver.simulation import JOBS


@pytest.fixture(params=list(JOBS))
def job(request: pytest.FixtureRequest) -> Job:
    """One of the simulated jobs."""
    return JOBS[request.param]()
