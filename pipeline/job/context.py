"""A job that may work: checked inputs, both locks held, a run directory that is this job's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import torch

from manifests.entries import ReusedEntry
from manifests.errors import InputError
from manifests.loading import dump_manifest
from manifests.records import Key, SourceFile
from manifests.schema import RANKS_ONLY, Manifest
from pipeline.checkpoint.output_directory import OutputFiles, claim_files, claim_output, survey_output
from pipeline.checkpoint.planned_size import plan_of
from pipeline.console.eta import read_paces
from pipeline.console.progress import JobObserver
from pipeline.cost_model.estimate import Plan
from pipeline.driver.job_spec import Job
from pipeline.driver.ledger_keys import BEFORE_WORK, COMPLETE, HELD_OUT_SCORE, RANKS, REUSED, SOURCE, TARGET, TRIES
from pipeline.inputs.calibration import calibration_tokens, evaluation_tokens
from pipeline.inputs.fingerprint import job_fingerprint
from pipeline.inputs.job_inputs import Inputs, check_copied, read_inputs
from pipeline.job.ledger_entries import check_entries
from pipeline.methods.registry import allocate_ranks, layers_of, measure_tasks, predict_tasks
from pipeline.rounding.tasks import with_moments
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.model_files import companions
from stores.run_directory import MANIFEST, FingerprintCheck, RunDirectory
from stores.source_watch import SourceWatch
from stores.storage import open_storage
from workers.memory import map_large_tensors


@dataclass(frozen=True)
class JobContext:
    """What every stage of a job is given.

    Attributes:
        tokens: calibration token ids (samples, sequence); None for a data-free job.
        held_out: token ids (windows, sequence) of the same texts beyond the samples; None where there are none.
        evaluation: token ids (windows, window) that OUTPUT is scored on; None: no perplexity is asked for.
        source_files: what the job reads, by name.
        locks: of the run directory and of OUTPUT, held.
        output_files: what OUTPUT held at the start.
        stop: set by a signal, or when a lock is lost.
        started: time.monotonic().
        standing: how the run directory stood to the job when it was opened; `begin` makes it the job's.
        watch: of the files that the job reads and copies.
        points: of a sweep, the manifests of its points.
        in_process: units are done in this process, without Ray.
    """

    inputs: Inputs
    tokens: torch.Tensor | None
    held_out: torch.Tensor | None
    evaluation: torch.Tensor | None
    source_files: Mapping[str, SourceFile]
    run_dir: RunDirectory
    locks: tuple[RunLock, ...]
    output_files: OutputFiles
    plan: Plan
    observer: JobObserver
    stop: threading.Event
    started: float
    standing: FingerprintCheck
    watch: SourceWatch
    points: tuple[Manifest, ...] = ()
    in_process: bool = False

    @property
    def manifest(self) -> Manifest:
        """The job as it was asked for."""
        return self.inputs.manifest

    @property
    def name(self) -> str:
        """What logs, metrics and Ray's dashboard call it: its run directory's name."""
        return PurePosixPath(self.manifest.run_dir).name

    @property
    def ledger(self) -> Ledger:
        """What is committed."""
        return self.run_dir.ledger

    @property
    def output(self) -> str:
        """The address of OUTPUT: an absolute path, or a bucket's."""
        return open_storage(self.manifest.output).address

    def seconds(self) -> float:
        """Since this run of the job began."""
        return time.monotonic() - self.started


