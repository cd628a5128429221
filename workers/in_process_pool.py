"""A pool of one worker in the command's own process, without Ray: for a debugger, and for tiny models."""

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
from workers.device_settings import settle_device
from workers.hardware import describe_hardware, differing, machine_cores, thread_fault
from workers.memory import map_large_tensors
from workers.outcomes import UnitAccounts, do_unit, result_of
from workers.tensor_transfer import LocalTransfer
from workers.worker import Worker

NAME = "in-process"  # of the worker, in logs and in the status


def check_device(workers: Workers) -> None:
    """Raises InputError when this process has fewer cores than the worker has threads, or lacks the GPU it needs."""
    if fault := thread_fault(workers.cpus, machine_cores(), "this machine"):
        raise InputError(fault)
    if workers.gpus and not torch.cuda.is_available():
        raise InputError(
            f"workers.gpus: {workers.gpus:g}: torch sees no GPU in this process; set workers.gpus: 0, or run on a "
            "machine with one"
        )


class InProcessPool(UnitAccounts):
    """See `pipeline.driver.interfaces.Pool`. Does a unit when its result is asked for, in the order of submission."""

    def __init__(
        self, setup: WorkerConfig, workers: Workers, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        """As `RayPool`; until `close`, torch computes with `workers.cpus` threads in the whole process.

        Raises:
            InputError: there is no GPU, or the job began on other hardware, so that its bytes would differ.
        """
        super().__init__()
        check_device(workers)
        map_large_tensors()
        settle_device(setup.gpu_share)
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
        """One node with one worker."""
        return [[self.worker.name]]

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        """Does the next unit. See `pipeline.driver.interfaces.Pool.wait`."""
        if self.stop.is_set():
            raise Interrupted("stopped by a signal; run the same command again to go on")
        unit = self.waiting.popleft()
        self.running = unit.key
        outcome = do_unit(self.worker, unit)
        self.running = ""
        self.account(NAME, unit, outcome)
        return unit, result_of(unit, outcome)

    def cancel_pending(self) -> None:
        """Forgets everything submitted; none of it runs."""
        self.waiting.clear()

    def forget(self) -> None:
        """Lets the worker forget all hidden states."""
        self.worker.forget()

    def busy(self) -> dict[str, str]:
        """The unit that is being done, for the status. May be called from another thread."""
        return {NAME: running} if (running := self.running) else {}

    def resize(self, workers: int) -> None:
        """Says that there is one worker, when another number is asked for."""
        if workers not in (self.size, self.asked):
            self.note(f"{workers} workers are asked for: a job with --in-process has one")
        self.asked = workers

    def show(self, phase: str, done: int, units: int) -> None:
        """Does nothing: metrics go through Ray."""

    def close(self) -> None:
        """Ends the worker's threads, and gives torch its number of threads back."""
        self.worker.close()
        torch.set_num_threads(self.threads_before)
