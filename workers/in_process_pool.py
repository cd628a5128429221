"""A pool of one worker in the command's own process, without Ray, for debuggers and tiny models."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from manifests.errors import InputError, Interrupted
from manifests.schema import Workers
from pipeline.units.units import Unit
from workers.config import WorkerConfig
from workers.device_settings import configure_device
from workers.hardware import describe_hardware, differing, machine_cores, thread_fault
from workers.memory import bound_kernel_caches, map_large_tensors
from workers.outcomes import UnitAccounts, do_unit, result_of
from workers.tensor_transfer import LocalTransfer
from workers.worker import Worker

NAME = "in-process"  # the worker's name in logs and in the status


def check_device(workers: Workers) -> None:
    """Raise InputError if this process has fewer cores than the worker has threads, or lacks the GPU it needs."""
    if fault := thread_fault(workers.cpus, machine_cores(), "this machine"):
        raise InputError(fault)
    if workers.gpus and not torch.cuda.is_available():
        raise InputError(
            f"workers.gpus: {workers.gpus:g}: torch sees no GPU in this process; set workers.gpus: 0, or run on a "
            "machine with one"
        )


class InProcessPool(UnitAccounts):
    """Implements `pipeline.driver.interfaces.Pool`. Runs a unit when its result is requested, in submission order."""

    def __init__(
        self, setup: WorkerConfig, workers: Workers, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        """Create the worker. Arguments as in `RayPool`; until `close`, torch uses `workers.cpus` threads everywhere.

        Raises:
            InputError: there is no GPU, or the job began on other hardware and its bytes would differ.
        """
        super().__init__()
        check_device(workers)
        map_large_tensors()
        bound_kernel_caches()
        configure_device(setup.gpu_share)
        self.worker = Worker(setup, LocalTransfer())
        self.hardware = describe_hardware(self.worker.device)
        if others := differing(setup.hardware or self.hardware, self.hardware):
            raise InputError(
                f"this process has {others}, on which the job began: its bytes would differ; run it there, or start "
                "over with --fresh"
            )
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(setup.threads)
        self.stop = stop
        self.note = note
        self.size = self.wanted = self.asked = 1
        self.waiting: deque[Unit] = deque()
        self.running = ""

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """Return one node with one worker."""
        return [[self.worker.name]]

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        """Run the next unit and return it with its result."""
        if self.stop.is_set():
            raise Interrupted("stopped by a signal; run the same command again to resume")
        unit = self.waiting.popleft()
        self.running = unit.key
        outcome = do_unit(self.worker, unit)
        self.running = ""
        self.account(NAME, unit, outcome)
        return unit, result_of(unit, outcome)

    def cancel_pending(self) -> None:
        """Discard all submitted units, none of which is running."""
        self.waiting.clear()

    def forget(self) -> None:
        """Discard all hidden states of the worker."""
        self.worker.forget()

    def busy(self) -> dict[str, str]:
        """Return the running unit, for the status. May be called from another thread."""
        return {NAME: running} if (running := self.running) else {}

    def resize(self, workers: int) -> None:
        """Log that the job has one worker if another number is requested."""
        if workers not in (self.size, self.asked):
            self.note(f"{workers} workers are requested, but a job with --in-process has one")
        self.asked = workers

    def show(self, phase: str, finished: int, units: int) -> None:
        """Do nothing, because metrics need Ray."""

    def close(self) -> None:
        """End the worker's threads and restore torch's number of threads."""
        self.worker.close()
        torch.set_num_threads(self.threads_before)