@contextmanager
def open_job(
    manifest: Manifest, *, fresh: bool, stop: threading.Event, quiet: bool, in_process: bool = False
) -> Iterator[JobContext]:
    """Checks everything that can be known before computing, and holds the job's two places. What a run directory holds
    stays as it is until `begin`.

    Raises:
        InputError: something given is wrong; nothing was computed.
    """
    started, observer = time.monotonic(), JobObserver(quiet=quiet)
    map_large_tensors()  # what is read for digests and copies goes back, too
    observer.stage("checks")
    inputs = read_inputs(manifest)
    drawn, evaluation = calibration_tokens(inputs), evaluation_tokens(inputs)
    tokens = drawn.samples if drawn else None
    held_out = drawn.held_out if drawn and len(drawn.held_out) else None
    if inputs.max_loss is not None and held_out is None:
        raise InputError(
            "budget.max_loss: is measured on calibration text beyond the samples, and there is none; give more text, "
            "or lower calibration.samples"
        )
    run_dir, output = RunDirectory(manifest.run_dir), open_storage(manifest.output)
    plan = plan_of(inputs)
    with ExitStack() as stack:
        run_dir.prepare(plan.run_dir_bytes)
        locks = (stack.enter_context(run_dir.lock), stack.enter_context(claim_output(output)))
        observer.earlier = read_paces(run_dir.lock.previous_progress.get("paces"))
        source_files = inputs.source.file_digests(run_dir.ledger.get(SOURCE) or {})
        if source_files != run_dir.ledger.get(SOURCE):
            check_copied(inputs)
        found = survey_output(output, run_dir.ledger, fresh)
        if fresh or run_dir.ledger.get(COMPLETE) is None:
            found.replaceable()  # a finished job may find that nothing is to be written
        adaptable = partial(_solves_again, manifest, found.replaceable)
        watch = watch_source(inputs, source_files, run_dir.ledger)
        fingerprint = job_fingerprint(inputs, tokens, source_files)
        standing = run_dir.check_fingerprint(fingerprint, fresh, adaptable, BEFORE_WORK)
        job = JobContext(
            inputs, tokens, held_out, evaluation, source_files, run_dir, locks, found, plan, observer, stop, started,
            standing, watch, in_process=in_process,
        )  # fmt: skip
        if standing.reuses_entries:
            check_ledger(job)
        elif standing.kind == "new":  # a start that is refused has not read the source in vain
            run_dir.ledger.commit(SOURCE, source_files)
        yield job


def watch_source(inputs: Inputs, source_files: Mapping[str, SourceFile], ledger: Ledger) -> SourceWatch:
    """Watches what a job reads and copies of its source: nothing is committed to the ledger once a file has changed.

    Raises StorageError where a file cannot be read.
    """
    storage = inputs.source.storage
    copied = companions(storage, inputs.manifest.model.trust_remote_code)
    watch = SourceWatch(storage, source_files, copied)
    ledger.guard = watch.check
    return watch


def check_ledger(job: JobContext) -> None:
    """Enters the source's digests, and takes back what makes no sense of what is entered: of this job's directory."""
    ledger = job.ledger
    ledger.commit(SOURCE, job.source_files)
    target = ledger.get(TARGET) if job.inputs.max_loss is not None else None
    sized = job.inputs.at_size(target.size) if target else job.inputs
    check_entries(ledger, driver_job(sized), job.inputs.config)


def driver_job(inputs: Inputs) -> Job:
    """The job as the driver sees it."""
    manifest, calibration = inputs.manifest, inputs.manifest.calibration
    propagate = calibration.propagate if calibration else "dense"
    keep = manifest.statistics.keep
    return Job(
        num_layers=inputs.geometry.num_layers,
        shards=calibration.shards if calibration else 1,
        tasks=inputs.tasks,
        allocate=lambda scores: allocate_ranks(manifest, inputs.methods, inputs.geometry, scores),
        scores=inputs.scores,
        propagate=propagate,
        importance_shards=inputs.importance_shards,
        points=tuple(layer.points for layer in inputs.geometry.layers),
        keep_statistics=propagate == "dense" if keep is None else keep,
        measures=measure_tasks(inputs.methods, inputs.geometry),
        predicts=tuple(
            with_moments(task, manifest, inputs.geometry.layers[task.layer])
            for task in predict_tasks(inputs.methods, inputs.geometry)
        ),
        gradient=calibration.gradient.kind if calibration else "model",
        gradient_shards=inputs.gradient_shards,
    )


