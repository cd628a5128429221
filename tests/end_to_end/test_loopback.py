"""Ray on this machine: its addresses, its processes, and its hardware."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any

import psutil
import pytest
import ray
import ray._private.worker as ray_worker
import torch

import workers.pool
from pipeline.driver.ledger_keys import HARDWARE
from stores.ledger import Ledger
from tests.end_to_end.jobs import MakeJob, file_digests
from workers.hardware import describe_hardware
from workers.pool import RayPool


def listening() -> list[tuple[str, Any]]:
    """(program, address) of every TCP port that this process and those it has started wait at."""
    found = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            connections, name = process.net_connections("tcp"), process.name()
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # an idle worker may end at any time
            continue
        found += [(name, connection.laddr) for connection in connections if connection.status == psutil.CONN_LISTEN]
    return found


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_ray_listens_on_loopback_only() -> None:
    ports = listening()
    assert {"gcs_server", "raylet"} <= {name for name, _ in ports}
    reachable = [at for _, at in ports if not ipaddress.ip_address(at.ip.removeprefix("::ffff:")).is_loopback]
    assert reachable == []


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_ray_is_no_more_than_its_two_servers_and_the_workers() -> None:
    ray.get(ray.remote(num_cpus=0)(lambda: None).remote())  # others may hold every CPU
    started = ray_worker._global_node.all_processes
    assert {kind for kind, processes in started.items() if processes} == {"gcs_server", "raylet"}
    (raylet,) = started["raylet"]
    agents = []
    for process in psutil.Process(raylet.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # an idle worker may end at any time
            command = process.cmdline()
            if command and not command[0].startswith("ray::") and "default_worker.py" not in str(command):
                agents.append(command)
    assert agents == [["cat"], ["cat"]]


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
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


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_a_worker_larger_than_any_node_ends_the_job(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.pool, "RayPool", RayPool)  # whose workers ask for what the manifest says
    made = job(workers={"max": 1, "cpus": 999, "start_timeout_s": 1})
    ended = made.run()
    assert ended.code == 1, ended.err
    assert "a worker asks for 999 CPUs" in ended.err
    assert "no autoscaler is there to add one; waited" in ended.err
    assert not made.output.exists()
