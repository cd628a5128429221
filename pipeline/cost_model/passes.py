"""The passes of a job through its layers, as the cost model counts them."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.schema import Manifest
from pipeline.cost_model.phases import PlannedPasses
from pipeline.driver.job_spec import passes_of, solves_in_pass
from pipeline.families.geometry import Geometry
from pipeline.methods.method import Task
from pipeline.methods.registry import build_methods, predict_tasks
from pipeline.units.sharding import held_out_windows


def planned_passes(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> PlannedPasses:
    """Return the passes of a job."""
    calibration, methods = manifest.calibration, build_methods(manifest)
    passes = passes_of(manifest, methods, tasks, geometry.hidden)
    shards = passes.shards if calibration else geometry.num_layers
    samples, length = (calibration.samples, calibration.sequence_length) if calibration else (1, 1)
    compressed = passes.propagate == "compressed"
    waits = bool(passes.scores or predict_tasks(methods, geometry))
    return PlannedPasses(
        geometry.num_layers,
        shards,
        min(manifest.workers.max, shards),
        len(passes.importance_shards) if compressed and "importance" in passes.scores else 0,
        compressed,
        offload=True,
        every=manifest.resume.every if isinstance(manifest.resume.every, int) else 0,
        gradient_shards=max(1, len(passes.gradient_shards)),
        held_out_shards=max(1, min(shards, held_out_windows(samples, samples, length))),
        in_pass=solves_in_pass(passes.propagate, tasks, ranks_wait=waits),
        keep_statistics=passes.keep_statistics,
        joined=calibration is not None and geometry.streams(manifest.workers.experts),
    )


def gradient_tokens(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> int:
    """Return the number of tokens in the backward pass; 0 without gradients."""
    length = manifest.calibration.sequence_length if manifest.calibration else 0
    return passes_of(manifest, (), tasks, geometry.hidden).gradient_samples * length
