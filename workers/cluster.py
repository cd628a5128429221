"""The Ray cluster a job runs on: a running one is joined, or one is started on this machine."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import ray
import torch
from ray import _raylet
from ray._common.utils import get_default_system_temp_dir, get_system_memory
from ray._private import node as ray_node
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    generate_and_save_token,
)
from ray._private.services import resolve_ip_for_localhost
from ray.autoscaler._private.util import format_readonly_node_type
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import _internal_kv_get
from ray.job_config import JobConfig

from manifests.errors import InputError, Interrupted, StorageError, WorkerError
from manifests.schema import Workers
from pipeline.cost_model.probe import ProbedShape, mean_rates
from pipeline.cost_model.rates import Rates
from stores.storage import open_storage
from workers.actor import RateProbe
from workers.hardware import machine_cores, thread_fault
from workers.liveness import RayWatch, fault_at
from workers.ray_messages import log_message

LOOK_SECONDS = 0.2
AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")  # processes that a raylet starts, and dies with
AGENT_PORTS = ("DASHBOARD_AGENT_LISTEN", "METRICS_AGENT", "METRICS_EXPORT", "RUNTIME_ENV_AGENT")
SESSION_BYTES = 32_000_000  # a small job's logs are 2 MB, a long one's are rotated
MAX_PROBES = 64
STARTS = 2  # of a Ray of our own, on a machine that may be busy
SOCKET_PATH = "AF_UNIX path length"  # of which the system takes 107 bytes
TOO_SLOW = "timed out during startup"  # what Ray says of its own node


def connect(
    address: str | None,
    workers: Workers,
    timeout_s: float = 30.0,
    stopped: Callable[[], bool] = lambda: False,
    about: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Joins a running Ray cluster, or starts one on this machine that listens on loopback only. Returns its address.

    A process that is connected stays so. An address may also come from RAY_ADDRESS, as under `ray job submit`.

    Args:
        timeout_s: for how long a cluster that does not answer is waited for.
        stopped: whether a signal came; looked at while waiting.
        about: metadata of the job, which Ray's dashboard and `ray list jobs` show.

    Raises:
        InputError: no cluster answers, it is of another version, or this machine has fewer cores or GPUs than a worker
            asks for.
        Interrupted: `stopped` said so.
        WorkerError: a Ray of our own did not start.
    """
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    found = address or os.environ.get("RAY_ADDRESS")
    if not found and (fault := thread_fault(workers.cpus, machine_cores(), "this machine")):
        raise InputError(fault)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the other workers of the machine
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray_utils.set_sigterm_handler = lambda _: None  # Ray's would end the command with its exit code, not with ours
    ray_worker.print_to_stdstream = log_message
    try:
        if found:
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            at = services.get_ray_address_from_environment("auto", None) if found == "auto" else found
            await_cluster(at, timeout_s, stopped)
            told = JobConfig(metadata=dict(about))
            ray.init(address=at, job_config=told, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _start_local(workers)
    except AuthenticationError as error:
        raise InputError(f"Ray: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        no_cluster = isinstance(error, ConnectionError) or SOCKET_PATH in str(error)
        if isinstance(error, WorkerError) or (isinstance(error, OSError) and not no_cluster):
            raise
        said = str(error) if isinstance(error, InputError) else _refusal(found, error)
        raise InputError(said if address or not found else f"{said}; RAY_ADDRESS gave this one: unset it") from error
    resources = ray.cluster_resources()
    if not found and workers.gpus * workers.min > resources.get("GPU", 0):
        ray.shutdown()
        raise InputError(
            f"workers.gpus: {workers.gpus} for each of {workers.min} workers, but this machine has "
            f"{resources.get('GPU', 0):g} GPUs; set workers.gpus: 0 or give --address of a cluster that has them"
        )
    return str(ray.get_runtime_context().gcs_address)


def await_cluster(address: str, timeout_s: float, stopped: Callable[[], bool]) -> None:
    """Returns when Ray answers at HOST:PORT. `ray.init` would wait for minutes, and hear no signal.

    Raises:
        InputError: nothing answers, or something that is no Ray.
        Interrupted: `stopped` said so.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise InputError(f"Ray: {address!r} is no address; give --address HOST:PORT, as `ray start` printed it")
    given, host = f"{host}:{port}", resolve_ip_for_localhost(host)  # as Ray will do
    where = given if given == f"{host}:{port}" else f"{given}, which is {host} to Ray,"
    deadline = time.monotonic() + timeout_s
    while (fault := fault_at(host, int(port))) is not None:
        if stopped():
            raise Interrupted("stopped by a signal while connecting to Ray")
        if time.monotonic() > deadline:
            raise InputError(
                f"Ray: none answers at {where} ({fault}); tried for {timeout_s:g} s (--connect-timeout). Give "
                "--address HOST:PORT of a running cluster, or none for a local one"
            )
        time.sleep(LOOK_SECONDS)


def watch_ray(note: Callable[[str], None]) -> RayWatch:
    """Of the cluster that this process is connected to; `note` takes lines for the log."""
    node: Any = ray_worker._global_node
    return RayWatch(node.raylet_socket_name, node.gcs_address, node.get_logs_dir_path(), note)


def _refusal(found: str | None, error: Exception) -> str:
    if "ersion mismatch" in str(error):
        said = " ".join(str(error).split())
        return f"Ray: the cluster at {found} is of another version than this command: {said}; install the same on both"
    if SOCKET_PATH in str(error):
        place = get_default_system_temp_dir()
        return (
            f"Ray: no socket can be below {place}, whose path is too long; set TMPDIR (or RAY_TMPDIR) to a shorter one"
        )
    return (
        f"Ray: no cluster at {found or 'this machine'} ({error}); give --address HOST:PORT or none; "
        "a cluster with tokens answers with RAY_AUTH_MODE=token only"
    )


def check_temporary_folder() -> None:
    """Tries the folder in which a Ray of our own keeps its sockets and logs.

    Raises InputError: nothing can be written there, or it has too little room.
    """
    place = open_storage(get_default_system_temp_dir())
    remedy = "set TMPDIR (or RAY_TMPDIR) to a folder with room, whose path is short"
    try:
        place.prepare()
        free_bytes = place.free_bytes()
    except StorageError as error:
        raise InputError(f"Ray keeps its sockets and logs in {place.at()}: {error}; {remedy}") from error
    if free_bytes is not None and free_bytes < SESSION_BYTES:
        raise InputError(
            f"Ray keeps its sockets and logs in {place.at()}, which has {free_bytes / 1e6:.1f} MB free of the "
            f"{SESSION_BYTES / 1e6:.0f} MB that it may need; {remedy}"
        )


def _start_local(workers: Workers) -> None:
    """A Ray of our own. Raises WorkerError when it does not start, twice."""
    check_temporary_folder()
    _listen_on_loopback()
    _have_token()
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, workers starve on a busy machine
    for start in range(STARTS):
        try:
            with _bare_node():
                ray.init(
                    address="local",  # not one that happens to run here
                    num_cpus=max(os.cpu_count() or 1, workers.min * workers.cpus),
                    _memory=machine_bytes(),  # Ray counts what is free just now, of which a busy machine has little
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _system_config={
                        "prestart_worker_first_driver": False,  # a process for every CPU
                        "enable_pipe_based_agent_to_parent_health_check": True,  # an agent's stdin ends with the raylet
                    },
                )
            return
        except Exception as error:  # Ray raises no kind of its own
            if TOO_SLOW not in str(error):
                raise
            ray.shutdown()
            if start + 1 == STARTS:
                raise WorkerError(
                    f"Ray did not start on this machine, {STARTS} times ({str(error).partition('.')[0]}): it is too "
                    f"busy (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs) or short of memory; stop other "
                    "programs, or start Ray with `ray start --head` and give --address"
                ) from error


def _have_token() -> None:
    """A token where Ray, which asks for one by default, would save a new one in a home that cannot be written."""
    loader = _raylet.AuthenticationTokenLoader.instance()  # type: ignore[attr-defined]  # no stub has it
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or loader.has_token(ignore_auth_mode=True):
        return
    try:
        generate_and_save_token()
    except (OSError, RuntimeError):  # no right to write there, or no home at all
        os.environ["RAY_AUTH_TOKEN"] = generate_new_authentication_token()
    loader.reset_cache()


class _BareNode(ray_node.Node):
    """A head node of what a job needs, gcs_server and raylet: not of Ray's dashboard, log monitor, autoscaler, and the
    raylet's agents for metrics and runtime environments, seven processes of Python that start for seconds.

    Ray has no switch for them. Instead of its agents, which a raylet insists on, it gets a process that waits for the
    end of its input, and it finds their ports written as Ray writes those of agents that do not serve.
    """

    def start_monitor(self) -> None:
        """Nothing starts nodes here."""

    def start_log_monitor(self) -> None:
        """Nobody reads what workers print."""

    def start_api_server(self, **_: Any) -> None:
        """No dashboard, and no jobs are submitted."""

    def start_raylet(self, *arguments: Any) -> None:
        """With agents that do nothing; Ray would import the dashboard's libraries to find out whether it can."""
        start_process, why_not = services.start_ray_process, ray_utils.get_dashboard_dependency_error

        def start(command: list[str], *others: Any, **options: Any) -> Any:
            stripped = [part.partition("=")[0] + "=cat" if part.startswith(AGENTS) else part for part in command]
            return start_process(stripped, *others, **options)

        for name in AGENT_PORTS:
            port_name = getattr(_raylet, f"{name}_PORT_NAME")
            _raylet.persist_port(self._session_dir, self._node_id, port_name, -1)  # type: ignore[attr-defined]
        services.start_ray_process = start
        ray_utils.get_dashboard_dependency_error = lambda: ImportError("no dashboard is started")
        try:
            super().start_raylet(*arguments)
        finally:
            services.start_ray_process, ray_utils.get_dashboard_dependency_error = start_process, why_not


@contextmanager
def _bare_node() -> Iterator[None]:
    """In here `ray.init` starts a `_BareNode`."""
    usual = ray_node.Node
    ray_node.Node = _BareNode  # type: ignore[misc]
    try:
        yield
    finally:
        ray_node.Node = usual  # type: ignore[misc]


def probe_workers(workers: Workers, dtype: torch.dtype, shape: ProbedShape) -> Rates:
    """Measure what one of these workers computes in a second while the others compute, too, where Ray places them.

    As many as the cluster has room for are measured at a time, at most `MAX_PROBES`. Returns their mean.
    """
    remote: Any = ray.remote(RateProbe).options(num_cpus=workers.cpus, num_gpus=workers.gpus)
    probes = [remote.remote() for _ in range(min(workers.max, MAX_PROBES, _room(workers)))]
    nodes = ray.get([probe.node.remote() for probe in probes])
    workers_per_node = max(nodes.count(node) for node in nodes)
    device = torch.device("cuda" if workers.gpus else "cpu")
    asked = (device, dtype, workers.cpus, workers_per_node, shape)
    return mean_rates(ray.get([probe.rates.remote(*asked) for probe in probes]))


def _room(workers: Workers) -> int:
    """How many workers there is room for beside other jobs; one at least, which an autoscaler may have to place."""
    free = ray.available_resources()
    by_gpu = free.get("GPU", 0.0) // workers.gpus if workers.gpus else float("inf")
    return max(1, int(min(free.get("CPU", 0.0) // workers.cpus, by_gpu)))


def machine_bytes() -> int:
    """Of this machine's memory, by which Ray places workers."""
    return int(get_system_memory())  # a container's limit counts


def object_store_room() -> int:
    """What a Ray of our own holds in memory of what workers pass on; the rest goes to disk."""
    return int(ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * machine_bytes())


def declared_memory(workers: Workers, memory_bytes: int) -> int:
    """What Ray is asked for: `memory_bytes` where a node that is there has declared so much; else 0.

    An autoscaler's kinds of nodes need not say their memory: asked for it, it would start none.
    """
    if not memory_bytes:
        return 0
    wanted = {"CPU": float(workers.cpus), "GPU": workers.gpus, "memory": float(memory_bytes)}
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = any(all(node.get(kind, 0.0) >= amount for kind, amount in wanted.items()) for node in alive)
    return memory_bytes if fits and not autoscales() else 0


def why_unplaceable(workers: Workers, memory_bytes: int = 0) -> str | None:
    """Why no worker will ever start: no node has what it asks for, and no autoscaler adds nodes. None: one may."""
    wanted = {"CPU": float(workers.cpus), "GPU": workers.gpus, "memory": float(memory_bytes)}
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(kind, 0.0) >= amount for kind, amount in wanted.items()) for node in alive) or autoscales():
        return None
    largest: dict[str, float] = max(
        alive, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0), node.get("memory", 0.0)), default={}
    )
    return (
        f"a worker asks for {workers.cpus} CPUs, {workers.gpus:g} GPUs (workers.cpus, workers.gpus) and "
        f"{memory_bytes / 2**30:.1f} GiB of memory (by the plan), but none of the {len(alive)} nodes has them; the "
        f"largest has {largest.get('CPU', 0.0):g} CPUs and {largest.get('GPU', 0.0):g} GPUs, "
        f"{largest.get('memory', 0.0) / 2**30:.1f} GiB declared to Ray (ray start --memory), and no autoscaler is "
        "there to add one"
    )


def autoscales() -> bool:
    """Whether Ray's autoscaler may add nodes.

    Its monitor reports in any cluster. Where it can start nodes, it names their kinds after its configuration; else
    every node is a kind of its own, named after its id.
    """
    own = {format_readonly_node_type(node["NodeID"]) for node in ray.nodes()}
    try:
        return bool(_node_kinds() - own)
    except (ValueError, KeyError, TypeError, RuntimeError):
        return True  # a report that we cannot read: wait rather than give up


def _node_kinds() -> set[str]:
    if is_autoscaler_v2(fetch_from_server=True):
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return {node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)}
    report = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    return set(json.loads(report)["autoscaler_report"]["node_type_mapping"].values()) if report else set()


def _listen_on_loopback() -> None:
    """A local Ray otherwise opens its ports on every interface.

    This is Ray's switch for systems whose firewalls ask; `_node_ip_address="127.0.0.1"` becomes the external address.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
