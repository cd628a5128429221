"""Joining a cluster has a limit and hears signals; a Ray of our own is started twice at most."""

from __future__ import annotations

import contextlib
import http.server
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from ray._private import ray_constants
from ray._private import worker as ray_worker

from manifests.errors import InputError, Interrupted, WorkerError
from manifests.schema import Workers
from pipeline.cost_model.probe import ProbedShape
from pipeline.cost_model.rates import NOMINAL_CPU, Rates
from stores.disk import Disk
from tests.ports import serving
from workers import actor, cluster
from workers.cluster import (
    autoscales,
    await_cluster,
    connect,
    declared_memory,
    log_message,
    whole_room,
    why_unplaceable,
)


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 is meant as it is said; Ray otherwise takes the machine's outer address for it."""
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)


def never() -> bool:
    return False


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    """Ray's dashboard, say, at the port that jobs are submitted to."""
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)) as address:
        yield address


@pytest.mark.slow
def test_nobody_answers() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"no cluster answers at {address} .*--connect-timeout"):
            await_cluster(address, 0.5, never)


@pytest.mark.slow
def test_somebody_who_is_no_ray() -> None:
    with silent_server() as address, pytest.raises(InputError, match=r"no cluster answers at .*timed out.*0.5 s"):
        await_cluster(address, 0.5, never)
    with http_server() as address, pytest.raises(InputError, match=r"the server is not Ray"):
        await_cluster(address, 0.5, never)


def test_a_grpc_server_is_taken_for_ray() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        await_cluster(f"127.0.0.1:{port}", 5.0, never)
    finally:
        server.stop(None)


@pytest.mark.slow
def test_a_signal_while_connecting() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started = time.monotonic()
    with silent_server() as address, pytest.raises(Interrupted, match="while connecting to Ray"):
        await_cluster(address, 60.0, stop.is_set)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", ":6379", "host:port"])
