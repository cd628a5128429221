"""The size of a job: a given share, or the smallest one whose loss stays below `budget.max_loss`, to within 0.005.

Curves propose a size, held-out text decides. Each try is solved from the statistics of one dense pass, and entered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from manifests.entries import HeldOutScoreEntry, TargetEntry, TryEntry
from manifests.errors import CorruptError, InputError
from pipeline.driver.job_spec import entered_scores
from pipeline.driver.ledger_dependencies import retract_changed
from pipeline.driver.ledger_keys import HELD_OUT_SCORE, TARGET, TRIES, try_key
from pipeline.job.context import JobContext, driver_job
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.held_out import forget_other_text, score_held_out, scoring_held_out
from pipeline.job.texts import check_texts
from pipeline.job.worker_session import Effort, JobWorkers, job_workers
from pipeline.ranks.curves import predicted_loss
from pipeline.ranks.search import WHOLE, least_size, next_size


def compress_to_budget(job: JobContext, heartbeat: Heartbeat) -> tuple[JobContext, Effort]:
    """Compresses every claimed layer to the job's size, and scores them on held-out text. Returns the job with that
    size.

    Raises InputError when no size stays below `budget.max_loss`, naming the least loss.
    """
    forget_other_text(job)
    with job_workers(job, heartbeat) as workers:
        check_texts(job, workers)
        if job.inputs.max_loss is not None:
            return _compress_within(job, job.inputs.max_loss, workers), workers.effort
        compress_and_score(job, workers)
        return job, workers.effort


def tries_of(job: JobContext) -> list[dict[str, Any]]:
    """Returns the scores of all sizes that were tried, by ascending size: `keep`, `divergence`, `predicted`."""
    sizes = sorted(int(key.removeprefix(TRIES)) for key in job.ledger.keys(TRIES))
    return [{"keep": size / WHOLE, **entry.as_json()} for size in sizes if (entry := job.ledger.get(try_key(size)))]


def compress_and_score(job: JobContext, workers: JobWorkers, *, compared: bool = True) -> HeldOutScoreEntry | None:
    """Compresses the layers and scores them on held-out text. A staged layer that is damaged in between is made again,
    once."""
    scored = workers.compress(job, compared=compared, scoring=partial(scoring_held_out, workers))
    try:
        return score_held_out(job, workers, scored)
    except CorruptError as error:
        job.observer.repaired(str(error), [])
        workers.compress(job, compared=compared)
        return score_held_out(job, workers)


def _compress_within(job: JobContext, limit: float, workers: JobWorkers) -> JobContext:
    """Compresses the layers to the smallest size whose loss is within the limit. Returns the job with that size."""
    workers.prepare(job)
    predicted = _predictions(job)
    least = least_size(lambda size: predicted(size) is not None)
    while True:
        tries = {round(entry["keep"] * WHOLE): entry["divergence"] for entry in tries_of(job)}
        size = next_size(limit, tries, least, lambda size: predicted(size) or 0.0)
        if tries.get(size, 0.0) > limit:
            raise InputError(
                f"budget.max_loss: {limit:g} is out of reach; the least, measured at keep 1, is {tries[size]:.3g}"
            )
        _aim(job, size)
        sized = replace(job, inputs=job.inputs.at_size(size))
        earlier = job.ledger.get(try_key(size))
        if earlier is not None:
            workers.compress(sized)
            job.ledger.commit(HELD_OUT_SCORE, earlier)
            return sized
        score = compress_and_score(sized, workers, compared=False)
        assert score is not None
        entry = TryEntry(**dict(score), predicted=predicted(size) or 0.0)
        job.ledger.commit(try_key(size), entry)
        job.observer.say(
            f"keep {size / WHOLE:g}: divergence {score.divergence:.3g} nats per token, predicted "
            f"{entry.predicted:.3g}, limit {limit:g}"
        )


def _predictions(job: JobContext) -> Callable[[int], float | None]:
    """Returns a function: size -> predicted loss, nats per token; None where so little cannot be kept."""
    scores = entered_scores(driver_job(job.inputs), job.ledger.get, {})

    @cache
    def predicted(size: int) -> float | None:
        """Returns the predicted loss at a size."""
        try:
            ranks = driver_job(job.inputs.at_size(size)).allocate(scores)
        except InputError:
            return None
        return predicted_loss(scores.curves or {}, ranks)

    return predicted


def _aim(job: JobContext, size: int) -> None:
    """Enters the size to compress to. Undoes the work at another size first, so that it is not taken for this one's."""
    target = job.ledger.get(TARGET)
    if target is not None and target.size != size:
        retract_changed(job.ledger, job.ledger.keys(), [TARGET])
    if target is None or target.size != size:
        job.ledger.commit(TARGET, TargetEntry(size=size))
