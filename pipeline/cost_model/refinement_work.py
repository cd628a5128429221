"""The work and memory of training solved layers, from the geometry and the manifest. docs/methods.md#refinement."""

from __future__ import annotations

from dataclasses import dataclass

from manifests.method_entry import Refine
from manifests.schema import Manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.rates import BACK
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.descent import descent_flops
from pipeline.kernels.refinement import CHECKS, held_out_samples, step_samples, training_steps

MEASURED = CHECKS + 3  # passes that measure errors: at each check and at the start; two on training samples
SCALED = 1  # one more pass of held-out samples, which scales the two errors
TRAINED_BYTES = 30  # per number: itself, its gradient, its momentum, four copies, and one in half precision
METRIC_BYTES = 16  # per entry of the moment of the gradient: as it is read, and as it weighs errors
VALUE_BYTES = 4  # per value that the backward pass needs
SCORES = 3  # copies of the attention scores that the backward pass needs


@dataclass(frozen=True)
class RefineWork:
    """The training of a layer on one worker.

    Attributes:
        independent: each worker trains a layer.
        steps: the number of training steps.
        flops: operations of the steps' passes, and of the passes that measure errors.
        descent: float32 operations of the steps, without their passes.
        read_bytes: size of the stored inputs and targets.
        passing_flops: operations of the passes of all shards that store these and compute the next layer's inputs:
            through the dense layer and, unless layers are trained on dense inputs alone, through the trained or solved
            one.
    """

    independent: bool = False
    steps: int = 0
    flops: float = 0.0
    descent: float = 0.0
    read_bytes: float = 0.0
    passing_flops: float = 0.0


UNREFINED = RefineWork()


def settings_of(manifest: Manifest) -> Refine | None:
    """Return the settings of `refine`, which are the same in all entries, or None."""
    return next((entry.refine for entry in manifest.methods if entry.refine is not None), None)


def refine_work(
    job: PlannedJob, forward: float, packed: float, descent: float = 0.0, weighting: float = 0.0
) -> RefineWork:
    """Return the work of a layer.

    `forward`, `packed`: operations per token of the dense and the compressed layer. `descent`: `layer_descent_flops`.
    `weighting`: operations per token that weigh an error by the moment of the gradient, or 0.
    """
    settings, calibration, sequence = settings_of(job.manifest), job.manifest.calibration, job.sequence
    if settings is None or calibration is None:
        return UNREFINED
    steps = training_steps(settings.steps, sequence)
    measured = (MEASURED + SCALED * (weighting > 0)) * held_out_samples(calibration.samples, sequence)
    independent, dense = settings.inputs != "compressed", settings.inputs == "dense"
    return RefineWork(
        independent=independent,
        steps=steps,
        flops=float((BACK * steps * step_samples(sequence) + measured) * sequence * (packed + weighting)),
        descent=float(steps * descent),
        read_bytes=2.0 * job.hidden_bytes,
        passing_flops=float(job.tokens * (forward if dense else forward + packed)),
    )


def layer_descent_flops(layer: LayerGeometry, keep: float) -> float:
    """Return the operations of a step without its passes, if each matrix is two factors with `keep` of its numbers."""
    total = 0.0
    for role in layer.matrices:
        rows, columns = layer.role_shapes(role)["weight"]
        rank = max(1, round(keep * rows * columns / (rows + columns)))
        total += descent_flops(rows, rank) + descent_flops(rank, columns)
    return total


def backward_numbers(layer: LayerGeometry, channels: float) -> float:
    """Count the values of a token that a layer's backward pass needs beside attention scores. `channels`: of MLPs."""
    return 12 * layer.hidden + 6 * layer.query_features + 5 * channels


def refine_bytes(manifest: Manifest, layer: LayerGeometry) -> int:
    """Return the memory to train a layer of this geometry; 0 without training."""
    if settings_of(manifest) is None or manifest.calibration is None:
        return 0
    sequence = manifest.calibration.sequence_length
    samples = step_samples(sequence)
    values = round(backward_numbers(layer, sum(mlp.width for mlp in layer.mlps)))
    scores = SCORES * samples * layer.query_heads * sequence**2
    metric = METRIC_BYTES * layer.hidden**2
    return TRAINED_BYTES * layer.numbers() + metric + VALUE_BYTES * (samples * sequence * values + scores)
