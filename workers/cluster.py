"""Joins a running Ray cluster, or starts one on this machine, and reports a cluster's resources."""

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
from ray._common.utils import get_default_system_temp_dir, get_system_memory, load_class
from ray._private import node as ray_node
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    generate_and_save_token,
)
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
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

RAY_LOG = logging.getLogger("lamina.ray")  # `pipeline.console.log_files` adds a file; otherwise it writes to stderr
CHECK_SECONDS = 0.2
ENVIRONMENT_AGENT = "--runtime_env_agent_command"
AGENTS = {  # a raylet's option with the command of an agent -> the ports of that agent
    "--dashboard_agent_command": ("DASHBOARD_AGENT_LISTEN", "METRICS_AGENT", "METRICS_EXPORT"),
    ENVIRONMENT_AGENT: ("RUNTIME_ENV_AGENT",),
}
UV_SWITCH = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"  # in the environment: whether Ray sends the environment of `uv run`
HOOK = ray_constants.RAY_RUNTIME_ENV_HOOK  # in the environment: a function that returns a runtime environment
SESSION_BYTES = 32_000_000  # the logs of a small job take 2 MB; those of a long one are rotated
MAX_PROBES = 64
STARTS = 2  # attempts to start Ray, on a machine that may be busy
SOCKET_PATH = "AF_UNIX path length"  # Ray's error; the system's limit is 107 bytes
TOO_SLOW = "timed out during startup"  # Ray's error about its node


