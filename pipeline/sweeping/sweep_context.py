"""A sweep that may work: every point checked, the run directory held, what all points share."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from manifests.entries import PointsEntry
from manifests.errors import InputError
from manifests.records import SourceFile
from manifests.strict_yaml import write_yaml
from manifests.sweep import SWEEP_VERSION, Point, Sweep
from pipeline.checkpoint.compression_record import quick_faults
from pipeline.checkpoint.output_directory import OutputFiles, claim_files, claim_output, survey_output
from pipeline.checkpoint.planned_size import bounded_plan
from pipeline.console.eta import read_paces
from pipeline.console.progress import JobObserver
from pipeline.driver.ledger_keys import BEFORE_WORK, POINTS, RESULT, SOURCE
from pipeline.inputs.calibration import calibration_tokens, evaluation_tokens, tokens_digest
from pipeline.inputs.fingerprint import job_fingerprint
from pipeline.inputs.job_inputs import check_copied
from pipeline.job.context import JobContext, driver_job, watch_source
from pipeline.job.ledger_entries import check_entries
from pipeline.sweeping.points import SharedInputs, SweptPoint, read_points, shared_inputs
from pipeline.sweeping.sweep_plan import run_dir_bytes
from stores.run_directory import SWEEP, RunDirectory
from stores.storage import open_storage


@dataclass(frozen=True)
class SweepContext:
    """What every stage of a sweep is given.

    Attributes:
        job: what the points share: inputs, tokens, run directory, locks.
    """

    sweep: Sweep
    points: tuple[SweptPoint, ...]
    job: JobContext

    def of(self, point: SweptPoint) -> JobContext:
        """The job of a point by itself, but for its workers."""
        run_dir = self.job.run_dir.with_ledger(point.ledger(self.job.run_dir.ledger))
        return replace(self.job, inputs=point.inputs, run_dir=run_dir)

    def remarks(self) -> dict[str, list[str]]:
        """What the methods have to say before anything is computed, and of which points it is said."""
        said: dict[str, list[str]] = {}
        for point in self.points:
            for remark in point.inputs.remarks:
                said.setdefault(remark, []).append(point.point.label)
        return said

    @property
    def text(self) -> str:
        """Digest of the tokens that points are scored on."""
        tokens = [tokens_digest(self.job.evaluation), tokens_digest(self.job.held_out)]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def begin(self) -> SweepContext:
        """Makes the run directory the sweep's, as its work may begin. Returns what the stages go on with."""
        self.job.run_dir.bind(self.job.standing)
        begun = replace(self, job=replace(self.job, standing=replace(self.job.standing, kind="same")))
        if not self.job.standing.goes_on:
            begun.enter()
        for point in self.points:
            if point.point.save:
                output, ledger = open_storage(point.point.manifest.output), point.ledger(self.job.ledger)
                replaceable = survey_output(output, ledger, self.job.output_files.fresh).replaceable()
                if replaceable and not begun.is_done(point):
                    claim_files(ledger, output, replaceable, ())
        return begun

    def enter(self) -> None:
        """Enters what the sweep reads and which points it has, takes back what makes no sense of what is entered."""
        job, ledger = self.job, self.job.ledger
        ledger.commit(SOURCE, job.source_files)
        ledger.commit(POINTS, PointsEntry(digests=tuple(point.digest for point in self.points)))
        check_entries(ledger, driver_job(job.inputs), job.inputs.config)
        job.run_dir.storage.replace(SWEEP, write_yaml(self.sweep.model_dump(mode="json")).encode())

    def is_done(self, point: SweptPoint) -> bool:
        """Whether all that is asked of a point is there."""
        if not self.job.standing.goes_on:
            return False
        entry = point.ledger(self.job.ledger).get(RESULT)
        if entry is None or entry.text != self.text:
            return False
        if not point.point.save:
            return True
        output = point.point.manifest.output
        known = entry.seal if entry.output == open_storage(output).address else None
        return known is not None and not quick_faults(output, known)


@contextmanager
def open_sweep(
    sweep: Sweep,
    points: tuple[Point, ...],
    *,
    fresh: bool,
    stop: threading.Event,
    quiet: bool,
    in_process: bool = False,
) -> Iterator[SweepContext]:
    """Checks everything that can be known before computing, and holds the sweep's places.

    Raises:
        InputError: something given is wrong; nothing was computed.
    """
    started, observer = time.monotonic(), JobObserver(quiet=quiet)
    observer.stage("checks")
    swept = read_points(points)
    inputs = shared_inputs(swept, sweep.output)
    drawn, evaluation = calibration_tokens(inputs), evaluation_tokens(inputs)
    tokens = drawn.samples if drawn else None
    held_out = drawn.held_out if drawn and len(drawn.held_out) else None
    if evaluation is None and held_out is None:
        raise InputError(
            "evaluation.perplexity: missing, and the calibration text has no tokens beyond the samples: there is "
            "nothing to compare points on; give evaluation.perplexity.text"
        )
    run_dir = RunDirectory(inputs.manifest.run_dir)
    plan = bounded_plan(inputs)
    with ExitStack() as stack:
        run_dir.prepare(run_dir_bytes(swept, plan))
        locks = [stack.enter_context(run_dir.lock)]
        observer.earlier = read_paces(run_dir.lock.earlier.get("paces"))
        source_files = inputs.source.file_digests(run_dir.ledger.get(SOURCE) or {})
        if source_files != run_dir.ledger.get(SOURCE):
            check_copied(inputs)
        watch = watch_source(inputs, source_files, run_dir.ledger)
        standing = run_dir.check_fingerprint(_fingerprint(inputs, tokens, source_files), fresh, before_work=BEFORE_WORK)
        nothing = OutputFiles(sweep.output, frozenset(), frozenset(), (), fresh)
        job = JobContext(
            inputs, tokens, held_out, evaluation, source_files, run_dir, (), nothing, plan, observer, stop, started,
            standing, watch, tuple(point.manifest for point in points), in_process,
        )  # fmt: skip
        found = SweepContext(sweep, swept, job)
        if standing.goes_on:
            found.enter()
        elif standing.kind == "new":  # a start that is refused has not read the source in vain
            run_dir.ledger.commit(SOURCE, source_files)
        for point in swept:
            if point.point.save:
                output = open_storage(point.point.manifest.output)
                locks.append(stack.enter_context(claim_output(output)))
                survey_output(output, point.ledger(run_dir.ledger), fresh).replaceable()
        yield replace(found, job=replace(job, locks=tuple(locks)))


def _fingerprint(
    inputs: SharedInputs, tokens: torch.Tensor | None, source_files: Mapping[str, SourceFile]
) -> dict[str, Any]:
    """Of what all points share: points come and go."""
    fields = job_fingerprint(inputs, tokens, source_files)
    shared = {name: fields["manifest"][name] for name in ("seed", "calibration", "workers")}
    return {**fields, "manifest": {"sweep": SWEEP_VERSION, **shared}}
