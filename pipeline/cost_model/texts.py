"""The cost of scoring the dense model on the calibration samples and on the evaluation text, before a job's passes.

docs/plan.md#seconds-by-phase.
"""

from __future__ import annotations

from manifests.schema import Manifest
from pipeline.cost_model.phases import Pass
from pipeline.cost_model.rates import Rates
from pipeline.cost_model.work import LayerWork, scoring_flops
from pipeline.families.family import Geometry
from pipeline.units.scores import scorers
from pipeline.units.sharding import text_windows


def texts_seconds(
    manifest: Manifest, geometry: Geometry, evaluation: int, work: LayerWork, rates: Rates, walk: Pass
) -> float:
    """Return the seconds of both texts, or of the samples alone. `evaluation`: tokens of the evaluation text, or 0.

    Half of the workers score one model. Each of them builds every layer. Zero for a job that takes no moments.
    """
    calibration = manifest.calibration
    if calibration is None or not (work.moment_flops or walk.importance):
        return 0.0
    length = min(calibration.sequence_length, evaluation or calibration.sequence_length)
    windows = text_windows(calibration.samples, length) + text_windows(evaluation // length, length)
    flops = windows * length * scoring_flops(geometry, length)
    computing = flops / rates.single / scorers(2 * walk.shards, walk.workers)
    building = walk.layers * work.built_bytes / rates.memory
    reading = 0.0 if walk.cached else walk.layers * work.weight_bytes / rates.disk
    return max(reading, computing + building)
