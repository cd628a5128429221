"""The training of a healing: the solved layers as a checkpoint, its processes, and the healed layers.

docs/methods.md#healing.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.mixture_lamina import ROUTER, ROUTER_BIAS
from manifests.entries import HealingEntry, TeacherEntry
from manifests.errors import StorageError
from manifests.heal import Heal, TrainingMemory, step_windows
from manifests.importing import quick_imports
from manifests.records import StagedRecord
from manifests.schema import Workers
from pipeline.checkpoint.assembling import Assembler
from pipeline.checkpoint.planned_size import plan_of
from pipeline.console.signals import interrupting
from pipeline.cost_model.healing_work import healing_work
from pipeline.driver.ledger_keys import HEALING, layer_key
from pipeline.inputs.healing_text import HealingTokens
from pipeline.job.context import JobContext
from pipeline.rounding.schemes import LEVELS, PACKED
from stores.checkpoint import copy_shard
from stores.headers import DTYPES
from stores.staging import read_staged, write_staged
from stores.storage import Storage, on_this_machine, open_storage

if TYPE_CHECKING:
    from pipeline.healing.stored_text import TextSizes
    from pipeline.healing.training import Schedule
    from pipeline.healing.training_process import TrainingTask

STUDENT = "student-"  # prefix of the folder of the checkpoint that is trained
CHECKPOINT_S = 180.0  # between two checkpoints of a training
FORMER_FEW = 20.0  # `Schedule.few` of versions that did not enter it
ACTIVATION_NUMBERS = (16, 4)  # for each token and layer, in units of the hidden size and of the MLP's width


@dataclass(frozen=True)
class Healing:
    """The inputs of a healing. `of`: a digest of all that its result depends on."""

    settings: Heal
    tokens: HealingTokens
    base: tuple[str | None, ...]
    of: str


def train_student(
    job: JobContext, healing: Healing, teacher: TeacherEntry
) -> tuple[dict[str, Any], dict[str, StagedRecord], tuple[str, ...]]:
    """Train from the last checkpoint, or from the start. Return the figures of the healing, and the layers of the
    best step, as `_staged` returns them; no layers if the start is best. Raises CorruptError if the checkpoint is
    damaged."""
    with quick_imports():
        from pipeline.healing.stored_text import TextSizes
        from pipeline.healing.training import Schedule, default_rate
        from pipeline.healing.training_process import TrainingTask

    settings, tokens, workers = healing.settings, healing.tokens, _process_resources(job)
    held_out, unscored = len(tokens.held_out), max(1, len(tokens.prefix))
    sizes = TextSizes(len(tokens.trained), held_out, tokens.trained.shape[1], unscored)
    asked = settings.learning_rate
    processes = 1 if job.in_process else _processes(job)
    schedule = Schedule(
        windows=sizes.trained,
        per_step=step_windows(sizes.trained, sizes.length, settings.epochs, processes),
        epochs=settings.epochs,
        peak=default_rate(job.inputs.geometry.hidden) if asked == "auto" else asked,
        seed=job.manifest.seed,
        relative=asked == "auto",
    )
    if begun := _begun(job, healing, schedule.relative):
        schedule = schedule_as_begun(schedule, begun)
    with _student_folder(job) as (folder, compression):
        names = trained_tensors(job, compression, settings)
        numbers = sum(math.prod(compression["tensors"][name]["shape"]) for name in names)
        task = TrainingTask(
            run_dir=open_storage(job.run_dir.storage.address),
            of=healing.of,
            student=open_storage(folder.address),
            names=names,
            sizes=sizes,
            teacher=teacher,
            schedule=schedule,
            use_gpu=workers.gpus > 0,
            threads=workers.cpus,
            activation_bytes=_activation_bytes(job, sizes),
            memory=_planned_memory(job, sizes),
            checkpoint_s=CHECKPOINT_S,
        )
        job.observer.stage("heal")
        job.observer.say(
            f"heal: {numbers:,} numbers, {schedule.steps} steps on {sizes.tokens:,} tokens, learning rate "
            f"{schedule.said_peak}, processes: {processes}"
        )
        entry = _checkpoint_at_the_end(job, task, processes)
        layers, trained = _staged(job, folder, entry.folder, names) if entry.curve.best else ({}, ())
    return _figures(healing, task, entry, numbers, processes), layers, trained


@contextmanager
def _student_folder(job: JobContext) -> Iterator[tuple[Storage, Mapping[str, Any]]]:
    """Assemble the solved layers as a checkpoint in RUN_DIR, of links where possible, and delete it after the block.
    If the checkpoint has a rounded head, the dense head is stored beside it."""
    from pipeline.healing.student import DENSE_HEAD, WEIGHT

    run_dir = job.run_dir.storage
    for left in run_dir.folders():  # left by a killed process
        if left.startswith(STUDENT):
            run_dir.delete_folder(left)
    name = f"{STUDENT}{uuid.uuid4().hex}"
    folder = run_dir.below(name)
    try:
        compression = Assembler(job.inputs, job.ledger, run_dir, job.source_files, output=folder).run()
        if job.manifest.quantize is not None and "head" in job.manifest.quantize.outer_roles:
            head = f"{job.inputs.config['block']['head']}.{WEIGHT}"
            copy_shard(folder, DENSE_HEAD, job.inputs.source, [WEIGHT], {WEIGHT: head})
        yield folder, compression
    finally:
        with suppress(StorageError):  # the next start removes the rest
            run_dir.delete_folder(name)


def trained_tensors(job: JobContext, compression: Mapping[str, Any], settings: Heal) -> dict[str, torch.dtype]:
    """Return the stored names of the tensors that are trained, with their dtypes.

    In compressed layers, these are the tensors that a method wrote, norms and biases, and packed codes if the settings
    ask for them. Not trained are routers, weights in the source's formats, and rounded embeddings and heads, which are
    staged beside a layer. Tables of levels are trained only if they were learned: engines have the others built in.
    """
    names = {}
    source = job.inputs.source.tensors.values()
    kept = {(part.name, part.dtype) for record in source if record.form is not None for part in record.stored}
    for layer in sorted({task.layer for task in job.inputs.tasks}):
        entry, geometry = job.ledger.get(layer_key(layer)), job.inputs.geometry.layers[layer]
        assert entry is not None
        routers = tuple(f"{geometry.path(role)}." for role in (ROUTER, ROUTER_BIAS) if role in geometry.roles)
        for name, tensor in entry.staged.tensors.items():
            if name.endswith(LEVELS) and entry.rounded[name.removesuffix(LEVELS)].levels != "learned":
                continue
            dtype, flat = DTYPES[tensor.dtype], len(tensor.shape) == 1 and not name.endswith(LEVELS)
            written = compression["tensors"][name]["origin"] != "copied" and settings.what != "norms"
            trains = dtype.is_floating_point or (settings.what == "codes" and name.endswith(PACKED))
            inside = name.startswith(geometry.prefix) and not name.startswith(routers)
            if trains and (flat or written) and inside and (name, tensor.dtype) not in kept:
                names[name] = dtype
    return names


def _figures(healing: Healing, task: TrainingTask, entry: HealingEntry, numbers: int, processes: int) -> dict[str, Any]:
    """Return the figures of a finished training. `numbers`: how many were trained."""
    curve, sizes, settings = entry.curve, task.sizes, healing.settings
    return {
        "text": list(healing.tokens.names),
        "tokens": sizes.tokens,
        "epochs": settings.epochs,
        "steps": task.schedule.steps,
        "learning_rate": task.schedule.peak,
        "what": settings.what,
        "numbers": numbers,
        "processes": processes,
        "held_out_tokens": sizes.held_out_tokens,
        "before": curve.divergences[0],
        "after": min(curve.divergences),
        "best_step": curve.best,
        "skipped": curve.skipped,
        "retreats": list(curve.retreats or ()),
        "curve": [list(point) for point in zip(curve.steps, curve.divergences, strict=True)],
    }


def schedule_as_begun(schedule: Schedule, begun: HealingEntry) -> Schedule:
    """Return the schedule of a healing that has begun, perhaps with other processes or in another version."""
    return replace(
        schedule,
        per_step=begun.per_step or schedule.per_step,
        peak=begun.peak or schedule.peak,
        few=begun.few or FORMER_FEW,
    )


def _begun(job: JobContext, healing: Healing, relative: bool) -> HealingEntry | None:
    """Return the last checkpoint of this healing. Retract the entry of another healing, or of another kind of rates."""
    entered = job.ledger.get(HEALING)
    if entered is None or (entered.of == healing.of and (entered.relative or not relative)):
        return entered
    job.ledger.retract(HEALING)
    return None


def _processes(job: JobContext) -> int:
    """Return the number of processes that train: that of the workers, or as many as the cluster has room for."""
    with quick_imports():
        from workers.cluster import whole_room

    workers = _process_resources(job)
    return min(workers.max, whole_room(workers))


def _process_resources(job: JobContext) -> Workers:
    """Return the workers' settings, with a whole GPU for each process: NCCL refuses two on one."""
    workers = job.manifest.workers
    return workers.model_copy(update={"gpus": max(1.0, workers.gpus)}) if workers.gpus else workers


