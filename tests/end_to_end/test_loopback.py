"""The Ray that a command starts by itself: not reachable from other machines, and no more of it than a job needs."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any

import psutil
import pytest
import ray
import ray._private.worker as ray_worker


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
