"""The Ray actor around a `Worker`, and tensors through Ray's object store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayError
from torch import Tensor

from manifests.errors import LaminaError, LostInputError, WorkerError
from pipeline.ports import Unit
from workers.exchange import pack, unpack
from workers.memory import map_large_tensors, peak_bytes
from workers.setup import Setup
from workers.worker import Worker


class RayExchange:
    """Handles are Ray object references; a tensor crosses a node's memory once."""

    def put(self, tensors: Mapping[str, Tensor]) -> Any:
        """See `Exchange`."""
        return ray.put(pack(tensors))

    def get(self, handle: Any) -> dict[str, Tensor]:
        """See `Exchange`."""
        try:
            return unpack(ray.get(handle))
        except (ObjectLostError, RayError) as error:
            raise LostInputError(f"a partial result was lost with its worker ({type(error).__name__})") from None


@dataclass(frozen=True)
class Outcome:
    """What came of a unit: a result, or the error that a user should see; and what it took."""

    result: Any
    error: LaminaError | None
    seconds: float
    compute_seconds: float
    peak_bytes: int


class WorkerActor:
    """One worker in a process of its own. Errors for users travel as values and arrive as they were raised."""

    def __init__(self, setup: Setup) -> None:
        map_large_tensors()
        torch.set_num_threads(setup.threads)
        self.worker = Worker(setup, RayExchange())

    def ready(self) -> dict[str, Any]:
        """Where this worker runs."""
        return {"node": ray.util.get_node_ip_address(), "pid": os.getpid(), "device": str(self.worker.device)}

    def execute(self, unit: Unit) -> Outcome:
        """Does one unit."""
        started = time.perf_counter()
        computed = self.worker.compute_seconds
        result, error = None, None
        try:
            result = self.worker.execute(unit)
        except LaminaError as raised:
            error = raised
        except torch.OutOfMemoryError as raised:
            error = WorkerError(f"{unit.key}: out of GPU memory; lower calibration.micro_batch ({raised})")
        seconds = time.perf_counter() - started
        return Outcome(result, error, seconds, self.worker.compute_seconds - computed, peak_bytes())
