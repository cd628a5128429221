"""The Ray cluster a job runs on: a running one is joined, or one is started on this machine."""

from __future__ import annotations

import logging
import os

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray.exceptions import AuthenticationError

from manifests.errors import InputError
from manifests.schema import Workers


def connect(address: str | None, workers: Workers) -> str:
    """Joins a running Ray cluster, or starts one on this machine that listens on loopback only. Returns its address.

    A process that is connected stays so.

    An address may also come from RAY_ADDRESS, as under `ray job submit`.

    Raises:
        InputError: no cluster answers, or this machine has not what one worker asks for.
    """
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    found = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the other workers of the machine
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray_utils.set_sigterm_handler = lambda _: None  # Ray's would end the command with its exit code, not with ours
    try:
        if found:
            ray.init(address=found, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _listen_on_loopback()
            ray.init(
                address="local",  # not one that happens to run here
                num_cpus=max(os.cpu_count() or 1, workers.min * workers.cpus),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except AuthenticationError as error:
        raise InputError(f"Ray: {error}") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"Ray: no cluster at {found or 'this machine'} ({error}); give --address HOST:PORT or none; "
            "a cluster with tokens answers with RAY_AUTH_MODE=token only"
        ) from error
    resources = ray.cluster_resources()
    if not found and workers.gpus * workers.min > resources.get("GPU", 0):
        ray.shutdown()
        raise InputError(
            f"workers.gpus: {workers.gpus} for each of {workers.min} workers, but this machine has "
            f"{resources.get('GPU', 0):g} GPUs; set workers.gpus: 0 or give --address of a cluster that has them"
        )
    return str(ray.get_runtime_context().gcs_address)


def _listen_on_loopback() -> None:
    """A local Ray otherwise opens its ports on every interface.

    This is Ray's switch for systems whose firewalls ask; `_node_ip_address="127.0.0.1"` becomes the external address.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
