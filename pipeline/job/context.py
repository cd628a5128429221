"""Opens a job: checks its inputs, takes both locks, and compares the run directory with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch

from manifests.entries import ReusedEntry
from manifests.errors import InputError
from manifests.evaluation import Evaluation
from manifests.loading import decode_document, dump_manifest
from manifests.records import SourceFile
from manifests.schema import RANKS_ONLY, Manifest
from pipeline.checkpoint.output_directory import OutputFiles, claim_files, claim_output, survey_output
from pipeline.checkpoint.planned_size import plan_of
from pipeline.console.eta import read_paces
from pipeline.console.progress import JobObserver
from pipeline.cost_model.estimate import Plan
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.driver.job_spec import Job
from pipeline.driver.ledger_dependencies import retract_changed
from pipeline.driver.ledger_keys import BEFORE_WORK, COMPLETE, REUSED, SAMPLES, SOURCE, TRIED_SIZE
from pipeline.evaluation.losses import check_dense_loss
from pipeline.inputs.calibration import EvaluationTokens, calibration_tokens, evaluation_tokens
from pipeline.inputs.fingerprint import job_fingerprint
from pipeline.inputs.healing_text import HealingTokens, calibration_as_text, read_healing_text
from pipeline.inputs.job_inputs import MEASURE_LAYERS, Inputs, check_copied, measuring_layers, read_inputs
from pipeline.job.ledger_entries import check_entries
from pipeline.methods.registry import allocate_ranks, measure_tasks, predict_tasks
from pipeline.methods.text_sources import NO_SOURCES, TextSources
from pipeline.rounding.tasks import with_moments
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.model_files import companions
from stores.run_directory import MANIFEST, FingerprintCheck, RunDirectory
from stores.source_watch import SourceWatch
from stores.storage import open_storage
from stores.text_rows import ReadText
from workers.memory import map_large_tensors


@dataclass(frozen=True)
class JobContext:
    """The inputs, places and tools that all stages of a job share.

    Attributes:
        tokens: calibration token ids (samples, sequence); None for a data-free job.
        held_out: token ids (windows, sequence) of the same texts beyond the samples; None if there are none.
        prefix: the ids with which samples and held-out windows begin.
        evaluation: the tokens on which OUTPUT is scored; None without an evaluation of perplexity.
        source_files: the files that the job reads, by name.
        locks: of the run directory and of OUTPUT, held.
        output_files: the files of OUTPUT at the start.
        stop: set by a signal, or when a lock is lost.
        started: time.monotonic().
        sources: the source of each calibration sample.
        texts_read: counts of the documents and tokens read for `calibration` and `evaluation`.
        healing_text: the windows of `heal.text`; None: the calibration samples, or no healing.
        fingerprint_check: the state of the run directory when it was opened; `begin` makes it the job's.
        watch: detects changes of the files that the job reads and copies.
        points: the manifests of a sweep's points; empty for a job.
        in_process: compute in this process, without Ray.
    """

    inputs: Inputs
    tokens: torch.Tensor | None
    held_out: torch.Tensor | None
    prefix: tuple[int, ...]
    evaluation: EvaluationTokens | None
    sources: TextSources
    texts_read: Mapping[str, ReadText]
    healing_text: HealingTokens | None
    source_files: Mapping[str, SourceFile]
    run_dir: RunDirectory
    locks: tuple[RunLock, ...]
    output_files: OutputFiles
    plan: Plan
    observer: JobObserver
    stop: threading.Event
    started: float
    fingerprint_check: FingerprintCheck
    watch: SourceWatch
    points: tuple[Manifest, ...] = ()
    in_process: bool = False

    @property
    def manifest(self) -> Manifest:
        """The manifest of the job."""
        return self.inputs.manifest

    @property
    def name(self) -> str:
        """The name of the run directory. Logs, metrics and Ray's dashboard call the job by it."""
        return PurePosixPath(self.manifest.run_dir).name

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run directory."""
        return self.run_dir.ledger

    @property
    def output(self) -> str:
        """The address of OUTPUT: an absolute path, or a bucket's."""
        return open_storage(self.manifest.output).address

    def left_out(self) -> list[str]:
        """Return a line for each kind of thing that was left out of a text."""
        return [*dict.fromkeys(line for read in self.texts_read.values() for line in read.left_out())]

    def read_figures(self) -> dict[str, Any]:
        """Return the counts of the documents and tokens read, as JSON."""
        skipped = {origin: count for read in self.texts_read.values() for origin, count in read.refused().items()}
        return {"skipped_rows": skipped, "texts_read": {use: read.as_json() for use, read in self.texts_read.items()}}

    def seconds(self) -> float:
        """Return the seconds since this run of the job began."""
        return time.monotonic() - self.started


