"""The number of calibration samples for `samples: auto`: chosen once, and entered in the ledger.

docs/methods.md#the-amount-of-text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manifests.calibration import PARTS
from manifests.entries import SamplesEntry
from manifests.loading import dump_manifest
from manifests.schema import Manifest
from pipeline.cost_model.phases import phase_seconds
from pipeline.cost_model.prices import prices_of
from pipeline.cost_model.rates import Rates, known_rates
from pipeline.driver.ledger_keys import HARDWARE, SAMPLES
from pipeline.driver.scheduler import Scheduler, batch
from pipeline.families.blocks import ONLY_BLOCKS, MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.job.context import JobContext, with_entered_samples, with_samples
from pipeline.job.heartbeat import Heartbeat
from pipeline.job.worker_session import job_workers
from pipeline.reporting.summary import samples_line
from pipeline.units.text_amount import MeasureText
from stores.run_directory import MANIFEST

ENOUGH = 0.01  # fewer samples may raise the held-out error by this share of the error of all samples


def choose_samples(job: JobContext, heartbeat: Heartbeat) -> JobContext:
    """Return the job with its number of samples. For `samples: auto` a worker measures it, once.

    Raises:
        Interrupted: a signal came.
        NumericsError: NaN or infinity in the first layer.
    """
    calibration = job.manifest.calibration
    if calibration is None or not calibration.chooses_samples or job.tokens is None:
        return job
    if job.ledger.get(SAMPLES) is None:
        most, layer = calibration.samples, job.inputs.geometry.layers[0]
        point = widest_point(layer)
        with job_workers(job, heartbeat) as workers:
            job.observer.phase("amount of text", 1, 1)
            (errors,) = Scheduler(workers.pool, job.observer).run(batch([MeasureText(point, most)]))
        counts = parts_of(most)
        samples = enough(counts, errors)
        if calibration.max_minutes is not None:
            rates = known_rates((job.ledger.get(HARDWARE) or {})["device"])
            samples = _within(job, counts, samples, 60 * calibration.max_minutes, rates)
        job.ledger.commit(SAMPLES, SamplesEntry(samples=samples, counts=counts, errors=errors))
        job = with_entered_samples(job)
        job.run_dir.storage.replace(MANIFEST, dump_manifest(job.manifest).encode())
    entered = job.ledger.get(SAMPLES)
    assert entered is not None
    job.observer.say(samples_line(entered.as_json()))
    return job


def widest_point(layer: LayerGeometry) -> str:
    """Return the widest point that all tokens pass and that a matrix reads; value heads and shared experts aside."""
    points = [block.writer.reads for block in layer.mlps if block.name in ONLY_BLOCKS]
    points += [block.passing for block in layer.mlps]
    points += [block.input for block in layer.matrix_blocks if not isinstance(block, MLPBlock)]
    return max((point for point in points if point in layer.points), key=layer.features)


def parts_of(most: int) -> tuple[int, ...]:
    """Return a quarter, half and all of the samples."""
    return (most // PARTS, 2 * most // PARTS, most)


def enough(counts: Sequence[int], errors: Sequence[float]) -> int:
    """Return the fewest samples whose held-out error is within 1 % of that of all."""
    limit = (1 + ENOUGH) * errors[-1]
    return next(count for count, error in zip(counts, errors, strict=True) if error <= limit)


def planned_seconds(job: JobContext, manifest: Manifest, rates: Rates) -> float:
    """Return the planned seconds of the job with another manifest, without its evaluation."""
    planned = replace(job.inputs.planned, manifest=manifest)
    prices = prices_of(planned, rates, job.plan.kept)
    return sum(phase_seconds(prices).values())


def _within(job: JobContext, counts: Sequence[int], chosen: int, limit_s: float, rates: Rates) -> int:
    """Return the largest count up to the chosen one that is planned within the limit, or the least count."""
    fitting = [
        count
        for count in counts
        if count <= chosen and planned_seconds(job, with_samples(job.manifest, count), rates) <= limit_s
    ]
    return max(fitting, default=counts[0])
