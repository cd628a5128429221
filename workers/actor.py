"""The Ray actors: a `Worker` in its own process, and a probe of a worker's speed.

The tensors of a unit are return values of the actor's method. The caller owns them in Ray's object store, so they
outlive the worker and are lost only with their node.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from manifests.importing import quick_imports
from manifests.packages import prepare_process

# A worker's process imports this module, and unpickles the arguments of an actor's constructor, before the constructor
# calls `prepare_process`. Modules that import `lamina` are therefore imported in functions.
with quick_imports():
    import ray
    import torch
    from ray.exceptions import RayError
    from ray.util import metrics
    from torch import Tensor

    from manifests.errors import LostInputError
    from pipeline.kernels.deferred import DeferredTensors
    from workers.device_settings import configure_device
    from workers.memory import bound_kernel_caches, map_large_tensors
    from workers.tensor_transfer import Handle, Packed, TensorTransfer, pack_tensors, unpack_tensors

if TYPE_CHECKING:
    from pipeline.cost_model.probe import ProbedShape
    from pipeline.cost_model.rates import Rates
    from pipeline.units.units import Unit
    from workers.config import WorkerConfig
    from workers.outcomes import Outcome


class _Outbox(threading.local):
    """The functions that return the packed tensors of this thread's unit."""

    def __init__(self) -> None:
        self.packed: list[Callable[[], Packed]] = []


class RayTransfer(TensorTransfer):
    """Collects tensors until the unit returns them. A handle is an index, which the pool converts to a `Handle`."""

    def __init__(self) -> None:
        self._outbox = _Outbox()

    def put(self, tensors: Mapping[str, Tensor]) -> int:
        deferred = isinstance(tensors, DeferredTensors)
        packed = None if deferred else pack_tensors(tensors)
        self._outbox.packed.append(lambda: pack_tensors(tensors) if packed is None else packed)
        return len(self._outbox.packed) - 1

    def get(self, handle: Handle) -> dict[str, Tensor]:
        try:
            return unpack_tensors(ray.get(handle.reference))
        except RayError as error:
            message = f"the result of {handle.producer} was lost with its node ({type(error).__name__})"
            raise LostInputError(message, (handle.producer,)) from None

    def offload(self, tensor: Tensor) -> Callable[[], Tensor]:
        reference, device = ray.put(pack_tensors({"": tensor})), tensor.device
        return lambda: unpack_tensors(ray.get(reference))[""].to(device)

    def emptied(self) -> list[Callable[[], Packed]]:
        """Return the functions that return the tensors of this thread's unit, and clear them."""
        packed, self._outbox.packed = self._outbox.packed, []
        return packed


# Concurrency groups of the actor -> threads. A `ConcurrentUnit` runs in one of them. `Collect` has its own group,
# because the next layer's units wait for it, and storing takes long.
BESIDE = {"beside": 1, "collect": 1}


class WorkerActor:
    """A worker in its own process. It returns errors for users as values, which the driver raises."""

    run = "none yet"

    def __init__(self, pickled_setup: bytes) -> None:
        """`pickled_setup`: a pickled WorkerConfig."""
        prepare_process()
        with quick_imports():
            from workers.metrics import WorkerMeters, run_name
            from workers.worker import Worker

        setup: WorkerConfig = pickle.loads(pickled_setup)
        map_large_tensors()
        bound_kernel_caches()
        configure_device(setup.gpu_share)
        torch.set_num_threads(setup.threads)
        self.transfer = RayTransfer()
        self.worker = Worker(setup, self.transfer)
        self.run = run_name(setup)
        self.meters, self.metering = WorkerMeters(metrics, self.run), threading.Lock()

    def __repr__(self) -> str:
        """Return the name in Ray's dashboard and logs."""
        return f"lamina({self.run})"

    def ready(self) -> dict[str, Any]:
        """Return this worker's location and hardware."""
        from workers.hardware import describe_hardware, machine_cores, software_versions

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
        """Run one unit. Return its Outcome, after `unit.handles` packed tensors if there are any."""
        from workers.outcomes import do_unit

        outcome = do_unit(self.worker, unit)
        packed = self.transfer.emptied()
        if unit.handles:
            return self._returned(unit, outcome, packed)
        return self._metered(unit, outcome)

    def _returned(self, unit: Unit, outcome: Outcome, packed: list[Callable[[], Packed]]) -> Iterator[Any]:
        """Yield the tensors, which Ray stores one after another, and the outcome."""
        from workers.outcomes import finish_deferred

        packed.reverse()
        for _ in range(unit.handles):
            tensors = None
            if packed and outcome.error is None:
                outcome, tensors = finish_deferred(unit, outcome, packed.pop())
            yield tensors
        yield self._metered(unit, outcome)

    def _metered(self, unit: Unit, outcome: Outcome) -> Outcome:
        with self.metering:
            self.meters.unit_done(unit, outcome)
        return outcome

    def forget(self) -> None:
        """Discard all hidden states."""
        self.worker.forget()


class RateProbe:
    """Measures the rates of a worker of the actor's size."""

    def __init__(self) -> None:
        prepare_process()
        map_large_tensors()

    def node(self) -> str:
        """Return the id of this node, after the process has imported everything."""
        return str(ray.get_runtime_context().get_node_id())

    def rates(
        self, device: torch.device, dtype: torch.dtype, threads: int, workers_per_node: int, shape: ProbedShape
    ) -> Rates:
        """Measure this process's rates (`pipeline.cost_model.probe.measured_rates`)."""
        from pipeline.cost_model.probe import measured_rates

        return measured_rates(device, dtype, threads, workers_per_node, shape)


def _ray_folder() -> str:
    """Return the folder of Ray's logs and spilled objects on this node, for which Ray has no public call."""
    node = ray._private.worker._global_node
    return str(node.get_session_dir_path()) if node else "its --temp-dir"