@contextmanager
def open_job(
    manifest: Manifest, *, fresh: bool, stop: threading.Event, quiet: bool, in_process: bool = False
) -> Iterator[JobContext]:
    """Check everything that can be known before computing, and lock the run directory and OUTPUT.

    Existing work in the run directory stays unchanged until `begin`.

    Raises:
        InputError: an input is wrong, or another process has a lock (InUseError); nothing was computed.
        StorageError: a file cannot be read or written.
    """
    started, observer = time.monotonic(), JobObserver(quiet=quiet)
    observer.stage("checks")
    map_large_tensors()  # so that memory freed after digests and copies returns to the system
    inputs = read_inputs(manifest)
    text = read_text(inputs)
    if inputs.measures_sizes and text.held_out is None:
        raise InputError(
            f"{inputs.measures_sizes}: measures losses on calibration text beyond the samples, and there is none; give "
            "more text, or lower calibration.samples"
        )
    plan = plan_of(inputs)
    run_dir, output = RunDirectory(manifest.run_dir), open_storage(manifest.output)
    run_dir.prepare(plan.run_dir_bytes)
    with run_dir.lock as lock, claim_output(output) as output_lock:
        observer.earlier = read_paces(lock.previous_progress.get("paces"))
        source_files = read_source(inputs, run_dir.ledger)
        watch = watch_source(inputs, source_files, run_dir.ledger)
        output_files = survey_output(output, run_dir.ledger, fresh)
        if fresh or run_dir.ledger.get(COMPLETE) is None:  # otherwise there may be nothing to write
            output_files.replaceable()
        inputs, fingerprint_check = _compare_run_dir(inputs, text, source_files, run_dir, output_files, fresh)
        job = JobContext(
            inputs, *text, source_files, run_dir, (lock, output_lock), output_files, plan, observer, stop, started,
            fingerprint_check, watch, in_process=in_process,
        )  # fmt: skip
        if fingerprint_check.kind in ("same", "adapted"):
            check_evaluation_prefix(job, MANIFEST, manifest.evaluation)
            job = with_entered_samples(job)
        if fingerprint_check.reuses_entries:
            check_ledger(job)
        elif fingerprint_check.kind == "new":  # so that a start after a refused one need not read the source again
            run_dir.ledger.commit(SOURCE, source_files)
        yield job


def _compare_run_dir(
    inputs: Inputs,
    text: JobText,
    source_files: Mapping[str, SourceFile],
    run_dir: RunDirectory,
    output_files: OutputFiles,
    fresh: bool,
) -> tuple[Inputs, FingerprintCheck]:
    """Compare the job with that of the run directory. Return the inputs with a value in place of
    `budget.measure_layers: null`, and the result.

    Layers are measured if there is held-out text, unless the job of the run directory was begun without.
    """
    adaptable = partial(_is_adaptable, inputs.manifest, output_files)
    for possible in (text.held_out is not None, False):
        chosen = replace(inputs, manifest=measuring_layers(inputs.planned, possible=possible))
        fingerprint = job_fingerprint(chosen, text.samples, source_files)
        check = run_dir.check_fingerprint(fingerprint, fresh, adaptable, BEFORE_WORK)
        if check.kind != "adapted" or f"manifest.{MEASURE_LAYERS}" not in check.differing:
            break
    return chosen, check


def with_samples(manifest: Manifest, samples: int) -> Manifest:
    """Return a manifest with another number of calibration samples."""
    assert manifest.calibration is not None
    calibration = manifest.calibration.model_copy(update={"samples": samples})
    return manifest.model_copy(update={"calibration": calibration})


def with_entered_samples(job: JobContext) -> JobContext:
    """Return the job with the number of samples that `samples: auto` has chosen; the job itself before the choice.

    The chosen samples are spread evenly over all that were drawn.
    """
    calibration, entered = job.manifest.calibration, job.ledger.get(SAMPLES)
    if calibration is None or not calibration.chooses_samples or entered is None or job.tokens is None:
        return job
    inputs = replace(job.inputs, manifest=with_samples(job.manifest, entered.samples))
    chosen = torch.arange(entered.samples) * len(job.tokens) // entered.samples
    sources = job.sources.some(chosen.tolist())
    return replace(job, inputs=inputs, tokens=job.tokens[chosen], sources=sources, plan=plan_of(inputs))


