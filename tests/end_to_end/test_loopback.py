"""The Ray that a command starts by itself: not reachable from other machines, and no more of it than a job needs."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
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


def processes_of_ray() -> list[tuple[str, str]]:
    """(name, command) of what this process's Ray runs, not of what other tests have started, nor of what has ended."""
    package, found = str(Path(ray.__file__).parent), []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # an idle worker may end at any time
            name, parent, command = process.name(), process.parent(), " ".join(process.cmdline())
            by_raylet = parent is not None and parent.name() == "raylet"
            if command and (package in command or name.startswith("ray") or by_raylet):
                found.append((name, command))
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
    servers = {name for name, command in processes_of_ray() if "default_worker.py" not in command and "::" not in name}
    assert servers == {"gcs_server", "raylet", "cat"}
