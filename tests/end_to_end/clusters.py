"""Starts a Ray cluster as an operator does: `ray start --head`, with a dashboard or an autoscaler, on loopback."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import workers.cluster
from tests.ports import free_port

OBJECTS = 80 * 2**20  # bytes of a node's object store
START_S = 60.0
HEAD_ID = "f" * 51 + "00000"  # the head's name in Ray's provider of nodes that are processes
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # unneeded workers cost seconds on each node and in each job
    "RAY_enable_worker_prestart": "0",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
QUIET = ["--include-log-monitor=false"]  # its copies are not needed
UNSHARE = ("unshare", "--mount", *(("--user", "--map-root-user") if os.getuid() else ()))
JOIN_ON_LOOPBACK = """if True:
    from ray._private import services
    services.get_node_ip_address = lambda *_: "127.0.0.1"  # or this becomes the external address
    from ray.scripts.scripts import main
    main()"""
AUTOSCALING = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
}

ROOT = Path(__file__).resolve().parents[2]


def ray_command(*arguments: str) -> list[str]:
    """Return the command `ray ARGUMENTS` of this environment."""
    return [str(Path(sys.executable).with_name("ray")), *arguments]


@contextlib.contextmanager
def head_node(cpus: int, *options: str, most_nodes: int = 0) -> Iterator[str]:
    """Yield the address HOST:PORT of a cluster, which ends with the context, with all its processes.

    Args:
        most_nodes: the number of nodes of one CPU each that Ray's autoscaler may add.
    """
    port, environment = free_port(), ENVIRONMENT
    scratch = tempfile.mkdtemp(prefix="ray-")  # a short name: it holds sockets
    if most_nodes:
        config = _autoscaling_config(Path(scratch, "autoscaling.json"), most_nodes, f"127.0.0.1:{port}")
        options, environment = (*options, f"--autoscaling-config={config}"), {**ENVIRONMENT, **AUTOSCALING}
    command = ray_command("start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1")
    command += [f"--num-cpus={cpus}", f"--object-store-memory={OBJECTS}", f"--temp-dir={scratch}"]
    command += QUIET if most_nodes else [*QUIET, "--no-monitor"]
    command += [
        f"--dashboard-agent-listen-port={free_port()}"
    ]  # the default port may still be used by the previous cluster
    log = Path(scratch, "head.log")
    with open(log, "w") as said:
        head = subprocess.Popen(
            [*command, *options],
            env={**os.environ, **environment},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        _await_start(head, log)
        yield f"127.0.0.1:{port}"
    finally:
        _end(head)
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def private_node(address: str, cpus: int, shared: Path) -> Iterator[None]:
    """Add a node with a separate temporary folder, which sees only `shared` of the folders of the driver and the tests.

    It has its own mount namespace; where the system allows none, only its TMPDIR differs.
    """
    scratch = Path(tempfile.mkdtemp(prefix="node-", dir="/var/tmp"))
    start = [sys.executable, "-c", JOIN_ON_LOOPBACK, "start", f"--address={address}", "--block"]
    start += ["--node-ip-address=127.0.0.1", *QUIET]
    start += [f"--num-cpus={cpus}", f"--object-store-memory={OBJECTS}", f"--dashboard-agent-listen-port={free_port()}"]
    command = start
    if can_unshare():
        hidden = [tempfile.gettempdir(), *(str(path) for path in shared.parents if path.name.startswith("pytest-of-"))]
        kept = [path for path in (shared, ROOT, Path(sys.prefix)) if any(map(path.is_relative_to, hidden))]
        seen = [str(path) for path in kept]
        keep = [f"mkdir {scratch}/{n} && mount --bind {path} {scratch}/{n}" for n, path in enumerate(seen)]
        show = [f"mkdir -p {path} && mount --bind {scratch}/{n} {path}" for n, path in enumerate(seen)]
        hide = "\n".join(
            [
                "set -e",
                *keep,
                *(f"mkdir -p {folder} && mount -t tmpfs tmpfs {folder}" for folder in hidden),
                *show,
                f"cd {ROOT}",
                'exec "$@"',
            ]
        )
        command = [*UNSHARE, "sh", "-c", hide, "sh", *start]
    log = scratch / "log"
    environment = {**os.environ, **ENVIRONMENT, **({} if can_unshare() else {"TMPDIR": str(scratch)})}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # otherwise Ray refuses to join a cluster on loopback
    with open(log, "w") as said:
        node = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        _await_start(node, log)
        yield
    finally:
        _end(node)
        shutil.rmtree(scratch, ignore_errors=True)


@functools.cache
def can_unshare() -> bool:
    """Return True if this system allows mount namespaces."""
    try:
        return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode == 0
    except FileNotFoundError:
        return False


def _end(node: subprocess.Popen[bytes]) -> None:
    try:
        processes = psutil.Process(node.pid).children(recursive=True)
    except psutil.NoSuchProcess:  # it did not start
        processes = []
    node.kill()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait()
    psutil.wait_procs(processes, timeout=START_S)


def _await_start(head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _autoscaling_config(path: Path, most_nodes: int, gcs_address: str) -> Path:
    """Write the file of `ray start --autoscaling-config`:

    nodes of one CPU each, which are processes of this machine.
    """
    node = {"node_config": {}, "min_workers": 0}
    config: dict[str, Any] = {
        "cluster_name": "test",
        "max_workers": most_nodes,
        "idle_timeout_minutes": 60,
        "provider": {
            "type": "fake_multinode",
            "head_node_id": HEAD_ID,
            "gcs_address": gcs_address,
            "launch_multiple": True,
            "foreground_node_launch": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "worker_liveness_check": False,
            "worker_rpc_drain": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {**node, "resources": {"CPU": 0}, "max_workers": 0},
            "worker": {
                **node,
                "resources": {"CPU": 1, "object_store_memory": OBJECTS},
                "max_workers": most_nodes,
            },
        },
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands")},
        **{key: [] for key in ("setup_commands", "head_setup_commands", "worker_setup_commands")},
        **{key: [] for key in ("head_start_ray_commands", "worker_start_ray_commands")},
        "file_mounts_sync_continuously": False,
    }
    path.write_text(json.dumps(config))
    return path


def loopback() -> None:
    """In a child that joins: 127.0.0.1 is meant as it is said."""
    workers.cluster._listen_on_loopback()
