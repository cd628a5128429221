"""Trains a healing in processes of Ray Train, on the job's cluster.

The command keeps the run directory's ledger. Process 0 sends it lines, steps and checkpoints through a mailbox, an
actor that outlives the processes: when one is lost, Ray Train starts all of them again, and they go on from the last
checkpoint. If the cluster no longer has room for all of them, as after the loss of a node, as many as have room go on.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from manifests.entries import HealingEntry
from manifests.errors import Interrupted, LaminaError, NumericsError, WorkerError
from manifests.packages import prepare_process
from manifests.schema import Workers
from pipeline.healing.processes import BACKENDS
from stores.backend import Storage
from workers.cluster import machine_bytes, whole_room
from workers.device_settings import configure_device
from workers.memory import TRAINING_KERNELS, bound_kernel_caches

if TYPE_CHECKING:
    from pipeline.healing.training_process import TrainingJournal, TrainingTask

LOSSES = 3  # the training fails when processes are lost more often than this
POLL_S = 0.2
SILENT_S = 600.0  # a process that is silent for this long counts as lost
STORAGE = "healing/ray"  # in RUN_DIR: Ray Train's own files
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"  # Ray Train has no other setting for it


@ray.remote(num_cpus=0)
class Mailbox:
    """Messages between process 0 and the command."""

    def __init__(self, entered: HealingEntry | None) -> None:
        self.entered = entered
        self.messages: list[tuple[str, tuple[Any, ...]]] = []
        self.is_over = False

    def last(self) -> HealingEntry | None:
        """Return the last checkpoint."""
        return self.entered

    def post(self, kind: str, *content: Any) -> bool:
        """Take a message. Return True if the training is to stop."""
        self.messages.append((kind, content))
        if kind == "enter":
            (self.entered,) = content
        return self.is_over

    def new_messages(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the messages since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def end(self) -> None:
        """Stop the training at its next step."""
        self.is_over = True

    def has_ended(self) -> bool:
        """Return True if there is nothing to train any more."""
        return self.is_over


class _Sender:
    """Implements `pipeline.healing.training_process.TrainingJournal` in a process."""

    def __init__(self, mailbox: Any) -> None:
        self.mailbox = mailbox

    def last(self) -> HealingEntry | None:
        entered: HealingEntry | None = ray.get(self.mailbox.last.remote())
        return entered

    def say(self, line: str) -> None:
        self._post("say", line)

    def step(self, step: int, of: int, loss: float, seconds_left: float) -> bool:
        return self._post("step", step, of, loss, seconds_left)

    def enter(self, entry: HealingEntry) -> None:
        self._post("enter", entry)

    def _post(self, kind: str, *content: Any) -> bool:
        is_over: bool = ray.get(self.mailbox.post.remote(kind, *content))
        return is_over


def train_in_processes(task: TrainingTask, journal: TrainingJournal, processes: int, workers: Workers) -> None:
    """Train in some processes, each with the resources of a worker; in fewer if the cluster loses room for them.

    Raises the errors of `pipeline.healing.training_process.train`, and WorkerError if processes are lost again and
    again, or if there is no room for any during `workers.start_timeout_s`.
    """
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    os.environ[START_TIMEOUT] = f"{workers.start_timeout_s:g}"
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    mailbox: Any = Mailbox.options(scheduling_strategy=here).remote(journal.last())  # type: ignore[attr-defined]  # of the decorator
    tries = 0
    try:
        while (error := _train(task, journal, processes, workers, mailbox)) is not None:
            room, tries = min(processes, whole_room(workers)), tries + 1
            failure = error.controller_failure if isinstance(error, ControllerError) else None
            is_final = isinstance(failure, WorkerGroupStartupTimeoutError) or tries > LOSSES
            if failure is None or (room == processes and is_final):
                raise WorkerError(_failure(error, processes, workers)) from error
            journal.say(f"heal: {processes} processes did not start; the cluster has room for {room}, which go on")
            processes = room
    finally:
        mailbox.end.remote()


def _train(
    task: TrainingTask, journal: TrainingJournal, processes: int, workers: Workers, mailbox: Any
) -> Exception | None:
    """Train in processes from the last checkpoint. Return the error of Ray Train that ended them, None at the end of
    the training. Raises the errors of `pipeline.healing.training_process.train`."""
    resources = {"CPU": float(workers.cpus), **({"GPU": workers.gpus} if workers.gpus else {})}
    failures: list[LaminaError] = []
    with _folder(task.run_dir) as folder:
        trainer = TorchTrainer(
            _process,
            train_loop_config={"task": task, "mailbox": mailbox},
            scaling_config=ScalingConfig(
                num_workers=processes, use_gpu=workers.gpus > 0, resources_per_worker=resources
            ),
            run_config=RunConfig(
                name=task.of[:16],
                storage_path=folder,
                failure_config=FailureConfig(max_failures=LOSSES, controller_failure_limit=0),
            ),
            torch_config=TorchConfig(backend=BACKENDS["cuda" if workers.gpus else "cpu"], timeout_s=int(SILENT_S)),
        )
        fitting = _Fitting(trainer)
        while not failures and not fitting.ended(POLL_S):
            failures += _delivered(mailbox, journal)
        failures += _delivered(mailbox, journal)
    if failures:
        raise failures[0]
    return fitting.error


@contextmanager
def _folder(run_dir: Storage) -> Iterator[str]:
    """Yield the folder of Ray Train's own files, which are not read later. It is in RUN_DIR, or a temporary one if
    RUN_DIR is in a bucket."""
    if run_dir.folder is not None:
        yield str(Path(run_dir.folder) / STORAGE)
        return
    with tempfile.TemporaryDirectory(prefix="lamina-", ignore_cleanup_errors=True) as folder:
        yield folder


class _Fitting:
    """Runs a trainer in a thread of its own, because it would take over signals in the main thread. An abandoned
    thread ends with the process."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer = trainer
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of the training. Return True if it has ended; if it failed, `error` is set."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _fit(self) -> None:
        try:
            self.trainer.fit()
        except Exception as error:  # Ray Train raises its own types and those of the processes
            self.error = error