class JobText(NamedTuple):
    """Token ids int64 of a job's texts, as `JobContext` has them."""

    samples: torch.Tensor | None
    held_out: torch.Tensor | None
    prefix: tuple[int, ...]
    evaluation: EvaluationTokens | None
    sources: TextSources
    texts_read: Mapping[str, ReadText]
    healing_text: HealingTokens | None


def read_text(inputs: Inputs) -> JobText:
    """Read the texts for calibration and evaluation. Raises InputError."""
    drawn, evaluation = calibration_tokens(inputs), evaluation_tokens(inputs)
    held_out = drawn.held_out if drawn and len(drawn.held_out) else None
    sources = drawn.sources if drawn else NO_SOURCES
    samples, prefix = (drawn.samples, drawn.prefix) if drawn else (None, ())
    healing = read_healing_text(inputs)
    texts = (("calibration", drawn), ("evaluation", evaluation), ("heal", healing))
    texts_read = {name: text.read for name, text in texts if text}
    return JobText(samples, held_out, prefix, evaluation, sources, texts_read, healing)


def check_evaluation_prefix(job: JobContext, file: str, evaluation: Evaluation) -> None:
    """Raise InputError if scores in the run directory are of windows without a prefix, and the default would add one.

    `file`: the stored manifest, which a version without prefixes may have written. `evaluation`: as the user gives it.
    """
    perplexity, storage = evaluation.perplexity, job.run_dir.storage
    if perplexity is None or "prefix" in perplexity.model_fields_set or not (job.evaluation and job.evaluation.prefix):
        return
    stored = decode_document(storage.read(file), storage.at(file)) if storage.has(file) else {}
    earlier = (stored.get("evaluation") or {}).get("perplexity")
    if earlier is not None and "prefix" not in earlier:
        raise InputError(
            "evaluation.perplexity.prefix: an earlier version began this run directory, and its windows have no "
            f"prefix; the tokenizer puts the ids {', '.join(map(str, job.evaluation.prefix))} before a text; set "
            "none to go on as before, or tokenizer to score with them"
        )


def read_source(inputs: Inputs, ledger: Ledger) -> Mapping[str, SourceFile]:
    """Return the digests of the source's files. If they are not those in the ledger, check the tensors that are only
    copied. Raises NumericsError."""
    entered = ledger.get(SOURCE)
    source_files = inputs.source.file_digests(entered or {})
    if source_files != entered:
        check_copied(inputs)
    return source_files


def watch_source(inputs: Inputs, source_files: Mapping[str, SourceFile], ledger: Ledger) -> SourceWatch:
    """Watch the files of the source that a job reads and copies. Once one has changed, the ledger refuses commits.

    Raises StorageError where a file cannot be read.
    """
    storage = inputs.source.storage
    watch = SourceWatch(storage, source_files, companions(storage, inputs.manifest.model.trust_remote_code))
    ledger.guard = watch.check
    return watch


def check_ledger(job: JobContext) -> None:
    """Enter the source's digests, and retract entries that contradict the job."""
    ledger = job.ledger
    ledger.commit(SOURCE, job.source_files)
    tried = ledger.get(TRIED_SIZE)  # the entries are of this size, which may not be the job's
    sized = job.inputs.at_size(tried.size) if tried and job.manifest.budget else job.inputs
    check_entries(ledger, driver_job(sized), job.inputs.config, job.inputs.source.tensors)


def healing_tokens(job: JobContext) -> HealingTokens:
    """Return the windows of the healing that the manifest asks for: of `heal.text`, or of the calibration text."""
    if job.healing_text is not None:
        return job.healing_text
    assert job.tokens is not None, "the manifest has calibration or heal.text"
    return calibration_as_text(job.manifest, job.tokens, job.held_out, job.prefix)


def driver_job(inputs: Inputs) -> Job:
    """Return the job as the driver sees it."""
    return replace(job_spec(inputs.planned), rounds=inputs.rounds)


