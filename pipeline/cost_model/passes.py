"""How a job goes through its layers, and how many of its tokens: from the manifest, the geometry and the tasks."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.schema import Manifest
from pipeline.cost_model.phases import Pass
from pipeline.driver.job_spec import solves_in_pass
from pipeline.families.family import Geometry
from pipeline.methods.method import Task
from pipeline.methods.registry import build_methods, layer_gradients, layers_of, predict_tasks
from pipeline.units.sharding import gradient_samples, held_out_windows, importance_shards


def pass_of(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> Pass:
    """The passes of a job."""
    calibration, methods = manifest.calibration, build_methods(manifest)
    propagate = calibration.propagate if calibration else "dense"
    shards = calibration.shards if calibration else geometry.num_layers
    samples, length = (calibration.samples, calibration.sequence_length) if calibration else (1, 1)
    scores = frozenset(score for method in methods for score in method.scores)
    waits = bool(scores or predict_tasks(methods, geometry))
    alone = "importance" in scores and propagate == "compressed"
    keep = manifest.statistics.keep
    return Pass(
        geometry.num_layers,
        shards,
        min(manifest.workers.max, shards),
        len(importance_shards(shards, samples, length)) if alone else 0,
        propagate == "compressed",
        offload=True,
        every=manifest.resume.every if isinstance(manifest.resume.every, int) else 0,
        gradient_shards=max(1, min(shards, gradient_tokens(manifest, geometry, tasks) // length)),
        held_out_shards=max(1, min(shards, held_out_windows(samples, samples, length))),
        in_pass=solves_in_pass(propagate, tasks, waits=waits),
        kept=propagate == "dense" if keep is None else keep,
    )


def gradient_tokens(manifest: Manifest, geometry: Geometry, tasks: Sequence[Task]) -> int:
    """Of the calibration samples that go back through the model; 0 where none do."""
    calibration = manifest.calibration
    if calibration is None or not any(layer_gradients(tasks, layer) for layer in layers_of(tasks)):
        return 0
    asked, length = calibration.gradient.samples, calibration.sequence_length
    return gradient_samples(asked, calibration.samples, length, geometry.hidden) * length
