"""How a job goes through its layers, and how many of its tokens: from the manifest, the geometry and the tasks."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.schema import Manifest
from pipeline.families.family import Geometry
from pipeline.methods.method import Task
from pipeline.methods.registry import build_methods, layer_gradients, layers_of
from pipeline.plan.phases import Pass
from pipeline.samples import gradient_samples, held_out_windows, importance_shards


def pass_of(manifest: Manifest, layers: int, gradient_tokens: int = 0) -> Pass:
    """The passes of a job; `gradient_tokens`: of the samples of its backward pass."""
    calibration = manifest.calibration
    compressed = calibration is not None and calibration.propagate == "compressed"
    shards = calibration.shards if calibration else layers
    samples, length = (calibration.samples, calibration.sequence_length) if calibration else (1, 1)
    importance = any("importance" in method.scores for method in build_methods(manifest))
    return Pass(
        layers,
        shards,
        min(manifest.workers.max, shards),
        len(importance_shards(shards, samples, length)) if importance and compressed else 0,
        compressed,
        offload=True,
        every=manifest.resume.every if isinstance(manifest.resume.every, int) else 0,
        gradient_shards=max(1, min(shards, gradient_tokens // length)),
        held_out_shards=max(1, min(shards, held_out_windows(samples, samples, length))),
    )


def gradient_tokens(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> int:
    """Of the calibration samples that go back through the model; 0 where none do."""
    calibration = manifest.calibration
    if calibration is None or not any(layer_gradients(tasks, layer) for layer in layers_of(tasks)):
        return 0
    asked, length = calibration.gradient.samples, calibration.sequence_length
    return gradient_samples(asked, calibration.samples, length, geometry.hidden) * length
