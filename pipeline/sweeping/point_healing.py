"""Heals the saved points of a sweep, when all points are solved, and scores them again.

Order of durability: the result of the solved point is entered first; its layers stay staged. Its OUTPUT is assembled
from the healed layers, then its result is entered with their scores, then the solved layers are dropped. The healed
ones stay staged: another evaluation text scores them again without training.
"""

from __future__ import annotations

from functools import partial

from manifests.entries import HealedPoint, HeldOutScoreEntry
from pipeline.checkpoint.compression_record import SEAL
from pipeline.console.signals import catch_signals
from pipeline.driver.job_spec import staged_layer
from pipeline.driver.ledger_keys import HEALED, HELD_OUT_SCORE, RESULT
from pipeline.evaluation.task_scores import Scores
from pipeline.job.context import JobContext
from pipeline.job.healing import healed_job, train_layers
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.held_out import score_held_out
from pipeline.job.stages import assemble_output
from pipeline.job.store_cleaner import StoreCleaner
from pipeline.job.worker_session import JobWorkers, job_workers
from pipeline.sweeping.point_solving import (
    COMPRESSED,
    expect_phases,
    forget_work,
    said_scores,
    score_dense,
    workers_of,
)
from pipeline.sweeping.point_tasks import PointTasks
from pipeline.sweeping.points import SweptPoint
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.units.scores import Windows


def heal_points(sweep: SweepContext, heartbeat: Heartbeat) -> None:
    """Train the solved layers of each saved point that is not healed yet, one point after another, then score and
    assemble all of them.

    Raises:
        Interrupted: a signal came; the training of a point continues from its last checkpoint.
        NumericsError: gradients of a point are not finite; its OUTPUT is that of the solve.
    """
    job, due = sweep.job, sweep.healings_due()
    if not due:
        return
    job.observer.stage("start")
    expect_phases(sweep, (), due)
    pool = partial(job_workers, job, heartbeat)
    for number, point in enumerate(due, start=1):  # no worker waits beside the processes that train
        job.observer.say(f"heal {number} of {len(due)}: {point.point.label}")
        catch_signals(job.stop)
        train_layers(sweep.of(point), pool)
    job.observer.stage("start")
    with pool() as workers:
        windows, tasks = score_dense(job, workers), PointTasks(job)
        for point in due:
            catch_signals(job.stop)
            _enter(sweep, point, workers, windows, tasks)
            StoreCleaner(job.run_dir, workers.always, workers.dropping).retain_staged(())


def _enter(
    sweep: SweepContext, point: SweptPoint, workers: JobWorkers, windows: Windows | None, tasks: PointTasks
) -> None:
    """Score and assemble a point with its healed layers, or with the solved ones if none were better. Enter it."""
    solved = sweep.of(point)
    entry, healed = solved.ledger.get(RESULT), solved.ledger.get(HEALED)
    assert entry is not None
    assert healed is not None
    assert sweep.healing is not None
    record = HealedPoint(asked=sweep.healing, figures=healed.figures)
    job = solved
    if healed.layers:
        job = healed_job(solved, healed)
        loss, held_out, on_tasks = _scores(job, workers_of(point, workers), windows, tasks)
        record = record.model_copy(update={"loss": loss, "held_out": held_out, "tasks": on_tasks})
    compression = assemble_output(job)
    catch_signals(job.stop)
    entry = entry.model_copy(update={"healed": record, "output": job.output, "seal": compression[SEAL]})
    solved.ledger.commit(RESULT, entry)
    forget_work(solved)
    job.observer.say(_line(point.point.label, record))


def _scores(
    job: JobContext, workers: JobWorkers, windows: Windows | None, tasks: PointTasks
) -> tuple[float | None, HeldOutScoreEntry | None, Scores | None]:
    """Return the loss of the healed layers on the evaluation text, and their scores on held-out text and on tasks."""
    workers.compare(job)
    score_held_out(job, workers)
    staged = [staged_layer(job.ledger, layer) for layer in range(job.inputs.geometry.num_layers)]
    scored = workers.scorer(job).score(windows, COMPRESSED, staged) if windows else None
    loss = scored.loss / scored.tokens if scored else None
    return loss, job.ledger.get(HELD_OUT_SCORE), tasks.score(job, workers, staged)


def _line(label: str, record: HealedPoint) -> str:
    """Return a line for the log with the losses of a healed point."""
    if not record.figures["best_step"]:
        return f"{label}: no step was better than the solved layers, which stay"
    parts = [f"best after step {record.figures['best_step']}", *said_scores(record)]
    return f"{label}, healed: {', '.join(parts)}"