def check_output(job: JobContext, faults: Sequence[str], finished: bool) -> None:
    """Says what is remarkable about the job, and what was wrong with an OUTPUT that was done.

    `finished`: the layers are done, and only scores are missing.

    Raises InputError when OUTPUT holds files of others, or has too little room.
    """
    for remark in job.inputs.remarks:
        job.observer.say(remark, logging.WARNING)
    for fault in faults:
        job.observer.say(f"repairing: the finished output is damaged: {fault}", logging.WARNING)
    if finished:
        return
    job.output_files.replaceable()
    output = open_storage(job.manifest.output)
    free_bytes = output.free_bytes()
    if free_bytes is not None and free_bytes < job.plan.output_bytes:
        raise InputError(
            f"output: {job.plan.output_bytes:,} bytes are needed, {free_bytes:,} are free at {output.at()}; free some "
            "room there, or set output to a larger disk"
        )


def begin(job: JobContext, finished: bool) -> None:
    """Makes the run directory the job's, as its work may begin; says what the run builds on. `finished`: as above."""
    job.run_dir.bind(job.standing, partial(_undo_solves, job.ledger, job.standing.differing))
    if not job.standing.reuses_entries:
        check_ledger(job)
    replaceable = frozenset() if finished else job.output_files.replaceable()
    if replaceable:  # with --fresh, the ledger has forgotten whose they are
        claim_files(job.ledger, open_storage(job.manifest.output), replaceable, ())
    job.run_dir.storage.replace(MANIFEST, dump_manifest(job.manifest).encode())
    if not finished:
        _say_where_it_goes_on(job)
    if reused := job.ledger.get(REUSED):
        job.observer.say(f"statistics of an earlier run serve again: {reused.seconds:.1f} s of forward passes saved")


def _say_where_it_goes_on(job: JobContext) -> None:
    claimed = len(layers_of(job.inputs.tasks))
    walked, compressed = (len(job.ledger.keys(kind)) for kind in ("dense/", "layer/"))
    if compressed:
        job.observer.say(f"resuming at layer {min(compressed + 1, claimed)} of {claimed} to compress")
    elif walked:
        job.observer.say(f"resuming at layer {walked} of {job.inputs.geometry.num_layers} of the dense pass")


def _solves_again(manifest: Manifest, check: Callable[[], object], differing: list[str]) -> bool:
    """Whether ranks are all that differs, and the statistics do not depend on them: later work can be undone alone.

    `check` is called if so.
    """
    names = _manifest_fields(differing)
    ranks_only = len(names) == len(differing) and all(map(RANKS_ONLY.fullmatch, names))
    if not ranks_only or manifest.calibration is None or manifest.calibration.propagate != "dense":
        return False
    check()
    return True


def _manifest_fields(differing: Sequence[str]) -> list[str]:
    return [name.removeprefix("manifest.") for name in differing if name.startswith("manifest.")]


def _undo_solves(ledger: Ledger, differing: Sequence[str]) -> None:
    """Undoes all work that comes after ranks, in which these fields differ."""
    names = _manifest_fields(differing)
    done = ledger.get(COMPLETE)
    summary = done.summary if done else {}
    phases = summary.get("seconds", {}).get("phases", {})
    seconds = summary.get("seconds_saved", 0.0) + phases.get("statistics", 0.0) + phases.get("gradient", 0.0)
    if summary:
        ledger.commit(REUSED, ReusedEntry(seconds=seconds))
    undone: list[Key[Any]] = [
        COMPLETE,
        HELD_OUT_SCORE,
        *ledger.keys("layer/"),
        *ledger.keys("activations/"),
        RANKS,
        TARGET,
        *ledger.keys("measured/"),
    ]
    if names != ["budget.max_loss"]:
        undone += ledger.keys(TRIES)
    if not all(name.startswith("budget") for name in names):
        undone += ledger.keys("curves/")
    for key in undone:
        ledger.retract(key)
