"""Fixtures for tests of the driver."""

from __future__ import annotations

import pytest

from pipeline.driver.job_spec import Job
from tests.driver.simulation import JOBS


@pytest.fixture(params=list(JOBS))
def job(request: pytest.FixtureRequest) -> Job:
    """Return a simulated job, one of several kinds."""
    return JOBS[request.param]()