def _delivered(mailbox: Any, journal: TrainingJournal) -> list[LaminaError]:
    """Pass the messages of process 0 to the journal. Return the errors among them."""
    failures = []
    for kind, content in ray.get(mailbox.new_messages.remote()):
        if kind == "failed":
            failures += content
        elif getattr(journal, kind)(*content) and kind == "step":
            mailbox.end.remote()
    return failures


def _process(config: dict[str, Any]) -> None:
    """Run one process of a training."""
    prepare_process()
    from pipeline.healing.training_process import train  # imports lamina

    mailbox, task = config["mailbox"], config["task"]
    bound_kernel_caches(TRAINING_KERNELS)
    configure_device(float(task.use_gpu))
    if ray.get(mailbox.has_ended.remote()):
        return  # another process has ended the training
    host_bytes = machine_bytes() / get_context().get_local_world_size()
    try:
        train(task, _Sender(mailbox), host_bytes)
    except LaminaError as error:
        ray.get(mailbox.post.remote("failed", error))
        if not isinstance(error, (Interrupted, NumericsError)):  # which all processes raise at the same step
            raise


def _failure(error: Exception, processes: int, workers: Workers) -> str:
    """Return the message for an error of Ray Train."""
    if isinstance(error, ControllerError):
        said = str(error.controller_failure).partition(". ")[0]
        return (
            f"heal: {processes} processes (CPUs of each: {workers.cpus}, GPUs: {workers.gpus:g}) did not start "
            f"({said}); waited {workers.start_timeout_s:g} s (workers.start_timeout_s); free or add nodes, then run "
            "the same command again to go on from the last checkpoint"
        )
    return (
        f"heal: processes of the training ended {LOSSES + 1} times ({_reasons(error)}); their logs are in Ray's "
        "session folder; run the same command again to go on from the last checkpoint"
    )


def _reasons(error: Exception) -> str:
    """Return what ended the processes, one line for each."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    lines = {rank: str(failure).strip().splitlines() for rank, failure in failures.items()}
    return "; ".join(f"process {rank}: {said[0]}" for rank, said in lines.items() if said) or type(error).__name__
