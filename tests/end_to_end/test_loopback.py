"""The Ray that a command starts by itself: not reachable from other machines, and no more of it than a job needs."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any

import psutil
import pytest
import ray


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
    others = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # an idle worker may end at any time
            command = str(process.cmdline())
            if "multiprocessing" in command:
                continue  # from which other tests fork
            is_worker = process.name().startswith(("python", "ray::")) and "default_worker.py" in command
            if not is_worker and not process.name().startswith("ray::"):
                others.add(process.name())
    assert others == {"gcs_server", "raylet", "cat"}
