"""The size of a job: the manifest's share, or the smallest share with a loss below `budget.max_loss`, to within 0.005.

Curves propose a size, held-out text decides. Each try is solved from the statistics of one dense pass, and entered.
With `evaluation.calibrate_prediction` a job of a given size first tries two others. With `budget.measure_layers` it is
compressed twice, the second time to ranks that follow measured losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from manifests.entries import BlockEntry, HeldOutScoreEntry, LossRatiosEntry, TriedSizeEntry, TryEntry
from manifests.errors import CorruptError, InputError
from pipeline.driver.ledger_dependencies import retract_changed
from pipeline.driver.ledger_keys import HELD_OUT_SCORE, LOSS_RATIOS, TRIED_SIZE, block_key, block_name, try_key
from pipeline.inputs.job_inputs import MEASURE_LAYERS
from pipeline.job.context import JobContext
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.held_out import divergence_with, drop_inputs, forget_other_text, score_held_out, scoring_held_out
from pipeline.job.output_scores import check_task_documents, score_dense_first
from pipeline.job.prediction import predicted_by_size, predicted_by_task, tries_of
from pipeline.job.text_amount import choose_samples
from pipeline.job.texts import check_texts
from pipeline.job.worker_session import Effort, JobWorkers, job_workers
from pipeline.methods.method import Task
from pipeline.ranks.calibration import loss_ratios, other_sizes, runs_of_layers
from pipeline.ranks.search import WHOLE, least_size, next_size


def compress_to_budget(job: JobContext, heartbeat: Heartbeat) -> tuple[JobContext, Effort]:
    """Compress every claimed layer to the job's size, and score them on held-out text. Return the job with that
    size.

    Raises InputError when the documents of a task cannot be loaded, when no size stays below `budget.max_loss`, naming
    the least loss, or when the dense model's loss shows that something was read wrongly.
    """
    check_task_documents(job)
    score_dense_first(job)
    job = choose_samples(job, heartbeat)
    forget_other_text(job)
    with job_workers(job, heartbeat) as workers:
        check_texts(job, workers)
        if job.inputs.max_loss is not None:
            return _compress_within(job, job.inputs.max_loss, workers), workers.effort
        if job.manifest.measures_layers:  # before other sizes, whose predictions these measurements correct
            _measure_layers(job, workers)
        if job.manifest.evaluation.calibrate_prediction:
            _measure_other_sizes(job, workers)
        _forget_tried_size(job)
        compress_and_score(job, workers)
        return job, workers.effort


def compress_and_score(job: JobContext, workers: JobWorkers, *, compared: bool = True) -> HeldOutScoreEntry | None:
    """Compress the layers and score them on held-out text.

    A staged layer that is damaged in between is compressed again, once; then CorruptError is raised. `compared`: as in
    `JobWorkers.compress`.
    """
    scored = workers.compress(job, compared=compared, scoring=partial(scoring_held_out, workers))
    try:
        return score_held_out(job, workers, scored)
    except CorruptError as error:
        job.observer.repaired(str(error), [])
        workers.compress(job, compared=compared)
        return score_held_out(job, workers)


def _compress_within(job: JobContext, limit: float, workers: JobWorkers) -> JobContext:
    """Compress the layers to the smallest size whose loss is within the limit. Return the job with that size."""
    workers.prepare(job)
    predicted = predicted_by_size(job)
    least = least_size(lambda size: predicted(size) is not None)
    while True:
        tries = {round(entry["keep"] * WHOLE): entry["divergence"] for entry in tries_of(job)}
        size = next_size(limit, tries, least, lambda size: predicted(size) or 0.0)
        if tries.get(size, 0.0) > limit:
            raise InputError(
                f"budget.max_loss: {limit:g} is out of reach; the least, measured at keep 1, is {tries[size]:.3g}"
            )
        earlier = job.ledger.get(try_key(size))
        if earlier is not None:
            _aim(job, size)
            sized = replace(job, inputs=job.inputs.at_size(size))
            workers.compress(sized)
            job.ledger.commit(HELD_OUT_SCORE, earlier)
            return sized
        _try(job, size, predicted(size) or 0.0, workers, f", limit {limit:g}")


def _measure_other_sizes(job: JobContext, workers: JobWorkers) -> None:
    """Compress the layers to two other sizes and enter their losses, which calibrate the predicted ones."""
    assert job.manifest.budget is not None
    own_size = job.manifest.budget.share * WHOLE
    missing = [size for size in other_sizes(own_size) if job.ledger.get(try_key(size)) is None]
    if not missing:
        return
    workers.prepare(job)
    predicted = predicted_by_size(job)
    for size in missing:
        if (loss := predicted(size)) is not None:
            _try(job, size, loss, workers)


def _measure_layers(job: JobContext, workers: JobWorkers) -> None:
    """Compress the layers, measure the loss of some at a time, and enter by how much it differs from the predicted one.
    Then retract the layers: their ranks are chosen again."""
    if job.ledger.get(LOSS_RATIOS) is not None:
        return
    _forget_tried_size(job)
    job.observer.say(f"{MEASURE_LAYERS}: first the layers are compressed to ranks that follow predicted losses")
    compress_and_score(replace(job, inputs=job.inputs.of_layers_alone()), workers, compared=False)
    predicted, ratios = predicted_by_task(job), dict[str, float]()
    for block in runs_of_layers(job.inputs.claimed_layers):
        tasks = [task for task in job.inputs.tasks if task.layer in block]
        losses = {task.key: predicted[task.key] for task in tasks}
        measured = _measured_block(job, workers, block, math.fsum(losses.values()))
        ratios |= loss_ratios(measured, losses, _mlps(job, tasks))
    retract_changed(job.ledger, job.ledger.keys(), [LOSS_RATIOS])
    job.ledger.commit(LOSS_RATIOS, LossRatiosEntry(ratios=ratios))
    drop_inputs(job, workers)
    job.observer.say(f"{MEASURE_LAYERS}: now they are compressed to ranks that follow the measured ones")


def _measured_block(job: JobContext, workers: JobWorkers, block: Sequence[int], predicted: float) -> float:
    """Return the divergence of the model in which these layers alone are compressed, entered once."""
    key = block_key(block[0])
    entered = job.ledger.get(key)
    if entered is None:
        measured = divergence_with(job, workers, block, block_name(block[0]))
        entered = BlockEntry(stop=block[-1] + 1, measured=measured, predicted=predicted)
        job.ledger.commit(key, entered)
        job.observer.say(
            f"layers {block[0]} to {block[-1]}: divergence {measured:.3g} nats per token, predicted {predicted:.3g}"
        )
    return entered.measured


def _mlps(job: JobContext, tasks: Iterable[Task]) -> set[str]:
    """Return the keys of the tasks that compress MLPs or experts."""
    layers = job.inputs.geometry.layers
    roles = {layer.index: {role for block in layer.mlps for role in block.roles} for layer in layers}
    return {task.key for task in tasks if roles[task.layer].intersection(task.roles)}


def _try(job: JobContext, size: int, predicted: float, workers: JobWorkers, limit: str = "") -> None:
    """Compress the layers to a size, and enter its measured and its predicted loss."""
    _aim(job, size)
    score = compress_and_score(replace(job, inputs=job.inputs.at_size(size)), workers, compared=False)
    assert score is not None
    job.ledger.commit(try_key(size), TryEntry(**dict(score), predicted=predicted))
    job.observer.say(
        f"keep {size / WHOLE:g}: divergence {score.divergence:.3g} nats per token, predicted {predicted:.3g}{limit}"
    )


def _forget_tried_size(job: JobContext) -> None:
    """Retract the work at another size, if there is any."""
    if job.ledger.get(TRIED_SIZE) is not None:
        retract_changed(job.ledger, job.ledger.keys(), [TRIED_SIZE])


def _aim(job: JobContext, size: int) -> None:
    """Enter the size to compress to. First retract the work at another size, so that the two are not confused."""
    tried = job.ledger.get(TRIED_SIZE)
    if tried is None or tried.size != size:
        retract_changed(job.ledger, job.ledger.keys(), [TRIED_SIZE])
        job.ledger.commit(TRIED_SIZE, TriedSizeEntry(size=size))
