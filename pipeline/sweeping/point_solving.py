"""Every point of a sweep: one pass over the text for all; those alike but for their size are solved together; one after
another is scored and entered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from manifests.entries import PointEntry, TokensEntry
from manifests.errors import CorruptError
from manifests.records import ArrayRecord
from pipeline.checkpoint.compression_record import SEAL
from pipeline.checkpoint.counting import count, stored_tensors
from pipeline.console.signals import catch_signals
from pipeline.cost_model.rates import known_rates
from pipeline.driver.job_spec import entered_scores, staged_layer
from pipeline.driver.ledger_keys import EVALUATION, HARDWARE, HELD_OUT_SCORE, RANKS, RESULT
from pipeline.evaluation.perplexity import NUMBERS_PER_BATCH, SHARDS, perplexity_figures
from pipeline.job.context import JobContext, driver_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.ledger_entries import check_entries
from pipeline.job.output_scores import dense_score_key, score_entry
from pipeline.job.sizing import compress_and_score
from pipeline.job.worker_session import JobWorkers, StoreCleaner, assemble_output, job_workers, staged_layers
from pipeline.ranks.curves import predicted_loss
from pipeline.sweeping.joint_solving import stage_together
from pipeline.sweeping.point_pool import PointPool
from pipeline.sweeping.points import SweptPoint, series_of
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.sweeping.sweep_plan import sweep_outlook
from pipeline.units.scores import Scored, Windows

DENSE, COMPRESSED = "evaluation-dense", "evaluation"  # as the ledger names what is scored
PASSING = (  # what a point leaves when it is entered
    "layer/", "activations/", "compared", "held_out_score", "scored/",
)  # fmt: skip


def solve_points(sweep: SweepContext, heartbeat: Heartbeat) -> None:
    """Enters what is missing: every point's result, and the checkpoints that are wanted.

    Raises:
        Interrupted: a signal came; what is entered stays.
    """
    pending = [point for point in sweep.points if not sweep.is_done(point)]
    if not pending:
        return
    job = sweep.job
    with job_workers(job, heartbeat) as workers:
        device = (job.ledger.get(HARDWARE) or {})["device"]
        job.observer.expect(sweep_outlook(pending, job, known_rates(device)))
        _take_statistics(job, pending, workers)
        windows = _score_dense(job, workers)
        place = 0
        for series in series_of(pending):
            took_s = _stage(sweep, series, workers)
            for number, point in enumerate(series, start=1):
                place += 1
                job.observer.say(f"point {place} of {len(pending)}: {point.point.label}")
                catch_signals(job.stop)
                _solve(sweep, point, workers, windows, took_s / len(series))
                waiting = [record for other in series[number:] for record in staged_layers(sweep.of(other).ledger)]
                StoreCleaner(job.run_dir, workers.always, workers.dropping).retain_staged(tuple(waiting))


def _take_statistics(job: JobContext, pending: list[SweptPoint], workers: JobWorkers) -> None:
    """The passes over the text: the union of what the points ask for."""
    asked = {point.first + place for point in pending for place in range(len(point.inputs.methods))}
    tasks = tuple(task for task in job.inputs.tasks if task.method in asked)
    scores = frozenset(score for point in pending for score in point.inputs.scores)
    shared = replace(driver_job(job.inputs), tasks=tasks, scores=scores, measures=(), predicts=())
    workers.take_statistics(job, shared)


def _score_dense(job: JobContext, workers: JobWorkers) -> Windows | None:
    """The windows of the evaluation text, stored for the workers; the dense model is scored on them once."""
    if job.evaluation is None:
        return None
    count, length = job.evaluation.shape
    batch, tokens = max(1, NUMBERS_PER_BATCH // length), _stored_windows(job, workers)
    windows = Windows.even(count, SHARDS, "float32", batch, tokens)
    (key,) = dense_score_key(job)
    if job.ledger.get(key) is None:
        scorer = workers.scorer(job)
        found = scorer.score(windows, DENSE, [None] * job.inputs.geometry.num_layers)
        job.ledger.commit(key, score_entry(job, "dense", key.rpartition("/")[2], _figures(found, windows)))
        scorer.forget(DENSE)
    return windows


def _figures(found: Scored, windows: Windows) -> dict[str, Any]:
    """As `evaluation.perplexity.score_tokens` gives them."""
    assert windows.tokens is not None
    count, length = windows.tokens.shape
    return perplexity_figures(found, count, length)


def _stored_windows(job: JobContext, workers: JobWorkers) -> ArrayRecord:
    assert job.evaluation is not None
    ids, store, entered = job.evaluation.to(torch.int32), job.run_dir.activations, job.ledger.get(EVALUATION)
    if entered is not None:
        try:
            if not torch.equal(store.open(entered.tokens).read(0, entered.tokens.shape[0]), ids):
                entered = None
        except CorruptError as error:
            job.observer.repaired(str(error), [EVALUATION])
            entered = None
    if entered is None:
        entered = TokensEntry(tokens=store.write_tokens(ids))
        job.ledger.commit(EVALUATION, entered)
    workers.always.append(entered.tokens)
    return entered.tokens


def _stage(sweep: SweepContext, series: Sequence[SweptPoint], workers: JobWorkers) -> float:
    """The layers of points that share their solves; the seconds that they took."""
    started = time.monotonic()
    for point in series:
        job = sweep.of(point)
        check_entries(job.ledger, driver_job(job.inputs), job.inputs.config)
    if len(series) > 1:
        stage_together(sweep, series, _workers_of(series[0], workers))
    return time.monotonic() - started


def _workers_of(point: SweptPoint, workers: JobWorkers) -> JobWorkers:
    """What a point is scored on is not committed on the way: killed, it is scored again."""
    pool, every = PointPool(workers.pool, point.first), point.inputs.geometry.num_layers + 1
    return JobWorkers(pool, workers.always, every, workers.dropping)


def _solve(
    sweep: SweepContext, point: SweptPoint, workers: JobWorkers, windows: Windows | None, shared_s: float
) -> None:
    """`shared_s`: the point's part of the seconds that solving it with others took."""
    job, started = sweep.of(point), time.monotonic()
    own = _workers_of(point, workers)
    scored = _compress_and_score(job, own, windows, compared=point.point.save)
    tensors, forms = stored_tensors(job.inputs, job.ledger)
    compression = assemble_output(job) if point.point.save else None
    catch_signals(job.stop)
    entry = PointEntry(
        text=sweep.text,
        counts=count(job.inputs, tensors, forms),
        loss=scored.loss / scored.tokens if scored else None,
        held_out=job.ledger.get(HELD_OUT_SCORE),
        predicted=_predicted(job),
        seconds=shared_s + time.monotonic() - started,
        output=job.output if compression else None,
        seal=compression[SEAL] if compression else None,
    )
    job.ledger.commit(RESULT, entry)
    for key in (key for kind in PASSING for key in job.ledger.keys(kind)):
        job.ledger.retract(key)
    job.observer.say(result_line(point.point.label, entry))