def _checkpoint_at_the_end(job: JobContext, task: TrainingTask, processes: int) -> HealingEntry:
    """Train to the end, unless a checkpoint of the end is entered. Return its entry."""
    from pipeline.healing.checkpoints import sweep_states

    entered = job.ledger.get(HEALING)
    sweep_states(task.run_dir, entered.folder if entered else None)
    if entered is None or entered.step < task.schedule.steps:
        journal = _Journal(job)
        with interrupting(job.stop):
            if job.in_process:
                from pipeline.healing.training_process import train

                train(task, journal, _host_bytes(task))
            else:
                from workers.training import train_in_processes

                train_in_processes(task, journal, processes, _process_resources(job))
        entered = job.ledger.get(HEALING)
    assert entered is not None, "a training ends with a checkpoint"
    return entered


def _host_bytes(task: TrainingTask) -> float:
    """Return the memory of this machine, of which a training on its GPU may need much."""
    if not task.use_gpu:
        return math.inf
    from workers.cluster import machine_bytes  # and Ray

    return machine_bytes()


def _activation_bytes(job: JobContext, sizes: TextSizes) -> int:
    """Estimate the bytes of the activations of a micro-batch in float32."""
    hidden = job.inputs.geometry.hidden
    width = job.inputs.config.get("intermediate_size") or 4 * hidden
    numbers = ACTIVATION_NUMBERS[0] * hidden + ACTIVATION_NUMBERS[1] * int(width)
    return 4 * numbers * job.inputs.geometry.num_layers * sizes.micro_batch * sizes.length


