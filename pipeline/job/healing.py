"""The stage that heals: the compressed layers are trained as a whole against the dense model. docs/methods.md#healing.

It begins with the solved layers, which stay staged. Order of durability: the healed layers are staged, then the entry
of the finished job is retracted, then the healing is entered; OUTPUT is assembled from it like from any other layers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.mixture_lamina import ROUTER, ROUTER_BIAS
from manifests.entries import HealedEntry, HealingEntry, TeacherEntry
from manifests.errors import CorruptError, InputError, Interrupted
from manifests.heal import Heal
from manifests.importing import quick_imports
from manifests.records import StagedRecord
from pipeline.checkpoint.assembling import Assembler, own_class
from pipeline.console.signals import interrupting
from pipeline.driver.ledger_keys import COMPLETE, HEALED, HEALING, TEACHER, layer_key
from pipeline.inputs.calibration import tokens_digest
from pipeline.inputs.healing_text import HealingTokens, calibration_as_text
from pipeline.job.context import JobContext
from pipeline.job.healed_ledger import HealedLedger, forget_figures
from pipeline.job.healing_windows import StoredWindows, teacher_windows
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.held_out import score_held_out
from pipeline.job.worker_session import job_workers, teacher_arrays
from pipeline.kernels.teacher_rows import FORMAT
from stores.checkpoint import verify_shard
from stores.headers import DTYPES
from stores.staging import read_staged, write_staged

if TYPE_CHECKING:
    from pipeline.healing.training import Training

NAME = "teacher"  # of the dense model among scored models
STUDENT = "student-"  # prefix of the folder of the checkpoint that is trained
CHECKPOINT_S = 180.0  # between two checkpoints of a training
LINE_S = 30.0  # between two lines about steps
ACTIVATION_NUMBERS = (16, 4)  # for each token and layer, in units of the hidden size and of the MLP's width


@dataclass(frozen=True)
class Healing:
    """The inputs of a healing. `of`: a digest of all that its result depends on."""

    settings: Heal
    tokens: HealingTokens
    base: tuple[str | None, ...]
    of: str


def heal_layers(job: JobContext, heartbeat: Heartbeat) -> JobContext:
    """Heal the compressed layers if the manifest asks for it, once. Return the job with the layers to be assembled:
    the healed ones where a healing made them better, if only by an earlier run.

    Raises:
        InputError: a stored form does not train, or RUN_DIR is a bucket.
        NumericsError: gradients are not finite.
        Interrupted: a signal came; the training continues from its last checkpoint.
    """
    healing, entered = _asked(job), _entered(job)
    if healing is not None and (entered is None or entered.of != healing.of):
        entered = _heal(job, healing, heartbeat)
    if entered is None or not entered.layers:
        return job
    healed = replace(job, run_dir=job.run_dir.with_ledger(HealedLedger(job.ledger, entered)))
    with job_workers(healed, heartbeat) as workers:
        workers.compare(healed)
        score_held_out(healed, workers)
    return healed


def healing_due(job: JobContext) -> bool:
    """Return True if the manifest asks for a healing that is not entered."""
    healing, entered = _asked(job), _entered(job)
    return healing is not None and (entered is None or entered.of != healing.of)


def check_healing(job: JobContext) -> None:
    """Raise InputError if the job cannot be healed, before anything is computed."""
    if job.manifest.heal is None:
        return
    if job.run_dir.storage.folder is None:
        raise InputError(
            f"heal: run_dir {job.run_dir.place} is a bucket, and checkpoints of the training are files; set run_dir to "
            "a directory"
        )
    if job.manifest.workers.gpus and not torch.cuda.is_available():
        raise InputError(
            f"heal: workers.gpus: {job.manifest.workers.gpus:g}: the training runs in the command's own process, in "
            "which torch sees no GPU; run the command on a machine with one, or leave out heal"
        )
    if own_class(job.inputs):
        raise InputError(
            "heal: the method mla writes a checkpoint of another class, which does not train yet; leave out heal"
        )
    if job.manifest.quantize is not None:
        raise InputError(
            "heal: weights that are stored as codes of few bits (quantize) do not train yet; heal without quantize, or "
            "leave out heal"
        )
    if kept := sorted({record.form.kind for record in job.inputs.source.tensors.values() if record.form is not None}):
        raise InputError(
            f"heal: the source stores weights as {', '.join(kept)}, which do not train yet; leave out heal, or convert "
            "the source to bfloat16 first"
        )
    if job.tokens is not None or job.healing_text is not None:
        _tokens(job)


def _asked(job: JobContext) -> Healing | None:
    """Return the healing that the manifest asks for; None without one, or before all layers are entered."""
    settings = job.manifest.heal
    if settings is None:
        return None
    tokens, base = _tokens(job), _base(job)
    described = {
        "settings": settings.model_dump(mode="json", exclude={"text", "tokens"}),
        "trained": tokens_digest(tokens.trained),
        "held_out": tokens_digest(tokens.held_out),
        "prefix": tokens.prefix,
        "base": base,
        "seed": job.manifest.seed,
    }
    return Healing(settings, tokens, base, hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest())


def _entered(job: JobContext) -> HealedEntry | None:
    """Return the finished healing of the entered layers, if its files are whole."""
    entered = job.ledger.get(HEALED)
    if entered is None or entered.base != _base(job):
        return None
    for staged in entered.layers.values():
        try:
            verify_shard(job.run_dir.storage, staged.path, staged)
        except CorruptError as error:
            job.observer.repaired(str(error), [HEALED])
            job.ledger.retract(HEALED)
            return None
    return entered


def _tokens(job: JobContext) -> HealingTokens:
    if job.healing_text is not None:
        return job.healing_text
    assert job.tokens is not None, "the manifest has calibration or heal.text"
    return calibration_as_text(job.manifest, job.tokens, job.held_out, job.prefix)


def _base(job: JobContext) -> tuple[str | None, ...]:
    """Return the digests of the solved layers."""
    entries = (job.ledger.get(layer_key(layer)) for layer in range(job.inputs.geometry.num_layers))
    return tuple(entry.staged.sha256 if entry else None for entry in entries)


def _heal(job: JobContext, healing: Healing, heartbeat: Heartbeat) -> HealedEntry:
    """Train, stage the healed layers if they are better, and enter the healing."""
    with quick_imports():
        from pipeline.healing.checkpoints import sweep_states

    assert job.run_dir.storage.folder is not None
    run_dir = Path(job.run_dir.storage.folder)
    entry = _teacher(job, healing, heartbeat)
    with _student_folder(job, run_dir) as (folder, compression), interrupting(job.stop):
        names = trained_tensors(job, compression, healing.settings)
        best, figures = _train(job, healing, StoredWindows(job, healing.tokens, entry), folder, names, run_dir)
    layers: dict[str, StagedRecord] = {}
    trained: tuple[str, ...] = ()
    if best:
        layers, trained = _staged(job, best)
    else:
        job.observer.say(
            f"heal: no step came closer to the dense model on held-out text than the start ({figures['before']:.4f} "
            "nats per token); the layers stay as they were",
            logging.WARNING,
        )
    job.ledger.retract(COMPLETE)  # its OUTPUT is no longer that of the layers
    forget_figures(job.ledger)
    entered = HealedEntry(of=healing.of, base=healing.base, layers=layers, trained=trained, figures=figures)
    job.ledger.commit(HEALED, entered)
    job.ledger.retract(HEALING)
    sweep_states(run_dir, None)
    return entered


def _teacher(job: JobContext, healing: Healing, heartbeat: Heartbeat) -> TeacherEntry:
    """Return the dense model's distribution on the text. Compute it by a pass of the workers if it is not stored."""
    tokens, entered = healing.tokens, job.ledger.get(TEACHER)
    described = (FORMAT, tokens_digest(tokens.windows), len(tokens.trained), tokens.prefix)
    of = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    if entered is not None and entered.of == of:
        return entered
    if entered is not None:
        job.ledger.retract(TEACHER)
        job.run_dir.activations.drop(entered.tokens, *entered.rows, *entered.outputs)
    with job_workers(job, heartbeat) as workers:
        stored = job.run_dir.activations.write_tokens(tokens.windows.to(torch.int32))
        workers.always.append(stored)
        windows, taught = teacher_windows(job, tokens, stored)
        scorer = workers.scorer(job)
        rows, outputs = scorer.taught(windows, NAME, [None] * job.inputs.geometry.num_layers, taught)
        entry = TeacherEntry(of=of, tokens=stored, rows=rows, outputs=outputs)
        job.ledger.commit(TEACHER, entry)
        workers.always.extend(teacher_arrays(job.ledger))
        scorer.forget(NAME)
    return entry