def _compress_and_score(
    job: JobContext, workers: JobWorkers, windows: Windows | None, *, compared: bool
) -> Scored | None:
    """A staged layer that is damaged in between is made again, once."""
    for attempt in range(2):
        compress_and_score(job, workers, compared=compared)
        if windows is None:
            return None
        staged = [staged_layer(job.ledger, layer) for layer in range(job.inputs.geometry.num_layers)]
        try:
            return workers.scorer(job).score(windows, COMPRESSED, staged)
        except CorruptError as error:
            if attempt:
                raise
            job.observer.repaired(str(error), [])
    raise AssertionError("the second attempt returns or raises")


def _predicted(job: JobContext) -> float | None:
    """By the curves, nats per token; None where ranks follow nothing that predicts a loss."""
    made, calibration, ranks = driver_job(job.inputs), job.manifest.calibration, job.ledger.get(RANKS)
    if ranks is None or calibration is None or calibration.gradient.kind == "local":
        return None
    if not made.tasks or {task.key for task in made.predicts} != {task.key for task in made.tasks}:
        return None
    scores = entered_scores(made, job.ledger.get, {})
    return predicted_loss(scores.curves or {}, ranks.ranks)


def result_line(label: str, entry: PointEntry) -> str:
    """What came of a point, for the log."""
    counts, parts = entry.counts, []
    kept = counts["bytes"]["compressed"] / counts["bytes"]["dense"]
    if entry.loss is not None:
        parts.append(f"loss {entry.loss:.4f}")
    if entry.held_out:
        parts.append(f"divergence {entry.held_out.divergence:.3g}")
    return f"{label}: {kept:.2%} of the bytes, {', '.join(parts)} ({entry.seconds:.1f} s)"