def _planned_memory(job: JobContext, sizes: TextSizes) -> TrainingMemory:
    """Return the memory of the processes as `plan` counts it."""
    work = healing_work(job.manifest, job.inputs.geometry, plan_of(job.inputs).kept, sizes.tokens)
    assert work is not None, "the number of tokens is known"
    return work.memory


class _Journal:
    """Implements `pipeline.healing.training_process.TrainingJournal` for a job."""

    def __init__(self, job: JobContext) -> None:
        self.job = job

    def last(self) -> HealingEntry | None:
        return self.job.ledger.get(HEALING)

    def say(self, line: str) -> None:
        self.job.observer.say(line)

    def step(self, step: int, of: int, loss: float, seconds_left: float) -> bool:
        self.job.observer.step_done(step, of, loss, seconds_left)
        return self.job.stop.is_set()

    def enter(self, entry: HealingEntry) -> None:
        before = self.last()
        self.job.ledger.commit(HEALING, entry)
        if before is not None and before.folder != entry.folder:  # the processes may write the next one already
            with suppress(StorageError):  # the next start removes the rest
                self.job.run_dir.storage.delete_folder(before.folder)


def _staged(
    job: JobContext, student: Storage, checkpoint: str, names: Mapping[str, torch.dtype]
) -> tuple[dict[str, StagedRecord], tuple[str, ...]]:
    """Stage the layers with the best tensors of a checkpoint, one layer in memory at a time. Return their records by
    layer, and the names of tensors that changed."""
    from pipeline.healing.checkpoints import load_state
    from pipeline.healing.student import stored_forms
    from pipeline.healing.training import BEST
    from pipeline.healing.training_process import without_weights

    records, changed = {}, list[str]()
    with on_this_machine(student, without_weights) as folder:
        forms = stored_forms(Path(folder))
    for layer in sorted({task.layer for task in job.inputs.tasks}):
        entry = job.ledger.get(layer_key(layer))
        assert entry is not None
        tensors = read_staged(job.run_dir.storage, entry.staged)
        trained = {name: forms.get(name) for name in tensors.keys() & names.keys()}
        weights = {name: form.weight(tensors[name]) if form else tensors[name] for name, form in trained.items()}
        best = {BEST + name: torch.empty_like(weight) for name, weight in weights.items()}
        load_state(job.run_dir.storage, checkpoint, best)
        for name, form in trained.items():
            tensors[name] = form.stored(best[BEST + name]) if form else best[BEST + name]
        records[str(layer)] = staged = write_staged(job.run_dir.storage, layer, tensors)
        solved = entry.staged.tensors
        changed += [name for name, tensor in staged.tensors.items() if tensor.sha256 != solved[name].sha256]
    return records, tuple(sorted(changed))
