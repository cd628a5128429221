"""Opens a sweep: checks it, and takes the locks of its run directory and of the checkpoints that it saves."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from manifests.entries import PointEntry, PointsEntry
from manifests.errors import InputError
from manifests.records import SourceFile
from manifests.strict_yaml import write_yaml
from manifests.sweep import SWEEP_VERSION, Sweep, SweepPoint
from pipeline.checkpoint.compression_record import quick_faults
from pipeline.checkpoint.counting import source_sizes
from pipeline.checkpoint.output_directory import OutputFiles, claim_files, claim_output, survey_output
from pipeline.checkpoint.planned_size import bounded_plan
from pipeline.console.eta import read_paces
from pipeline.console.progress import JobObserver
from pipeline.driver.ledger_keys import BEFORE_WORK, POINTS, RESULT, SOURCE, layer_key
from pipeline.evaluation.task_scores import asked_by, tasks_digest
from pipeline.inputs.calibration import tokens_digest
from pipeline.inputs.fingerprint import job_fingerprint
from pipeline.job.context import (
    JobContext,
    check_evaluation_prefix,
    driver_job,
    read_source,
    read_text,
    watch_source,
)
from pipeline.job.healing import check_healing, healing_digest
from pipeline.job.ledger_entries import check_entries
from pipeline.sweeping.points import SharedInputs, SweptPoint, read_points, shared_inputs
from pipeline.sweeping.sweep_plan import run_dir_bytes
from stores.run_directory import SWEEP, RunDirectory
from stores.storage import open_storage


@dataclass(frozen=True)
class SweepContext:
    """The context of every stage of a sweep.

    Attributes:
        job: the context that the points share: inputs, tokens, run directory, locks.
    """

    sweep: Sweep
    points: tuple[SweptPoint, ...]
    job: JobContext

    def of(self, point: SweptPoint) -> JobContext:
        """Return the job context of a single point."""
        run_dir = self.job.run_dir.with_ledger(point.ledger(self.job.run_dir.ledger))
        return replace(self.job, inputs=point.inputs, run_dir=run_dir)

    def remarks(self) -> dict[str, list[str]]:
        """Return remark -> labels of the points that it applies to."""
        remarks: dict[str, list[str]] = {}
        for point in self.points:
            for remark in point.inputs.remarks:
                remarks.setdefault(remark, []).append(point.point.label)
        return remarks

    def check_healing(self) -> None:
        """Raise InputError if a saved point cannot be healed, with a line for each fault."""
        faults: dict[str, list[str]] = {}
        for point in self.points:
            try:
                check_healing(self.of(point))
            except InputError as error:
                faults.setdefault(str(error), []).append(point.point.label)
        if faults:
            raise InputError("\n".join(f"{', '.join(labels)}: {fault}" for fault, labels in faults.items()))

    @property
    def text(self) -> str:
        """The digest of the tokens and tasks that points are scored on."""
        evaluation = None if self.job.evaluation is None else self.job.evaluation.ids
        tokens = [tokens_digest(evaluation), tokens_digest(self.job.held_out)]
        tokens += [tasks_digest(asked_by(self.job.manifest.evaluation))] if self.job.manifest.evaluation.tasks else []
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    @cached_property
    def healing(self) -> str | None:
        """The digest of the healing of saved points; None without one."""
        return healing_digest(self.job)

    def begin(self) -> SweepContext:
        """Bind the run directory to the sweep before its work begins. Return the context of the next stages."""
        self.job.run_dir.bind(self.job.fingerprint_check)
        begun = replace(self, job=replace(self.job, fingerprint_check=replace(self.job.fingerprint_check, kind="same")))
        if not self.job.fingerprint_check.reuses_entries:
            begun.enter()
        for point in self.points:
            if point.point.save:
                output, ledger = open_storage(point.point.manifest.output), point.ledger(self.job.ledger)
                replaceable = survey_output(output, ledger, self.job.output_files.fresh).replaceable()
                if replaceable and not begun.is_done(point):
                    claim_files(ledger, output, replaceable, ())
        return begun

    def enter(self) -> None:
        """Commit the digests of the source and of the points, and retract entries that do not fit the job."""
        job, ledger = self.job, self.job.ledger
        ledger.commit(SOURCE, job.source_files)
        ledger.commit(POINTS, PointsEntry(digests=tuple(point.digest for point in self.points)))
        check_entries(ledger, driver_job(job.inputs), job.inputs.config, job.inputs.source.tensors)
        job.run_dir.storage.replace(SWEEP, write_yaml(self.sweep.model_dump(mode="json")).encode())

    def _counts_alike(self, entry: PointEntry) -> bool:
        """True if a result counts the source's numbers as this version does, and can stand beside others in a table."""
        inputs = self.job.inputs
        sizes = source_sizes(inputs.source, inputs.geometry.layers_path, inputs.dtype.itemsize)
        return entry.counts["parameters"]["dense"] == sizes["parameters"]

    def is_done(self, point: SweptPoint) -> bool:
        """True if a point has a result on this text, and if the sweep saves it an undamaged checkpoint, healed as the
        sweep asks for."""
        entry = self._result(point)
        if entry is None or not point.point.save:
            return entry is not None
        if self.heals(point) and (entry.healed is None or entry.healed.asked != self.healing):
            return False
        output = point.point.manifest.output
        seal = entry.seal if entry.output == open_storage(output).address else None
        return seal is not None and not quick_faults(output, seal)

    def heals(self, point: SweptPoint) -> bool:
        """True if the sweep heals a point."""
        return point.point.manifest.heal is not None

    def healings_due(self) -> list[SweptPoint]:
        """Return the points whose healing is missing."""
        return [point for point in self.points if self.heals(point) and not self.is_done(point)]

    def is_solved(self, point: SweptPoint) -> bool:
        """True if a point is done, or only its healing is missing."""
        if self.is_done(point):
            return True
        ledger = point.ledger(self.job.ledger)
        layers = point.inputs.claimed_layers
        staged = self.heals(point) and all(ledger.get(layer_key(layer)) is not None for layer in layers)
        return staged and self._result(point) is not None

    def _result(self, point: SweptPoint) -> PointEntry | None:
        """Return the result of a point on this text."""
        if not self.job.fingerprint_check.reuses_entries:
            return None
        entry = point.ledger(self.job.ledger).get(RESULT)
        return entry if entry is not None and entry.text == self.text and self._counts_alike(entry) else None


