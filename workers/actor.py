"""The Ray actor around a `Worker`, and tensors through Ray's object store.

Tensors leave a unit as return values of the actor's method, which the caller owns: they outlive the worker and are
lost only with their node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from manifests.importing import quick_imports

with quick_imports():  # the first that a worker's process imports
    import ray
    import torch
    from ray.exceptions import RayError
    from ray.util import metrics
    from torch import Tensor

    from manifests.errors import LostInputError
    from pipeline.units.units import Unit
    from workers.config import WorkerConfig
    from workers.device_settings import settle_device
    from workers.hardware import describe_hardware, machine_cores, software_versions
    from workers.memory import map_large_tensors
    from workers.metrics import WorkerMeters, run_name
    from workers.outcomes import do_unit
    from workers.tensor_transfer import Handle, Packed, handle_count, pack, unpack
    from workers.worker import Worker


class RayTransfer:
    """What is put waits in `outbox` to be returned; its handle is the place there, which the pool makes a `Handle`."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def outbox(self) -> list[Packed | None]:
        """What the unit that this thread is at leaves behind."""
        if not hasattr(self._of_thread, "outbox"):
            self._of_thread.outbox = []
        found: list[Packed | None] = self._of_thread.outbox
        return found

    def emptied(self) -> list[Packed | None]:
        """The outbox, which is empty then."""
        left = self.outbox
        self._of_thread.outbox = []
        return left

    def put(self, tensors: Mapping[str, Tensor]) -> int:
        """See `TensorTransfer`."""
        self.outbox.append(pack(tensors))
        return len(self.outbox) - 1

    def get(self, handle: Handle) -> dict[str, Tensor]:
        """See `TensorTransfer`."""
        try:
            return unpack(ray.get(handle.reference))
        except RayError as error:
            what = f"the result of {handle.producer} was lost with its node ({type(error).__name__})"
            raise LostInputError(what, (handle.producer,)) from None


# Concurrency groups of the actor, by threads: a `BesideUnit` is done in one of them, what is given away in its own, as
# the next layer's units wait for it and what is stored takes long.
BESIDE = {"beside": 1, "giving": 1}


class WorkerActor:
    """One worker in a process of its own. Errors for users travel as values and arrive as they were raised."""

    run = "none yet"

    def __init__(self, setup: WorkerConfig) -> None:
        map_large_tensors()
        settle_device(setup.gpu_share)
        torch.set_num_threads(setup.threads)
        self.transfer = RayTransfer()
        self.worker = Worker(setup, self.transfer)
        self.run = run_name(setup)
        self.meters, self.metering = WorkerMeters(metrics, self.run), threading.Lock()

    def __repr__(self) -> str:
        """Its name in Ray's dashboard and logs."""
        return f"lamina({self.run})"

    def ready(self) -> dict[str, Any]:
        """Where this worker runs, and on what."""
        return {
            "node": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "worker": self.worker.name,
            "device": str(self.worker.device),
            "hardware": describe_hardware(self.worker.device),
            "cores": machine_cores(),
            "versions": software_versions(),
            "ray_folder": _ray_folder(),
        }

    def execute(self, unit: Unit) -> Any:
        """Does one unit: its Outcome, followed by what its handles stand for, `handle_count` of them."""
        outcome = do_unit(self.worker, unit)
        with self.metering:
            self.meters.unit_done(unit, outcome)
        left = self.transfer.emptied()
        count = handle_count(unit)
        return [outcome, *left, *[None] * (count - len(left))] if count else outcome

    def forget(self) -> None:
        """Lets go of all hidden states."""
        self.worker.forget()


def _ray_folder() -> str:
    """Where Ray keeps logs and spilled objects on this node."""
    node = ray._private.worker._global_node
    return str(node.get_session_dir_path()) if node else "its --temp-dir"
