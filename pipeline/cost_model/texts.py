"""The cost of a job's work on its texts: choosing their amount, scoring the dense model before the passes, evaluation.

docs/plan.md#seconds-by-phase.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import WORKERS_SECONDS, Prices
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import forward_flops, scoring_flops
from pipeline.units.sharding import text_windows


def job_seconds(job: PlannedJob, prices: Prices, shape: Sequence[int] = ()) -> dict[str, float]:
    """Return `phase_seconds` with the work on texts, in the order of the job.

    `shape`: of the evaluation text: its windows, and the tokens of each. Of it, `evaluate` is to score one model.
    """
    count, length = shape or (0, 0)
    seconds, calibration = phase_seconds(prices), job.manifest.calibration
    phases = {name: seconds.pop(name) for name in ("digests", "start")}
    if calibration is not None and calibration.chooses_samples:
        phases["amount of text"] = amount_seconds(job, prices.rates)
    phases |= {"texts": texts_seconds(job, prices, count * length), **seconds}
    if shape:
        flops = count * length * scoring_flops(job.geometry, length)
        phases["evaluate"] = flops / prices.rates.single / prices.passes.workers
    return phases


def texts_seconds(job: PlannedJob, prices: Prices, evaluation: int = 0) -> float:
    """Return the seconds in which the dense model passes both texts: the samples, and `evaluation` tokens to evaluate.
    Held-out text may pass it with them.

    All workers score the one model, and each of them builds every layer. The pass is in the source's dtype, or in
    float32 if held-out text is there. The result is 0 for a job without statistics.
    """
    calibration, work, rates, passes = job.manifest.calibration, prices.work, prices.rates, prices.passes
    if calibration is None or not (work.moment_flops or work.sample_bytes or work.pair_bytes or passes.importance):
        return 0.0
    length = min(job.sequence, evaluation or job.sequence)
    windows = text_windows(calibration.samples, length) + text_windows(evaluation // length, length)
    flops = windows * length * scoring_flops(job.geometry, length)
    flops += passes.layers * work.held_out_flops[0] if passes.joined else 0.0
    rate = rates.single if passes.joined else rates.products
    computing = flops / rate / min(2 * passes.shards, passes.workers)
    building = passes.layers * work.built_bytes / rates.memory
    reading = 0.0 if passes.cached else passes.layers * work.weight_bytes / rates.disk
    return max(reading, computing + building)


def amount_seconds(job: PlannedJob, rates: Rates) -> float:
    """Return the seconds in which one worker chooses the amount of text for `samples: auto`.

    All samples pass the first layer, for a moment of its widest point. Three fits follow. Workers are restarted.
    """
    layer = job.geometry.layers[0]
    width = max(map(layer.features, layer.points))
    passing = job.tokens * (forward_flops(layer, job.sequence) / rates.products + width**2 / rates.moments)
    half = width / 2
    fits = 3 * (half**3 / 3 / rates.factors + 6 * half**3 / rates.double)
    return WORKERS_SECONDS + passing + fits
