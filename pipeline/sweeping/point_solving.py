"""Does the work of a sweep: one pass over the text for all points, and joint solves of points that differ in size
alone.

Then each point is scored and committed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from manifests.entries import HealedPoint, PointEntry, TokensEntry
from manifests.errors import CorruptError
from manifests.records import ArrayRecord
from pipeline.checkpoint.compression_record import SEAL
from pipeline.checkpoint.counting import committed_sizes
from pipeline.console.signals import catch_signals
from pipeline.cost_model.rates import known_rates
from pipeline.driver.job_spec import staged_layer
from pipeline.driver.ledger_keys import EVALUATION, HARDWARE, HELD_OUT_SCORE, RESULT
from pipeline.evaluation.perplexity import NUMBERS_PER_BATCH, SHARDS, perplexity_figures
from pipeline.evaluation.task_scores import Scores
from pipeline.job.context import JobContext, check_loss, driver_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.ledger_entries import check_entries
from pipeline.job.output_scores import check_task_documents, dense_score_key, score_entry
from pipeline.job.prediction import predicted_at_ranks
from pipeline.job.sizing import compress_and_score
from pipeline.job.stages import assemble_output
from pipeline.job.store_cleaner import StoreCleaner
from pipeline.job.teacher import enter_teacher, forget_other_teacher
from pipeline.job.texts import check_texts
from pipeline.job.worker_session import JobWorkers, job_workers
from pipeline.sweeping.joint_solving import stage_together
from pipeline.sweeping.point_pool import PointPool
from pipeline.sweeping.point_tasks import PointTasks
from pipeline.sweeping.points import SweptPoint, series_of
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.sweeping.sweep_plan import sweep_eta
from pipeline.units.scores import Scored, Windows

DENSE, COMPRESSED = "evaluation-dense", "evaluation"  # names of the scored models in the ledger
TEMPORARY = (
    "layer/",
    "activations/",
    "compared",
    "held_out_score",
    "scored/",
    "after_healing/",
)  # entries retracted with a point's result
HEALED_FROM = ("layer/", "compared")  # those of them that its healing needs


def solve_points(sweep: SweepContext, heartbeat: Heartbeat) -> None:
    """Commit the result of every missing point, and write the checkpoints that the sweep saves.

    Raises:
        InputError: the documents of a task cannot be loaded.
        Interrupted: a signal came; committed results stay.
    """
    pending = [point for point in sweep.points if not sweep.is_solved(point)]
    if not pending:
        return
    for point in filter(sweep.is_done, sweep.points):
        forget_work(sweep.of(point))  # left by an interruption after the commit
    job, numbers = sweep.job, count(1)
    check_task_documents(job)
    forget_other_teacher(job)
    with job_workers(job, heartbeat) as workers:
        expect_phases(sweep, pending, sweep.healings_due())
        check_texts(job, workers)
        _take_statistics(job, pending, workers)
        windows, tasks = score_dense(job, workers), PointTasks(job)
        tasks.score_dense(job, workers)
        if any(map(sweep.heals, pending)):
            enter_teacher(job, workers)
        for series in series_of(pending):
            seconds = _stage(sweep, series, workers)
            for point in series:
                job.observer.say(f"point {next(numbers)} of {len(pending)}: {point.point.label}")
                catch_signals(job.stop)
                _solve(sweep, point, workers, windows, tasks, seconds / len(series))
                StoreCleaner(job.run_dir, workers.always, workers.dropping).retain_staged(())


def expect_phases(sweep: SweepContext, pending: Sequence[SweptPoint], healed: Sequence[SweptPoint]) -> None:
    """Set the phases ahead, for the estimate of the remaining time: `pipeline.sweeping.sweep_plan.sweep_eta`."""
    device = (sweep.job.ledger.get(HARDWARE) or {})["device"]
    sweep.job.observer.expect(sweep_eta(pending, healed, sweep.job, known_rates(device)))


def _take_statistics(job: JobContext, pending: list[SweptPoint], workers: JobWorkers) -> None:
    """Pass over the text, with the union of the points' moments and scores."""
    methods = {point.first + place for point in pending for place in range(len(point.inputs.methods))}
    tasks = tuple(task for task in job.inputs.tasks if task.method in methods)
    scores = frozenset(score for point in pending for score in point.inputs.scores)
    shared = replace(driver_job(job.inputs), tasks=tasks, scores=scores, measures=(), predicts=())
    workers.prepare(job, shared)