def job_spec(planned: PlannedJob) -> Job:
    """Return a job of these tasks, as the driver sees it."""
    manifest, geometry, methods = planned.manifest, planned.geometry, planned.methods
    return Job(
        **vars(planned.passes),
        num_layers=geometry.num_layers,
        tasks=tuple(planned.tasks),
        allocate=partial(allocate_ranks, manifest, methods, geometry),
        points=tuple(layer.corrected_points for layer in geometry.layers),
        experts=tuple(layer.num_experts for layer in geometry.layers),
        held_experts=manifest.workers.experts,
        measures=measure_tasks(methods, geometry),
        predicts=tuple(
            with_moments(task, manifest, geometry.layers[task.layer]) for task in predict_tasks(methods, geometry)
        ),
    )


def check_output(job: JobContext, faults: Sequence[str], finished: bool) -> None:
    """Report the inputs' remarks, and the faults of a finished OUTPUT.

    `finished`: the layers are done, and only scores are missing.

    Raises InputError when OUTPUT contains files of others, or has too little space.
    """
    for remark in job.inputs.remarks:
        job.observer.say(remark, logging.WARNING)
    for line in job.left_out():
        job.observer.say(line)
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


def check_loss(job: JobContext, loss: float, text: str) -> None:
    """Raise InputError if the dense model's loss on a text shows that something was read wrongly, unless the manifest
    accepts it."""
    if not job.manifest.model.accept_loss:
        remedy = "if its weights are random, set model.accept_loss: true"
        check_dense_loss(loss, job.inputs.geometry.vocab, text, remedy)


def begin(job: JobContext, finished: bool) -> None:
    """Make the run directory the job's, and report the work that it resumes. `finished`: as in `check_output`."""
    job.run_dir.bind(job.fingerprint_check, partial(_undo_solves, job.ledger, job.fingerprint_check.differing))
    if not job.fingerprint_check.reuses_entries:
        check_ledger(job)
    replaceable = frozenset() if finished else job.output_files.replaceable()
    if replaceable:  # with --fresh, the ledger no longer lists them
        claim_files(job.ledger, open_storage(job.manifest.output), replaceable, ())
    job.run_dir.storage.replace(MANIFEST, dump_manifest(job.manifest).encode())
    if not finished:
        _report_progress(job)
    if reused := job.ledger.get(REUSED):
        job.observer.say(f"statistics of an earlier run are reused: {reused.seconds:.1f} s of forward passes saved")


def _report_progress(job: JobContext) -> None:
    claimed = len(job.inputs.claimed_layers)
    passed, compressed = (len(job.ledger.keys(kind)) for kind in ("dense/", "layer/"))
    if compressed:
        job.observer.say(f"resuming at layer {min(compressed + 1, claimed)} of {claimed} to compress")
    elif passed:
        job.observer.say(f"resuming at layer {passed} of {job.inputs.geometry.num_layers} of the dense pass")


def _is_adaptable(manifest: Manifest, output_files: OutputFiles, differing: list[str]) -> bool:
    """Return True if statistics depend on none of the fields that differ: then only later work has to be undone.

    Raises InputError if OUTPUT cannot be replaced then.
    """
    names = _manifest_fields(differing)
    ranks_only = len(names) == len(differing) and all(map(RANKS_ONLY.fullmatch, names))
    if not ranks_only or manifest.calibration is None or manifest.calibration.propagate != "dense":
        return False
    output_files.replaceable()
    return True


def _manifest_fields(differing: Sequence[str]) -> list[str]:
    return [name.removeprefix("manifest.") for name in differing if name.startswith("manifest.")]


def _undo_solves(ledger: Ledger, differing: Sequence[str]) -> None:
    """Retract all entries that depend on these fields."""
    names = _manifest_fields(differing)
    if complete := ledger.get(COMPLETE):
        phases = complete.summary.get("seconds", {}).get("phases", {})
        seconds = phases.get("statistics", 0.0) + phases.get("gradient", 0.0)
        ledger.commit(REUSED, ReusedEntry(seconds=complete.summary.get("seconds_saved", 0.0) + seconds))
    ledger.retract(COMPLETE)
    changed = ["measured", TRIED_SIZE, "block"]
    if not {"budget.max_loss", "budget.keep"}.issuperset(names):
        changed.append("tries")
    if not all(name.startswith("budget") for name in names):
        changed.append("curves")
    retract_changed(ledger, ledger.keys(), changed)