def test_no_address(address: str) -> None:
    with pytest.raises(InputError, match="is not an address; give --address HOST:PORT"):
        await_cluster(address, 5.0, never)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`ray.init` as it goes: the options of each call; `faults` are raised by the first ones."""
    calls: list[dict[str, Any]] = []
    faults: list[Exception] = []

    def init(**options: Any) -> None:
        calls.append(options)
        if faults:
            raise faults.pop(0)

    fake = SimpleNamespace(
        init=init,
        is_initialized=lambda: False,
        shutdown=lambda: calls.append({"shutdown": True}),
        cluster_resources=lambda: {"CPU": 2.0},
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"),
    )
    monkeypatch.setattr(cluster, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(init, "faults", faults, raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    calls.append({"faults": faults})
    return calls


SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed.")


def test_a_home_that_cannot_be_written_needs_no_token_file(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file, below which nothing can be made")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    loader = cluster._raylet.AuthenticationTokenLoader.instance()
    loader.reset_cache()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "to be put back")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    connect(None, Workers())
    assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32
    assert loader.has_token(ignore_auth_mode=True)
    monkeypatch.undo()
    loader.reset_cache()


def test_a_slow_start_is_tried_again(starts: list[dict[str, Any]]) -> None:
    starts.pop(0)["faults"].append(SLOW)
    assert connect(None, Workers()) == "127.0.0.1:1"
    assert ["shutdown" in call for call in starts] == [False, True, False]


def test_two_slow_starts_are_explained(starts: list[dict[str, Any]]) -> None:
    starts.pop(0)["faults"].extend([SLOW, SLOW])
    with pytest.raises(WorkerError, match=r"did not start on this machine, 2 times .*busy.*ray start --head"):
        connect(None, Workers())


def test_more_threads_than_this_machine_has_cores_are_refused(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "machine_cores", lambda: 2)
    with pytest.raises(InputError, match=r"workers.cpus: 3 threads .* the cores of this machine, 2; set workers.cpus"):
        connect(None, Workers(cpus=3))
    assert starts == [{"faults": []}], "Ray is not started"


def test_a_cluster_is_told_whose_job_it_is(starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "await_cluster", lambda *_: None)
    connect("10.0.0.1:6379", Workers(), about={"lamina": "70b", "output": "/data/70b"})
    assert starts[-1]["job_config"].metadata == {"lamina": "70b", "output": "/data/70b"}


def test_another_version_is_named(starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.9\nThis process ..."
    starts.pop(0)["faults"].append(RuntimeError(said))
    monkeypatch.setattr(cluster, "await_cluster", lambda *_: None)
    with pytest.raises(InputError, match=r"10.0.0.1:6379 is of another version than this command: .*Ray: 2.59.0"):
        connect("10.0.0.1:6379", Workers())


def test_the_environment_s_address_is_named(starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(cluster.services, "find_gcs_addresses", lambda *_: set())
    monkeypatch.setattr(cluster.services, "find_bootstrap_address", lambda *_: None)
    with pytest.raises(InputError, match=r"no cluster at auto .*RAY_ADDRESS gave this one: unset it"):
        connect(None, Workers())
    # What a Ray that is dead has left: `ray.init` would wait for it for ever.
    monkeypatch.setattr(cluster.services, "find_bootstrap_address", lambda *_: "127.0.0.1:9")
    with pytest.raises(InputError, match=r"no cluster answers at 127.0.0.1:9.*RAY_ADDRESS gave this one: unset it"):
        connect(None, Workers(), timeout_s=0.1)
    monkeypatch.setenv("RAY_ADDRESS", "localhost")
    with pytest.raises(InputError, match=r"'localhost' is not an address.*RAY_ADDRESS gave this one"):
        connect(None, Workers())


def test_a_path_too_long_for_sockets(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "long"))
    starts.pop(0)["faults"].extend([OSError("AF_UNIX path length cannot exceed 107 bytes: x"), OSError("another")])
    with pytest.raises(InputError, match=r"the path .*/long.*is too long for sockets.*set TMPDIR"):
        connect(None, Workers())
    with pytest.raises(OSError, match="another"):
        connect(None, Workers())


@pytest.mark.usefixtures("starts")
def test_a_temporary_folder_that_cannot_hold_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(Disk, "free_bytes", lambda _: 1_000_000)
    with pytest.raises(InputError, match=r"has 1\.0 MB free of the 32 MB.*set TMPDIR"):
        connect(None, Workers())
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"keeps its sockets and logs in .*/file: .*set TMPDIR"):
        connect(None, Workers())


@pytest.mark.parametrize(
    ("kinds", "workers", "fits"),
    [
        ({"node_aa"}, Workers(cpus=4), True),
        ({"node_aa"}, Workers(cpus=5), False),
        ({"node_aa"}, Workers(cpus=1, gpus=0.5), False),
        ({"node_aa", "gpu.large"}, Workers(cpus=1, gpus=1), True),
    ],
)
def test_whether_a_worker_will_ever_have_a_place(
    kinds: set[str], workers: Workers, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind of nodes that is not named after one is the autoscaler's."""
    nodes = [
        {"NodeID": "aa", "Alive": True, "Resources": {"CPU": 4.0}},
        {"NodeID": "bb", "Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr(cluster, "ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(cluster, "_node_kinds", lambda: kinds)
    reason = why_unplaceable(workers)
    assert (reason is None) == fits
    assert fits or "the largest has 4 CPUs and 0 GPUs" in str(reason)


def test_a_worker_needs_a_node_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": "aa", "Alive": True, "Resources": {"CPU": 4.0, "memory": 2.0**31}}]
    monkeypatch.setattr(cluster, "ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(cluster, "_node_kinds", lambda: {"node_aa"})
    assert why_unplaceable(Workers(), 2**31) is None
    assert declared_memory(Workers(), 2**31) == 2**31
    assert declared_memory(Workers(), 3 * 2**30) == 0
    assert "3.0 GiB of memory (by the plan)" in str(why_unplaceable(Workers(), 3 * 2**30))
    assert "2.0 GiB declared to Ray" in str(why_unplaceable(Workers(), 3 * 2**30))
    monkeypatch.setattr(cluster, "_node_kinds", lambda: {"node_aa", "gpu.large"})
    assert declared_memory(Workers(), 2**31) == 0


def test_our_own_ray_counts_the_machine_s_memory_and_is_not_nice(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.clear()
    monkeypatch.delenv("RAY_worker_niceness")
    connect(None, Workers())
    assert starts[0]["_memory"] == cluster.machine_bytes() > 2**28
    assert os.environ["RAY_worker_niceness"] == "0"  # noqa: SIM112 - Ray's spelling


@pytest.mark.parametrize(("mapping", "found"), [({"aa": "ray.head.default"}, True), ({"aa": "node_aa"}, False)])
def test_the_autoscaler_s_report(mapping: dict[str, str], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray 2.60 writes it: without workers, the head alone is in it."""
    report = {"autoscaler_report": {"active_nodes": {}, "node_type_mapping": mapping, "legacy": True}}
    monkeypatch.setattr(cluster, "ray", SimpleNamespace(nodes=lambda: [{"NodeID": "aa"}]))
    monkeypatch.setattr(cluster, "is_autoscaler_v2", lambda **_: False)
    monkeypatch.setattr(cluster, "_internal_kv_get", lambda _: json.dumps(report).encode())
    assert autoscales() is found
    monkeypatch.setattr(cluster, "_internal_kv_get", lambda _: b"{}")
    assert autoscales()
    monkeypatch.setattr(cluster, "_internal_kv_get", lambda _: None)
    assert not autoscales()


class Probed:
    """Ray as far as probing goes: two nodes take actors in turn; a class decorated is made here."""

    def __init__(self, **free: float) -> None:
        self.free = free
        self.made: list[Any] = []
        self.node = 0

    def available_resources(self) -> dict[str, float]:
        return self.free

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: f"node {self.node}")

    def remote(self, kind: type) -> SimpleNamespace:
        def options(**asked: float) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda: self._place(kind(), asked))

        return SimpleNamespace(options=options)

    def _place(self, actor: Any, asked: dict[str, float]) -> SimpleNamespace:
        place = len(self.made) % 2
        self.made.append(asked)

        def node() -> str:
            self.node = place
            return str(actor.node())

        return SimpleNamespace(node=SimpleNamespace(remote=node), rates=SimpleNamespace(remote=actor.rates))

    @staticmethod
    def get(results: list[Any]) -> list[Any]:
        return results


@pytest.mark.parametrize(("free", "probes", "on_one"), [({"CPU": 11.0}, 5, 3), ({"CPU": 7.0}, 3, 2), ({}, 1, 1)])
def test_as_many_workers_are_probed_as_there_is_room_for(
    free: dict[str, float], probes: int, on_one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share their nodes, and what is found is their mean."""
    fake, shape = Probed(**free), ProbedShape(64, 64, 16)
    speeds = iter(range(1, 10))

    def measured(device: torch.device, dtype: torch.dtype, threads: int, per_node: int, asked: ProbedShape) -> Rates:
        assert (device.type, dtype, threads, asked) == ("cpu", torch.bfloat16, 2, shape)
        return replace(NOMINAL_CPU, products=float(next(speeds)), workers_per_node=per_node)

    for module in (cluster, actor):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr("pipeline.cost_model.probe.measured_rates", measured)
    found = cluster.probe_workers(Workers(max=5, cpus=2), torch.bfloat16, shape)
    assert fake.made == [{"num_cpus": 2, "num_gpus": 0}] * probes
    assert found == replace(NOMINAL_CPU, products=(1 + probes) / 2, workers_per_node=on_one)


def test_what_ray_calls_for_its_messages_is_there() -> None:
    """`connect` replaces the function by which Ray prints reports of its nodes on a driver's terminal."""
    assert list(inspect.signature(ray_worker.print_to_stdstream).parameters) == ["data", "ignore_prefix"]
    assert list(inspect.signature(log_message).parameters) == ["data", "ignore_prefix"]


@pytest.mark.parametrize(
    ("address", "asked", "sent"),
    [(None, None, False), (None, "1", False), ("10.0.0.1:6379", None, False), ("10.0.0.1:6379", "1", True)],
)
def test_the_environment_of_uv_run_is_sent_to_a_cluster_only_if_asked(
    address: str | None, asked: str | None, sent: bool, starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local Ray has no agent for it, and its workers run on this Python anyway."""
    monkeypatch.setattr(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", True)  # as Ray reads it, where it is not set
    monkeypatch.setattr(cluster, "await_cluster", lambda *_: None)
    monkeypatch.delenv(cluster.UV_SWITCH, raising=False)
    if asked:
        monkeypatch.setenv(cluster.UV_SWITCH, asked)
    connect(address, Workers())
    assert ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is sent
    assert len(starts) == 2


def a_hook(environment: dict[str, Any] | None) -> dict[str, Any]:
    """A user's hook: called by its name."""
    assert environment is None
    return {"env_vars": {"A": "b"}}


def no_hook(environment: dict[str, Any] | None) -> None:
    """A hook that leaves the environment as it is."""


@pytest.mark.parametrize(("hook", "environment"), [(None, None), (a_hook, {"env_vars": {"A": "b"}}), (no_hook, None)])
def test_a_local_ray_has_an_agent_for_environments_if_the_user_s_hook_returns_one(
    hook: Callable[..., Any] | None,
    environment: dict[str, Any] | None,
    starts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent: list[tuple[str, ...]] = []
    init = cluster.ray.init

    def started(**options: Any) -> None:
        absent.append(cluster._BareNode.absent)
        init(**options)

    monkeypatch.setattr(cluster.ray, "init", started)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"pip": ["x"]}}')  # of a cluster it runs on
    if hook:
        monkeypatch.setattr(cluster, "load_class", {"users.hook": hook}.__getitem__)
        monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "users.hook")
    connect(None, Workers())
    assert starts[-1]["runtime_env"] == environment
    assert starts[-1]["_skip_env_hook"]
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ
    assert absent == [tuple(cluster.AGENTS)[: 1 if environment else 2]]


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_hook_that_fails_is_named(
    address: str | None, starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        ray_worker._maybe_modify_runtime_env({}, _skip_env_hook=False)  # by which Ray's init calls it

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "await_cluster", lambda *_: None)
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "no_such_module.hook")
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    message = r"RAY_RUNTIME_ENV_HOOK: no_such_module.hook fails \(ModuleNotFoundError: .*\); correct it, or unset it$"
    with pytest.raises(InputError, match=message):
        connect(None, Workers())


@pytest.mark.parametrize(("gpus", "expected"), [(0, 5), (1, 3)])
def test_the_whole_cluster_holds_what_each_node_holds(
    gpus: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"CPU": 7.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 8.0}, {"CPU": 3.0}]
    monkeypatch.setattr(cluster, "live_nodes", lambda: nodes)
    assert whole_room(Workers(max=8, cpus=2, gpus=gpus)) == expected
    assert whole_room(Workers(max=8, cpus=9, gpus=gpus)) == 1


def test_our_ray_without_the_agent_is_started_anew_for_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Workers, bool]] = []
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", dict)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here"))
    monkeypatch.setattr(cluster, "_start_local", lambda workers, trains: started.append((workers, trains)))
    monkeypatch.setattr(cluster.ray_worker, "_global_node", object.__new__(cluster._BareNode))
    for absent in ((cluster.ENVIRONMENT_AGENT,), ()):
        monkeypatch.setattr(cluster._BareNode, "absent", absent, raising=False)
        for trains in (False, True):
            assert connect(None, Workers(max=1), trains=trains) == "here"
    assert started == [(Workers(max=1), True)]