def connect(
    address: str | None,
    workers: Workers,
    timeout_s: float = 30.0,
    stopped: Callable[[], bool] = lambda: False,
    about: Mapping[str, str] = MappingProxyType({}),
    trains: bool = False,
) -> str:
    """Join a running Ray cluster, or start one on this machine that listens only on loopback. Return its address.

    Do nothing if the process is already connected, except that a local Ray that cannot train is restarted if `trains`.
    `ray job submit` sets the address by RAY_ADDRESS. Below `uv run`, workers run on the Python of their nodes, and not
    in an environment that uv resolves again.

    Args:
        timeout_s: how long to wait for a cluster that does not answer.
        stopped: returns True after a signal; checked while waiting.
        about: metadata of the job, which Ray's dashboard and `ray list jobs` show.
        trains: whether Ray Train will be used, which needs the agent for runtime environments.

    Raises:
        InputError: no cluster answers, it has another version, this machine has fewer cores or GPUs than a worker
            needs, or the function that RAY_RUNTIME_ENV_HOOK names fails.
        Interrupted: `stopped` returned True.
        WorkerError: Ray did not start on this machine.
    """
    if ray.is_initialized():
        if not (trains and _lacks_environments()):
            return str(ray.get_runtime_context().gcs_address)
        ray.shutdown()
    joined = cluster_address(address)
    if not joined and (fault := thread_fault(workers.cpus, machine_cores(), "this machine")):
        raise InputError(fault)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the other workers of the machine
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Each assignment to a name of Ray's stands for a setting that Ray 2.60 lacks.
    ray_utils.set_sigterm_handler = lambda _: None  # to keep a driver's own handler: Ray's exits with another code
    ray_worker.print_to_stdstream = log_message  # where errors of the cluster go
    ray_worker.load_class = _user_hook  # type: ignore[attr-defined]  # an exception class for a hook that fails
    if not joined or UV_SWITCH not in os.environ:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False  # the variable of this name is read when Ray is imported
    try:
        if joined:
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            at = services.get_ray_address_from_environment("auto", None) if joined == "auto" else joined
            await_cluster(at, timeout_s, stopped)
            job = JobConfig(metadata=dict(about))
            ray.init(address=at, job_config=job, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _start_local(workers, trains)
    except AuthenticationError as error:
        raise InputError(f"Ray: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        no_cluster = isinstance(error, ConnectionError) or SOCKET_PATH in str(error)
        if isinstance(error, WorkerError) or (isinstance(error, OSError) and not no_cluster):
            raise
        message = str(error) if isinstance(error, InputError) else _refusal(joined, error)
        from_environment = joined and not address and not message.startswith(HOOK)
        raise InputError(f"{message}; RAY_ADDRESS gave this one: unset it" if from_environment else message) from error
    resources = ray.cluster_resources()
    if not joined and workers.gpus * workers.min > resources.get("GPU", 0):
        ray.shutdown()
        raise InputError(
            f"workers.gpus: {workers.gpus} for each of {workers.min} workers, but this machine has "
            f"{resources.get('GPU', 0):g} GPUs; set workers.gpus: 0 or give --address of a cluster with enough"
        )
    return str(ray.get_runtime_context().gcs_address)


def cluster_address(address: str | None) -> str | None:
    """Return the address of the cluster that the caller or the environment names. Without one, `connect` starts Ray on
    this machine."""
    return address or os.environ.get("RAY_ADDRESS")


def await_cluster(address: str, timeout_s: float, stopped: Callable[[], bool]) -> None:
    """Wait until Ray answers at HOST:PORT. `ray.init` would wait for minutes and ignore signals.

    Raises:
        InputError: nothing answers, or a server that is not Ray.
        Interrupted: `stopped` returned True.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise InputError(f"Ray: {address!r} is not an address; give --address HOST:PORT, as `ray start` printed it")
    original, host = f"{host}:{port}", resolve_ip_for_localhost(host)  # as Ray will do
    where = original if original == f"{host}:{port}" else f"{original}, which is {host} to Ray,"
    deadline = time.monotonic() + timeout_s
    while (fault := fault_at(host, int(port))) is not None:
        if stopped():
            raise Interrupted("stopped by a signal while connecting to Ray")
        if time.monotonic() > deadline:
            raise InputError(
                f"Ray: no cluster answers at {where} ({fault}); tried for {timeout_s:g} s (--connect-timeout). Give "
                "--address HOST:PORT of a running cluster, or none for a local one"
            )
        time.sleep(CHECK_SECONDS)


def watch_ray(note: Callable[[str], None]) -> RayWatch:
    """Return a watch over the cluster of this process. `note`: writes a line to the log.

    Ray has no public call for the raylet's socket and the folder of logs.
    """
    node: Any = ray_worker._global_node
    return RayWatch(node.raylet_socket_name, node.gcs_address, node.get_logs_dir_path(), note)


def log_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Log one message. Replaces the function by which Ray prints messages on a driver's terminal."""
    prefix = "" if ignore_prefix else f"({data.get('pid')}) "
    RAY_LOG.warning("%s%s", prefix, "\n".join(data["lines"]))


def _refusal(address: str | None, error: Exception) -> str:
    if "ersion mismatch" in str(error):
        reason = " ".join(str(error).split())
        return (
            f"Ray: the cluster at {address} is of another version than this command: {reason}; install the same on both"
        )
    if SOCKET_PATH in str(error):
        place = get_default_system_temp_dir()
        return f"Ray: the path {place} is too long for sockets below it; set TMPDIR (or RAY_TMPDIR) to a shorter one"
    return (
        f"Ray: no cluster at {address or 'this machine'} ({error}); give --address HOST:PORT or none; "
        "a cluster with tokens answers only with RAY_AUTH_MODE=token"
    )


def check_temporary_folder() -> None:
    """Check the folder in which a Ray on this machine keeps its sockets and logs.

    Raises InputError if it is not writable or has too little space.
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


def _start_local(workers: Workers, trains: bool) -> None:
    """Start Ray on this machine. Raise WorkerError if it does not start at the second attempt."""
    os.environ.pop(RAY_JOB_CONFIG_JSON_ENV_VAR, None)  # of a submitted job that does not use the cluster it runs on
    environment = _user_hook(name)(None) if (name := os.environ.get(HOOK)) else None
    check_temporary_folder()
    _listen_on_loopback()
    _have_token()
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, workers starve on a busy machine
    for start in range(STARTS):
        try:
            with _bare_node(with_environments=trains or bool(environment)):
                ray.init(
                    address="local",  # not a cluster that runs here already
                    num_cpus=max(os.cpu_count() or 1, workers.min * workers.cpus),
                    _memory=machine_bytes(),  # by default Ray counts free memory, of which a busy machine has little
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=environment,
                    _skip_env_hook=True,
                    _system_config={
                        "prestart_worker_first_driver": False,  # it would start a process for every CPU
                        "enable_pipe_based_agent_to_parent_health_check": True,  # an agent's stdin ends with the raylet
                    },
                )
            return
        except Exception as error:  # Ray has no exception class for this
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
    """Set an authentication token, which Ray requires by default, even if the home folder is not writable.

    Ray has no public call that tells whether there is one.
    """
    loader = _raylet.AuthenticationTokenLoader.instance()  # type: ignore[attr-defined]  # no stub has it
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or loader.has_token(ignore_auth_mode=True):
        return
    try:
        generate_and_save_token()
    except (OSError, RuntimeError):  # the home folder is missing or read-only
        os.environ["RAY_AUTH_TOKEN"] = generate_new_authentication_token()
    loader.reset_cache()


def _user_hook(name: str) -> Callable[[Any], Any]:
    """Return a user's hook, which returns a runtime environment. Called, it raises InputError if it fails."""

    def hook(environment: Any) -> Any:
        try:
            return load_class(name)(environment)
        except Exception as error:  # it may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{HOOK}: {name} fails ({reason}); correct it, or unset it") from error

    return hook


class _BareNode(ray_node.Node):
    """A head node with only the processes that a job needs: gcs_server and raylet.

    It leaves out seven Python processes that take seconds to start: dashboard, log monitor, autoscaler, and the
    raylet's agents for metrics and runtime environments. `ray.init` has an option for the dashboard alone. A raylet
    requires its agents, so it gets `cat`, which runs until its input ends, in their place, and the port files of agents
    that do not serve. Asked for a runtime environment, a raylet without that agent would end after 30 s.
    """

    absent: tuple[str, ...]  # options with the commands of agents that are not started

    def start_monitor(self) -> None:
        """Do nothing: no nodes are started."""

    def start_log_monitor(self) -> None:
        """Do nothing: the workers' output is not read."""

    def start_api_server(self, **_: Any) -> None:
        """Do nothing: there is no dashboard, and no jobs are submitted."""

    def start_raylet(self, *arguments: Any) -> None:
        """Start the raylet with agents that do nothing, without importing the dashboard's libraries."""
        start_process, dashboard_error = services.start_ray_process, ray_utils.get_dashboard_dependency_error

        def start(command: list[str], *others: Any, **options: Any) -> Any:
            bare = [f"{name}=cat" if (name := part.partition("=")[0]) in self.absent else part for part in command]
            return start_process(bare, *others, **options)

        for name in (port for agent in self.absent for port in AGENTS[agent]):
            port_name = getattr(_raylet, f"{name}_PORT_NAME")
            _raylet.persist_port(self._session_dir, self._node_id, port_name, -1)  # type: ignore[attr-defined]
        services.start_ray_process = start
        ray_utils.get_dashboard_dependency_error = lambda: ImportError("no dashboard is started")
        try:
            super().start_raylet(*arguments)
        finally:
            services.start_ray_process, ray_utils.get_dashboard_dependency_error = start_process, dashboard_error


def _lacks_environments() -> bool:
    """Return True if this process has started its Ray without the agent for runtime environments."""
    return isinstance(ray_worker._global_node, _BareNode) and ENVIRONMENT_AGENT in _BareNode.absent


@contextmanager
def _bare_node(with_environments: bool) -> Iterator[None]:
    """Make `ray.init` start a `_BareNode` within this context. `with_environments`: with the agent that makes them."""
    original = ray_node.Node
    _BareNode.absent = tuple(agent for agent in AGENTS if not (with_environments and agent == ENVIRONMENT_AGENT))
    ray_node.Node = _BareNode  # type: ignore[misc]
    try:
        yield
    finally:
        ray_node.Node = original  # type: ignore[misc]


def probe_workers(workers: Workers, dtype: torch.dtype, shape: ProbedShape) -> Rates:
    """Return the mean rates of workers that compute at the same time, on the nodes where Ray places them.

    Measures as many workers as fit into the cluster, at most `MAX_PROBES`.
    """
    remote: Any = ray.remote(RateProbe).options(num_cpus=workers.cpus, num_gpus=workers.gpus)
    probes = [remote.remote() for _ in range(min(workers.max, MAX_PROBES, _room(workers)))]
    nodes = ray.get([probe.node.remote() for probe in probes])
    workers_per_node = max(nodes.count(node) for node in nodes)
    device = torch.device("cuda" if workers.gpus else "cpu")
    arguments = (device, dtype, workers.cpus, workers_per_node, shape)
    return mean_rates(ray.get([probe.rates.remote(*arguments) for probe in probes]))


def _room(workers: Workers) -> int:
    """Return how many workers fit beside other jobs; at least 1, because an autoscaler may add a node."""
    return max(1, _held(ray.available_resources(), workers))


def whole_room(workers: Workers) -> int:
    """Return how many workers the cluster's nodes hold without other jobs; at least 1."""
    return max(1, sum(_held(node, workers) for node in live_nodes()))


def _held(resources: Mapping[str, float], workers: Workers) -> int:
    """Return how many workers have room in these resources."""
    asked = {"CPU": float(workers.cpus), "GPU": workers.gpus}
    return int(min(resources.get(kind, 0.0) // amount for kind, amount in asked.items() if amount))


def machine_bytes() -> int:
    """Return the memory of this machine in bytes, by which Ray places workers."""
    return int(get_system_memory())  # a container's limit counts


def object_store_room() -> int:
    """Return the bytes of a local Ray's object store in memory; beyond them it spills to disk."""
    return int(ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * machine_bytes())


def declared_memory(workers: Workers, memory_bytes: int) -> int:
    """Return the memory to request from Ray: `memory_bytes` if a node has declared that much, else 0.

    Node types of an autoscaler need not declare their memory, and would then never fit a request for memory.
    """
    fits = memory_bytes and _fits_a_node(workers, memory_bytes, live_nodes()) and not autoscales()
    return memory_bytes if fits else 0


def why_unplaceable(workers: Workers, memory_bytes: int = 0) -> str | None:
    """Return why no worker can ever start (no node has its resources, and no autoscaler adds nodes), or None."""
    alive = live_nodes()
    if _fits_a_node(workers, memory_bytes, alive) or autoscales():
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


def live_nodes() -> list[dict[str, float]]:
    """Return the resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _fits_a_node(workers: Workers, memory_bytes: int, nodes: list[dict[str, float]]) -> bool:
    request = {"CPU": float(workers.cpus), "GPU": workers.gpus, "memory": float(memory_bytes)}
    return any(all(node.get(kind, 0.0) >= amount for kind, amount in request.items()) for node in nodes)


def autoscales() -> bool:
    """Return True if Ray's autoscaler may add nodes.

    Its monitor reports node types in any cluster. If it can start nodes, its configuration names the types. If it
    cannot, every node has its own type, named after the node's id.
    """
    own = {format_readonly_node_type(node["NodeID"]) for node in ray.nodes()}
    try:
        return bool(_node_kinds() - own)
    except (ValueError, KeyError, TypeError, RuntimeError):
        return True  # the report has an unknown format: wait rather than give up


def _node_kinds() -> set[str]:
    if is_autoscaler_v2(fetch_from_server=True):
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return {node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)}
    report = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    return set(json.loads(report)["autoscaler_report"]["node_type_mapping"].values()) if report else set()


def _listen_on_loopback() -> None:
    """Make a local Ray open its ports on loopback only, instead of on every interface.

    Ray has this switch for systems whose firewalls ask the user, and reads the variable when it is imported. Passing
    `_node_ip_address="127.0.0.1"` does not help, because Ray replaces it by the external address.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
