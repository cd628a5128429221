"""Workers of a real Ray that a job cannot have: on other hardware than it began on, or larger than any node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import workers.pool
from pipeline.driver.ledger_keys import HARDWARE
from stores.ledger import Ledger
from tests.end_to_end.jobs import Job, file_digests
from workers.hardware import describe_hardware
from workers.pool import RayPool

MakeJob = Callable[..., Job]
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]


def test_a_job_stays_on_the_hardware_that_it_began_on(job: MakeJob) -> None:
    """The ledger says which that is; a worker of another kind is refused by name before it does anything."""
    made = job(**{"calibration.propagate": "dense"})
    assert made.run().code == 0
    began, before = made.ledger("hardware"), file_digests(made.output)
    assert began == describe_hardware(torch.device("cpu"))
    Ledger(made.run_dir / "ledger").commit(HARDWARE, {**began, "device": "NVIDIA H200"})
    second = made.root / "second"
    ended = made.run("--set", "budget.keep=0.5", "--set", f"output={second}")
    assert ended.code == 2, ended.err
    assert f"has device {began['device']} instead of NVIDIA H200, on which the job began" in ended.err
    assert "nodes of the first kind, or start over with --fresh" in ended.err
    assert not second.exists()
    assert file_digests(made.output) == before


def test_a_worker_larger_than_any_node_ends_the_job(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.pool, "RayPool", RayPool)  # whose workers ask for what the manifest says
    made = job(workers={"max": 1, "cpus": 999, "start_timeout_s": 1})
    ended = made.run()
    assert ended.code == 1, ended.err
    assert "a worker asks for 999 CPUs" in ended.err
    assert "no autoscaler is there to add one; waited" in ended.err
    assert not made.output.exists()