@contextmanager
def open_sweep(
    sweep: Sweep,
    points: tuple[SweepPoint, ...],
    *,
    fresh: bool,
    stop: threading.Event,
    in_process: bool = False,
) -> Iterator[SweepContext]:
    """Check the sweep and hold the locks of its directories while the block runs.

    Raises:
        InputError: an input is wrong; raised before any computation.
    """
    started, observer = time.monotonic(), JobObserver()
    observer.stage("checks")
    swept = read_points(points)
    inputs = shared_inputs(swept, sweep.output)
    text = read_text(inputs)
    if text.evaluation is None and text.held_out is None:
        raise InputError(
            "evaluation.perplexity: missing, and the calibration text has no tokens beyond the samples: there is "
            "nothing to compare points on; give evaluation.perplexity.text"
        )
    run_dir = RunDirectory(inputs.manifest.run_dir)
    plan = bounded_plan(inputs)
    with ExitStack() as stack:
        run_dir.prepare(run_dir_bytes(swept, plan))
        locks = [stack.enter_context(run_dir.lock)]
        observer.earlier = read_paces(run_dir.lock.previous_progress.get("paces"))
        source_files = read_source(inputs, run_dir.ledger)
        watch = watch_source(inputs, source_files, run_dir.ledger)
        fingerprint = _fingerprint(inputs, text.samples, source_files)
        fingerprint_check = run_dir.check_fingerprint(fingerprint, fresh, before_work=BEFORE_WORK)
        no_files = OutputFiles(sweep.output, frozenset(), frozenset(), (), fresh)
        job = JobContext(
            inputs, *text, source_files, run_dir, (), no_files, plan, observer, stop, started,
            fingerprint_check, watch, tuple(point.manifest for point in points), in_process,
        )  # fmt: skip
        context = SweepContext(sweep, swept, job)
        context.check_healing()
        if fingerprint_check.reuses_entries:
            check_evaluation_prefix(job, SWEEP, sweep.evaluation)
            context.enter()
        elif fingerprint_check.kind == "new":  # so that a start after a refused one need not read the source again
            run_dir.ledger.commit(SOURCE, source_files)
        for point in swept:
            if point.point.save:
                output = open_storage(point.point.manifest.output)
                locks.append(stack.enter_context(claim_output(output)))
                survey_output(output, point.ledger(run_dir.ledger), fresh).replaceable()
        yield replace(context, job=replace(job, locks=tuple(locks)))


def _fingerprint(
    inputs: SharedInputs, tokens: torch.Tensor | None, source_files: Mapping[str, SourceFile]
) -> dict[str, Any]:
    """Return the fingerprint of everything that all points share: users may add and remove points."""
    fields = job_fingerprint(inputs, tokens, source_files)
    shared = {name: fields["manifest"][name] for name in ("seed", "calibration", "workers")}
    return {**fields, "manifest": {"sweep": SWEEP_VERSION, **shared}}
