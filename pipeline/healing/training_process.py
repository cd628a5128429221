"""A process of a healing: loads its part of the model, trains it, and stores its part of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

import lamina  # noqa: F401 - registers its classes
from manifests.entries import HealingEntry, TeacherEntry
from manifests.errors import InputError, Interrupted
from manifests.heal import TrainingMemory, device_fault, host_fault
from pipeline.healing.checkpoints import load_state, save_state
from pipeline.healing.processes import BACKENDS, Processes
from pipeline.healing.stored_text import StoredText, TextSizes
from pipeline.healing.student import DENSE_HEAD, Student
from pipeline.healing.training import Schedule, Trainer
from stores.activations import ActivationStore
from stores.run_directory import ACTIVATIONS
from stores.storage import Storage, on_this_machine

LINE_S = 30.0  # between two lines about steps
GO_ON, STORE, STOP = 0, 1, 2


@dataclass(frozen=True)
class TrainingTask:
    """The inputs of a process that trains. Picklable.

    Attributes:
        run_dir: on a disk with an absolute path, or in a bucket.
        of: the digest of the healing, for the entries of checkpoints.
        student: the checkpoint that is trained, beside it.
        names: the stored names of trained tensors, with their dtypes.
        sizes, teacher: the text, and the dense model's distribution on it.
        use_gpu, threads: of a process.
        activation_bytes: of a micro-batch.
        memory: of the processes.
        checkpoint_s: between two checkpoints.
    """

    run_dir: Storage
    of: str
    student: Storage
    names: Mapping[str, torch.dtype]
    sizes: TextSizes
    teacher: TeacherEntry
    schedule: Schedule
    use_gpu: bool
    threads: int
    activation_bytes: int
    memory: TrainingMemory
    checkpoint_s: float


class TrainingJournal(Protocol):
    """The driver of a healing, as its process 0 sees it."""

    def last(self) -> HealingEntry | None:
        """Return the last entered checkpoint of this healing."""

    def say(self, line: str) -> None:
        """Write a line to the log."""

    def step(self, step: int, of: int, loss: float, seconds_left: float) -> bool:
        """Show a step. Return True if the training is to stop."""

    def enter(self, entry: HealingEntry) -> None:
        """Enter a checkpoint, which replaces the one before."""


def train(task: TrainingTask, journal: TrainingJournal, host_bytes: float) -> None:
    """Train from the last checkpoint to the end, and store the state there.

    `host_bytes`: the memory of this machine, for each of the processes here.

    Raises:
        InputError: a tensor does not train, or the training does not fit the memory.
        CorruptError: the last checkpoint is damaged.
        NumericsError: gradients are not finite.
        StorageError: a checkpoint cannot be written.
        Interrupted: the journal stops it.
    """
    processes = Processes.joined()
    transformers_logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    try:
        device = torch.device("cuda" if task.use_gpu else "cpu")
        say = journal.say if processes.rank == 0 else _nothing
        offloads = processes.any(_offloads(task, processes, host_bytes, say))
        with _joined(offloads, device):
            with on_this_machine(task.student, Storage.files if processes.rank == 0 else without_weights) as folder:
                student = Student(Path(folder), task.names, device, task.activation_bytes, processes, offloads=offloads)
            store = ActivationStore(task.run_dir.below(ACTIVATIONS))
            text = StoredText(task.sizes, task.teacher, store)
            training = Trainer(student, text, task.schedule, processes, say)
            _Process(task, training, journal, processes).run()
    finally:
        torch.set_num_threads(threads)


def _offloads(task: TrainingTask, processes: Processes, host_bytes: float, say: Callable[[str], None]) -> bool:
    """Return True if this process's part of the layers is in host memory, because its GPU does not hold it.

    Raises InputError if neither holds it.
    """
    if not task.use_gpu:
        return False
    memory = task.memory
    device_bytes = torch.cuda.get_device_properties(torch.device("cuda")).total_memory
    if not memory.offloads(processes.count, device_bytes):
        return False
    if (on_device := memory.on_device(processes.count, offloaded=True)) > device_bytes:
        raise InputError(device_fault(on_device, processes.count, device_bytes))
    if (on_host := memory.on_host(processes.count, offloaded=True)) > host_bytes:
        raise InputError(host_fault(on_host, processes.count, host_bytes))
    say(
        f"heal: a process needs {memory.on_device(processes.count) / 1e9:,.1f} GB of its GPU, which has "
        f"{device_bytes / 1e9:,.1f}: weights, gradients and moments of the layers are in {on_host / 1e9:,.1f} GB of "
        "host memory"
    )
    return True


@contextmanager
def _joined(offloads: bool, device: torch.device) -> Iterator[None]:
    """Make a process group of this process alone for the block, if the layers are in host memory: FSDP, which brings
    them to the device, needs a group."""
    if not offloads or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported
    dist.init_process_group(BACKENDS[device.type], store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Process:
    """Resumes a training, shows its progress, and stores its state every few minutes and at the end."""

    def __init__(self, task: TrainingTask, training: Trainer, journal: TrainingJournal, processes: Processes) -> None:
        self.task, self.training, self.journal, self.processes = task, training, journal, processes

    def run(self) -> None:
        self._resume()
        self.stored = self.shown = time.monotonic()
        self.training.run(self._after_step)
        self._store()

    def _resume(self) -> None:
        entered = self.journal.last()
        if entered is None:
            return
        state = self.training.state()
        load_state(self.task.run_dir, entered.folder, state)
        self.training.load(state, entered.step, entered.curve)
        self.training.say(f"heal: resuming after step {entered.step} of {self.training.schedule.steps}")

    def _after_step(self) -> None:
        """Do what process 0 decides. Raise Interrupted if the job is to stop."""
        decided = self.processes.total(float(self._decided()) if self.processes.rank == 0 else 0.0)
        if decided == STOP:
            raise Interrupted("stopped by a signal; run the same command again to resume")
        if decided == STORE:
            self._store()
            self.stored = time.monotonic()

    def _decided(self) -> int:
        training, now = self.training, time.monotonic()
        step, steps = training.progress.step, training.schedule.steps
        left_s = training.seconds_left
        if self.journal.step(step, steps, training.loss, round(left_s, 1)):
            return STOP
        if now - self.shown >= LINE_S:
            self.shown = now
            training.say(
                f"heal step {step} of {steps}: divergence {training.loss:.4f} in training, {left_s:,.0f} s left"
            )
        return STORE if now - self.stored >= self.task.checkpoint_s and step < steps else GO_ON

    def _store(self) -> None:
        progress = self.training.progress
        folder = save_state(self.task.run_dir, progress.step, self.training.state(), self.processes)
        if self.processes.rank == 0:
            self.journal.enter(
                HealingEntry(
                    of=self.task.of,
                    step=progress.step,
                    folder=folder,
                    curve=progress.curve,
                    steps=self.task.schedule.steps,
                    per_step=self.task.schedule.per_step,
                    peak=self.task.schedule.peak,
                    relative=self.task.schedule.relative,
                    few=self.task.schedule.few,
                )
            )


def without_weights(checkpoint: Storage) -> list[str]:
    """Return the names of a student's files without its weights, which process 0 alone reads."""
    return [name for name in checkpoint.files() if name == DENSE_HEAD or not name.endswith(".safetensors")]


def _nothing(line: str) -> None:
    """Say nothing: process 0 speaks for all."""
