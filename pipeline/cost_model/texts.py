"""The cost of a job's work on its texts: choosing their amount, scoring the dense model before the passes, evaluation.

docs/plan.md#seconds-by-phase.
"""

from __future__ import annotations

from collections.abc import Sequence

from manifests.calibration import Calibration
from manifests.schema import Manifest
from pipeline.cost_model.phases import evaluate_seconds, phase_seconds
from pipeline.cost_model.prices import WORKERS_SECONDS, Prices
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import forward_flops, scoring_flops
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.units.scores import scorers
from pipeline.units.sharding import text_windows


def job_seconds(manifest: Manifest, geometry: Geometry, prices: Prices, shape: Sequence[int] = ()) -> dict[str, float]:
    """Return `phase_seconds`, `texts` and, if there is an evaluation text, `evaluate`: to score one model on it.

    `shape`: of the evaluation text: its windows, and the tokens of each.
    """
    count, length = shape or (0, 0)
    seconds = phase_seconds(prices) | {"texts": texts_seconds(manifest, geometry, count * length, prices)}
    if shape:
        flops = count * length * scoring_flops(geometry, length)
        seconds["evaluate"] = evaluate_seconds(flops, prices.rates, prices.passes.workers)
    return seconds


def texts_seconds(manifest: Manifest, geometry: Geometry, evaluation: int, prices: Prices) -> float:
    """Return the seconds for the samples and, if any, the evaluation text of `evaluation` tokens, and for held-out text
    that passes the model with them.

    Half of the workers score one model. Each of them builds every layer. The result is 0 for a job without statistics.
    """
    calibration, work, rates, passes = manifest.calibration, prices.work, prices.rates, prices.passes
    if calibration is None or not (work.moment_flops or work.sample_bytes or work.pair_bytes or passes.importance):
        return 0.0
    length = min(calibration.sequence_length, evaluation or calibration.sequence_length)
    windows = text_windows(calibration.samples, length) + text_windows(evaluation // length, length)
    flops = windows * length * scoring_flops(geometry, length)
    flops += passes.layers * work.held_out_flops[0] if passes.joined else 0.0
    computing = flops / rates.single / scorers(2 * passes.shards, passes.workers)
    building = passes.layers * work.built_bytes / rates.memory
    reading = 0.0 if passes.cached else passes.layers * work.weight_bytes / rates.disk
    return max(reading, computing + building)


def amount_seconds(calibration: Calibration, layer: LayerGeometry, rates: Rates) -> float:
    """Return the seconds in which one worker chooses the amount of text for `samples: auto`.

    All samples pass the first layer, for a moment of its widest point. Three fits follow. Workers are restarted.
    """
    tokens, width = calibration.samples * calibration.sequence_length, max(map(layer.features, layer.points))
    passing = tokens * (forward_flops(layer, calibration.sequence_length) / rates.products + width**2 / rates.moments)
    half = width / 2
    fits = 3 * (half**3 / 3 / rates.factors + 6 * half**3 / rates.double)
    return WORKERS_SECONDS + passing + fits