def score_dense(job: JobContext, workers: JobWorkers) -> Windows | None:
    """Store the windows of the evaluation text for the workers, and score the dense model on them once.

    Raises InputError if its loss shows that something was read wrongly.
    """
    if job.evaluation is None:
        return None
    num_windows, length = job.evaluation.ids.shape
    tokens = _stored_windows(job, job.evaluation.ids.to(torch.int32))
    workers.always.append(tokens)
    batch, prefix = max(1, NUMBERS_PER_BATCH // length), len(job.evaluation.prefix)
    windows = Windows.even(num_windows, SHARDS, "float32", batch, tokens, prefix, models=2)
    (key,) = dense_score_key(job)
    if (entered := job.ledger.get(key)) is None:
        scorer = workers.scorer(job)
        scored = scorer.score(windows, DENSE, [None] * job.inputs.geometry.num_layers)
        figures = perplexity_figures(scored, job.evaluation)
        entered = score_entry(job, "dense", key.rpartition("/")[2], figures)
        job.ledger.commit(key, entered)
        scorer.forget(DENSE)
    if entered.loss is not None:
        check_loss(job, entered.loss, "the evaluation text")
    return windows


def _stored_windows(job: JobContext, ids: Tensor) -> ArrayRecord:
    """Return the record of stored token ids. They are written again if they are damaged or of another text."""
    store, entry = job.run_dir.activations, job.ledger.get(EVALUATION)
    try:
        if entry and torch.equal(store.open(entry.tokens).read(0, entry.tokens.shape[0]), ids):
            return entry.tokens
    except CorruptError as error:
        job.observer.repaired(str(error), [EVALUATION])
    entry = TokensEntry(tokens=store.write_tokens(ids))
    job.ledger.commit(EVALUATION, entry)
    return entry.tokens


def _stage(sweep: SweepContext, series: Sequence[SweptPoint], workers: JobWorkers) -> float:
    """Solve the layers of a series jointly. Return the seconds that this took."""
    started = time.monotonic()
    for point in series:
        job = sweep.of(point)
        check_entries(job.ledger, driver_job(job.inputs), job.inputs.config, job.inputs.source.tensors)
    if len(series) > 1:
        stage_together(sweep, series, workers_of(series[0], workers))
    return time.monotonic() - started


def workers_of(point: SweptPoint, workers: JobWorkers) -> JobWorkers:
    """Return the workers of a point. Its hidden states are not committed: after a kill it is scored again."""
    pool, every = PointPool(workers.pool, point.first), point.inputs.geometry.num_layers + 1
    return JobWorkers(pool, workers.always, every, workers.dropping)


def _solve(
    sweep: SweepContext,
    point: SweptPoint,
    workers: JobWorkers,
    windows: Windows | None,
    tasks: PointTasks,
    shared_s: float,
) -> None:
    """Solve, score and commit a point. `shared_s`: its part of the seconds of joint solves."""
    job, started = sweep.of(point), time.monotonic()
    own = workers_of(point, workers)
    scored, on_tasks = _compress_and_score(job, own, windows, tasks, compared=point.point.save)
    counts = committed_sizes(job.inputs, job.ledger)
    compression = assemble_output(job) if point.point.save else None
    catch_signals(job.stop)
    entry = PointEntry(
        text=sweep.text,
        counts=counts,
        loss=scored.loss / scored.tokens if scored else None,
        held_out=job.ledger.get(HELD_OUT_SCORE),
        predicted=predicted_at_ranks(job),
        seconds=shared_s + time.monotonic() - started,
        output=job.output if compression else None,
        seal=compression[SEAL] if compression else None,
        tasks=on_tasks,
    )
    job.ledger.commit(RESULT, entry)
    forget_work(job, kept=HEALED_FROM if sweep.heals(point) else ())
    job.observer.say(_result_line(point.point.label, entry))


def forget_work(job: JobContext, kept: Sequence[str] = ()) -> None:
    """Retract the entries of a point that only its result needs, except some kinds."""
    for key in (key for kind in TEMPORARY if kind not in kept for key in job.ledger.keys(kind)):
        job.ledger.retract(key)


def _compress_and_score(
    job: JobContext, workers: JobWorkers, windows: Windows | None, tasks: PointTasks, *, compared: bool
) -> tuple[Scored | None, Scores | None]:
    """Compress a point, and score it on the evaluation text and on tasks. A staged layer that is damaged meanwhile is
    solved again, once."""
    for attempt in range(2):
        compress_and_score(job, workers, compared=compared)
        staged = [staged_layer(job.ledger, layer) for layer in range(job.inputs.geometry.num_layers)]
        try:
            scored = workers.scorer(job).score(windows, COMPRESSED, staged) if windows else None
            return scored, tasks.score(job, workers, staged)
        except CorruptError as error:
            if attempt:
                raise
            job.observer.repaired(str(error), [])
    raise AssertionError("the second attempt returns or raises")


def _result_line(label: str, entry: PointEntry) -> str:
    """Return a line for the log with the size, the losses and the seconds of a point."""
    sizes = entry.counts["bytes"]
    parts = [f"{sizes['compressed'] / sizes['dense']:.2%} of the bytes", *said_scores(entry)]
    return f"{label}: {', '.join(parts)} ({entry.seconds:.1f} s)"


def said_scores(entry: PointEntry | HealedPoint) -> list[str]:
    """Return the loss and the divergence for a line of the log, if they were measured."""
    parts = [] if entry.loss is None else [f"loss {entry.loss:.4f}"]
    return [*parts, f"divergence {entry.held_out.divergence:.3g}"] if entry.held_out else parts