@contextmanager
def _student_folder(job: JobContext, run_dir: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Assemble the solved layers as a checkpoint in RUN_DIR, of links where possible, for the block."""
    for left in run_dir.glob(f"{STUDENT}*"):  # by a killed process
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=STUDENT) as folder:
        assembler = Assembler(job.inputs, job.ledger, job.run_dir.storage, job.source_files, output=folder)
        yield Path(folder), assembler.run()


def trained_tensors(job: JobContext, compression: Mapping[str, Any], settings: Heal) -> dict[str, torch.dtype]:
    """Return the stored names of the tensors that are trained, with their dtypes: in compressed layers, the tensors
    that a method wrote, norms and biases. Routers stay."""
    names = {}
    for layer in sorted({task.layer for task in job.inputs.tasks}):
        entry, geometry = job.ledger.get(layer_key(layer)), job.inputs.geometry.layers[layer]
        assert entry is not None
        routers = tuple(f"{geometry.path(role)}." for role in (ROUTER, ROUTER_BIAS) if role in geometry.roles)
        for name, tensor in entry.staged.tensors.items():
            dtype, flat = DTYPES[tensor.dtype], len(tensor.shape) == 1
            written = compression["tensors"][name]["origin"] != "copied" and settings.what == "auto"
            if dtype.is_floating_point and (flat or written) and not name.startswith(routers):
                names[name] = dtype
    return names


def _train(
    job: JobContext,
    healing: Healing,
    windows: StoredWindows,
    folder: Path,
    names: Mapping[str, torch.dtype],
    run_dir: Path,
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Train from the last checkpoint, or from the start. Return the best tensors, none if the start is best, and the
    figures of the healing."""
    with quick_imports():
        from transformers.utils import logging as transformers_logging

        from pipeline.healing.student import Student
        from pipeline.healing.training import STEP_TOKENS, Schedule, Training, default_rate

    manifest, hidden = job.manifest, job.inputs.geometry.hidden
    job.observer.stage("heal")
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if manifest.workers.gpus else "cpu")
    student = Student(folder, names, device, _activation_bytes(job, windows))
    asked = healing.settings.learning_rate
    schedule = Schedule(
        windows=windows.trained,
        per_step=max(1, STEP_TOKENS // windows.length),
        epochs=healing.settings.epochs,
        peak=default_rate(hidden) if asked == "auto" else asked,
        seed=manifest.seed,
    )
    training = Training(student, windows, schedule, job.observer.say)
    numbers = sum(parameter.numel() for parameter in student.trained.values())
    job.observer.say(
        f"heal: {numbers:,} numbers, {schedule.steps} steps on {windows.tokens:,} tokens, learning rate "
        f"{schedule.peak:.3g}"
    )
    _resume(job, healing, training, run_dir)
    threads = torch.get_num_threads()
    torch.set_num_threads(manifest.workers.cpus)
    try:
        progress = training.run(_Keeper(job, healing, training, run_dir).after_step)
    finally:
        torch.set_num_threads(threads)
    curve = progress.curve
    figures = {
        "text": list(healing.tokens.names),
        "tokens": windows.tokens,
        "epochs": healing.settings.epochs,
        "steps": schedule.steps,
        "learning_rate": schedule.peak,
        "what": healing.settings.what,
        "numbers": numbers,
        "held_out_tokens": windows.held_out_tokens,
        "before": curve.divergences[0],
        "after": progress.divergence,
        "best_step": curve.best,
        "skipped": curve.skipped,
        "curve": [list(point) for point in zip(curve.steps, curve.divergences, strict=True)],
    }
    return progress.best if curve.best else {}, figures


def _activation_bytes(job: JobContext, windows: StoredWindows) -> int:
    """Return about the bytes of the activations of a micro-batch in float32."""
    hidden = job.inputs.geometry.hidden
    width = job.inputs.config.get("intermediate_size") or 4 * hidden
    numbers = ACTIVATION_NUMBERS[0] * hidden + ACTIVATION_NUMBERS[1] * int(width)
    return 4 * numbers * job.inputs.geometry.num_layers * windows.micro_batch * windows.length


def _resume(job: JobContext, healing: Healing, training: Training, run_dir: Path) -> None:
    """Continue from the checkpoint of this healing, if there is one. Remove others."""
    from pipeline.healing.checkpoints import load_state, sweep_states

    entered = job.ledger.get(HEALING)
    if entered is not None and entered.of != healing.of:
        job.ledger.retract(HEALING)
        entered = None
    sweep_states(run_dir, entered.folder if entered else None)
    if entered is None:
        return
    state = training.state()
    state = {name: tensor.clone() for name, tensor in state.items()}
    try:
        load_state(run_dir, entered.folder, state)
    except CorruptError as error:
        job.observer.repaired(str(error), [HEALING])
        job.ledger.retract(HEALING)
        return
    training.load(state, entered.step, entered.curve)
    job.observer.say(f"heal: resuming behind step {entered.step} of {training.schedule.steps}")


class _Keeper:
    """Shows the progress of a training, and stores its state every few minutes."""

    def __init__(self, job: JobContext, healing: Healing, training: Training, run_dir: Path) -> None:
        self.job, self.healing, self.training, self.run_dir = job, healing, training, run_dir
        self.first, self.begun = training.progress.step, time.monotonic()
        self.stored = self.shown = self.begun

    def after_step(self) -> None:
        """Raise Interrupted if the job is to stop."""
        job, progress, schedule = self.job, self.training.progress, self.training.schedule
        if job.stop.is_set():
            raise Interrupted("stopped by a signal; run the same command again to resume")
        now, done = time.monotonic(), progress.step - self.first
        left_s = (now - self.begun) / done * (schedule.steps - progress.step)
        job.observer.state |= {
            "unit": f"heal/{progress.step}", "done": progress.step, "of": schedule.steps,
            "seconds_left": round(left_s, 1), "loss": self.training.loss,
        }  # fmt: skip
        if now - self.shown >= LINE_S:
            self.shown = now
            job.observer.say(
                f"heal step {progress.step} of {schedule.steps}: divergence {self.training.loss:.4f} in training, "
                f"{left_s:,.0f} s left"
            )
        if now - self.stored >= CHECKPOINT_S and progress.step < schedule.steps:
            self.store()
            self.stored = time.monotonic()

    def store(self) -> None:
        """Store the state, enter it, and remove the one before."""
        from pipeline.healing.checkpoints import save_state, sweep_states

        progress = self.training.progress
        folder = save_state(self.run_dir, progress.step, self.training.state())
        entry = HealingEntry(of=self.healing.of, step=progress.step, folder=folder, curve=progress.curve)
        self.job.ledger.commit(HEALING, entry)
        sweep_states(self.run_dir, folder)


def _staged(job: JobContext, best: Mapping[str, Tensor]) -> tuple[dict[str, StagedRecord], tuple[str, ...]]:
    """Stage the layers with trained tensors. Return their records by layer, and the names of tensors that changed."""
    records, changed = {}, list[str]()
    for layer in sorted({task.layer for task in job.inputs.tasks}):
        entry = job.ledger.get(layer_key(layer))
        assert entry is not None
        tensors = read_staged(job.run_dir.storage, entry.staged)
        tensors |= {name: best[name] for name in tensors.keys() & best.keys()}
        records[str(layer)] = staged = write_staged(job.run_dir.storage, layer, tensors)
        solved = entry.staged.tensors
        changed += [name for name, tensor in staged.tensors.items() if tensor.sha256 != solved[name].sha256]
    return records, tuple(sorted(changed))
