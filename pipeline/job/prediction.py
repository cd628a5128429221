"""The loss that curves predict at a size, and its calibration by measured losses.

docs/methods.md#calibrated-losses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from manifests.errors import InputError
from pipeline.driver.job_spec import scores_from_ledger
from pipeline.driver.ledger_keys import HELD_OUT_SCORE, LOSS_RATIOS, RANKS, TRIES, try_key
from pipeline.job.context import JobContext, driver_job
from pipeline.ranks.calibration import CalibratedLoss
from pipeline.ranks.curves import predicted_loss
from pipeline.ranks.search import WHOLE

SHOWN = (900, 800, 700, 600, 500)  # thousandths of `keep`
ENOUGH = 3  # measured sizes, from which the losses of other sizes follow


def predicted_by_size(job: JobContext) -> Callable[[int], float | None]:
    """Return a function:

    size in thousandths of `keep` -> predicted loss in nats per token; None below the least size.
    """
    scores = scores_from_ledger(driver_job(job.inputs), job.ledger.get, {}, job.ledger.get(LOSS_RATIOS))

    @cache
    def predicted(size: int) -> float | None:
        """Return the predicted loss at a size."""
        try:
            ranks = driver_job(job.inputs.at_size(size)).allocate(scores)
        except InputError:
            return None
        return predicted_loss(scores.curves or {}, ranks)

    return predicted


def predicted_by_task(job: JobContext) -> dict[str, float]:
    """Return task key -> the loss that its curve predicts at the chosen ranks, in nats per token."""
    scores, ranks = scores_from_ledger(driver_job(job.inputs), job.ledger.get, {}, None), job.ledger.get(RANKS)
    assert ranks is not None
    return {key: predicted_loss({key: curve}, ranks.ranks) for key, curve in (scores.curves or {}).items()}


def predicted_at_ranks(job: JobContext) -> float | None:
    """Return the predicted loss at the chosen ranks, in nats per token; None unless every task has a curve."""
    spec, calibration, ranks = driver_job(job.inputs), job.manifest.calibration, job.ledger.get(RANKS)
    if ranks is None or calibration is None or calibration.gradient.kind == "local":
        return None
    if not spec.tasks or {task.key for task in spec.predicts} != {task.key for task in spec.tasks}:
        return None
    scores = scores_from_ledger(spec, job.ledger.get, {}, job.ledger.get(LOSS_RATIOS))
    return predicted_loss(scores.curves or {}, ranks.ranks)


def tries_of(job: JobContext) -> list[dict[str, Any]]:
    """Return the scores of all sizes that were tried, by ascending size: `keep`, `divergence`, `predicted`."""
    sizes = sorted(int(key.removeprefix(TRIES)) for key in job.ledger.keys(TRIES))
    return [{"keep": size / WHOLE, **entry.as_json()} for size in sizes if (entry := job.ledger.get(try_key(size)))]


def prediction_of(job: JobContext) -> dict[str, Any] | None:
    """Return `predicted` and `measured` loss of the job's size, in nats per token; None if no loss is predicted.

    With three measured sizes also `sizes`: for each `keep` from 0.9 to 0.5 the `predicted` loss and, by calibration,
    the `expected` one.
    """
    predicted, held_out = predicted_at_ranks(job), job.ledger.get(HELD_OUT_SCORE)
    if predicted is None or held_out is None:
        return None
    figures: dict[str, Any] = {"predicted": predicted, "measured": held_out.divergence}
    measured = {entry["predicted"]: entry["divergence"] for entry in tries_of(job)} | {predicted: held_out.divergence}
    if len(measured) < ENOUGH:
        return figures
    of_size, expected = predicted_by_size(job), CalibratedLoss(measured.items())
    sizes = [(size / WHOLE, loss) for size in SHOWN if (loss := of_size(size)) is not None]
    figures["sizes"] = [{"keep": keep, "predicted": loss, "expected": expected(loss)} for keep, loss in sizes]
    return figures
