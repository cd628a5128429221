"""The operations and bytes of a layer, from geometry and tasks. docs/plan.md.

Legend: D hidden, H heads, d head_dim, N intermediate, F width of a moment, T calibration tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manifests.quantize import OUTER_ROLES
from manifests.schema import Manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.refinement_work import UNREFINED, RefineWork, layer_descent_flops, refine_work
from pipeline.cost_model.rounding_work import SIZES_TRIED, rounding_work, trials
from pipeline.cost_model.solve_work import curve_work, solve_work, triangle_numbers
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.exact_sums import BAND
from pipeline.kernels.moments import ROWS_PER_PRODUCT
from pipeline.methods.base import Group
from pipeline.methods.method import Moment, Task
from pipeline.methods.moments import OUTPUT_GRADIENT
from pipeline.methods.registry import NO_TASKS
from pipeline.methods.work import REMOVED_SHARE, Work, moment_width, tried_tokens
from pipeline.units.sharding import GRID_TOKENS, held_out_windows, importance_shards

# Bytes of device memory that are moved per number:
ADDED_BYTES = 32  # of a moment's sum, per product: written, rounded, added to a float64 sum
PAIRED_BYTES = 40  # of a pair's Σ e xᵀ, per product: also the rounding error is subtracted
ERROR_BYTES = 48  # of e: computed, checked, scaled, squared in float64
SQUARED_BYTES = 40  # of the product in a gradient sample's norm: widened, squared, summed
DIAGONAL_BYTES = 40  # of a gradient whose squares alone are summed, with its sample's norm
COSINE_BYTES = 48  # of a hidden state: read, widened to float64, scaled, multiplied
BUILT_BYTES = 16  # of a layer built in float32: read, checked, widened
SCALED_PASSES = 3  # over each value in the checkpoint's dtype: one read for the check, a read and a write for scaling
RESIDUAL_BYTES = 4  # size of a number of a gradient or of the residual stream
BACK = 3  # the cost of a forward and a backward pass, in forward passes
WALKED = 8, 4  # passes of a correction through the attention and through the MLP, from each layer's inputs
WALKED_HELD = 4, 3  # those if workers hold the residual stream between them, and the dense layer's outputs
COMPARED_TOKENS = 128  # tokens on which both models are compared; `verify` repeats the comparison


@dataclass(frozen=True)
class LayerWork:
    """The operations and bytes of a layer for all calibration tokens.

    Attributes:
        weight_bytes: size of the dense layer as the source stores it; `decoded_bytes`: as workers exchange it.
        largest_bytes: size of its largest tensor in the source.
        forward_flops: of a forward pass; `statistics_flops`: of one that ends at the last tap; `packed_flops`: of one
            through the compressed layer.
        built_bytes: moved to build the layer in float32.
        grid_flops: of the tokens by which one worker chooses the grids of sums.
        added_bytes: moved to sum the moments.
        moment_bytes: size of the layer's sums, one triangle each.
        gradient_flops: of the backward pass; 0 without one.
        gradient_moment_flops, gradient_moved_bytes: of the gradients' moments and the norms of samples.
        gradient_grid_flops: of the tokens by which the grids of gradients are chosen.
        gradient_bytes: size of the sums of the backward pass; `gradient_input_bytes`: of the inputs that it reads.
        curves: of each task whose sizes are compared by predicted loss, in every round.
        sample_bytes: size of a layer's samples of values.
        pair_bytes, pair_added_bytes: sizes of the pairs that each step of a correction sums, and bytes moved for all.
        correction_flops: of the walk of `correct: output`: two layers to each point and once to the end, their pairs.
        refinement: the training of the layer.
        held_out_flops: of the dense and of the compressed model on held-out text, in float32 on tensor cores.
        rounding: of every rounded task of the job, in all layers and outside of them, by `Task.key`.
        trials: how often each task is rounded beside that, to choose its bits.
        compare_flops: of the comparison that `verify` repeats: the dense layer, and the compressed one on the hidden
            states of both models, in float32.
    """

    weight_bytes: int
    decoded_bytes: int
    largest_bytes: int
    written_bytes: int
    hidden_bytes: int
    forward_flops: float
    statistics_flops: float
    moment_flops: float
    added_bytes: float
    cosine_bytes: float
    moment_bytes: int
    gradient_flops: float
    solves: tuple[Work, ...]
    packed_flops: float = 0.0
    curves: tuple[Work, ...] = ()
    gradient_bytes: int = 0
    gradient_input_bytes: int = 0
    sample_bytes: int = 0
    pair_bytes: tuple[int, ...] = ()
    pair_added_bytes: float = 0.0
    correction_flops: float = 0.0
    refinement: RefineWork = UNREFINED
    held_out_flops: tuple[float, float] = (0.0, 0.0)
    rounding: Mapping[str, Work] = field(default_factory=dict)
    trials: int = 0
    compare_flops: float = 0.0
    built_bytes: float = 0.0
    grid_flops: float = 0.0
    gradient_moment_flops: float = 0.0
    gradient_moved_bytes: float = 0.0
    gradient_grid_flops: float = 0.0


def layer_work(job: PlannedJob, itemsize: int, gradient_tokens: int = 0, keep: float = 1.0) -> LayerWork:
    """Count the work of the largest claimed layer among those with the most moments, as a model of every layer.

    `keep`: the written share of a layer's numbers.
    """
    manifest, tokens, sequence, busiest = job.manifest, job.tokens, job.sequence, _busiest(job)
    layer, moments = busiest.layer, busiest.moments
    forward = forward_flops(layer, sequence)
    packed = forward - 2.0 * (1.0 - keep) * layer.passed_numbers
    skipped = sum(
        2.0 * layer.hidden * block.width * block.share
        for block in layer.mlps
        if any(moment.point == block.writer.reads for moment in moments)
    )
    decoded_bytes = layer.numbers() * itemsize
    return LayerWork(
        weight_bytes=layer.stored_bytes(),
        decoded_bytes=decoded_bytes,
        largest_bytes=max((layer.stored_bytes((role,)) for role in layer.roles), default=0),
        written_bytes=int(keep * decoded_bytes),
        hidden_bytes=tokens * layer.hidden * itemsize,
        forward_flops=tokens * forward,
        packed_flops=tokens * packed,
        statistics_flops=tokens * (forward - skipped) * _passes_dense(job),
        moment_flops=float(tokens * sum(_moment_flops(moment, layer) for moment in moments)),
        built_bytes=float(BUILT_BYTES * layer.numbers()),
        grid_flops=float(min(GRID_TOKENS, sequence) * forward) if moments else 0.0,
        added_bytes=float(sum(_added_bytes(moment, layer, manifest, itemsize) for moment in moments)),
        cosine_bytes=float(COSINE_BYTES * _measured_tokens(manifest) * layer.hidden),
        moment_bytes=8 * sum(triangle_numbers(moment, layer) for moment in moments),
        **_gradient_work(layer, busiest.gradients, forward, gradient_tokens, manifest),
        solves=busiest.solves(),
        curves=busiest.curves(),
        gradient_input_bytes=gradient_tokens * layer.hidden * itemsize,
        gradient_bytes=8 * sum(triangle_numbers(moment, layer) for moment in busiest.gradients),
        sample_bytes=sum(
            min(moment.tokens, tokens) * moment_width(moment, layer) * itemsize for moment in busiest.samples
        ),
        pair_bytes=pair_bytes(busiest.pairs, layer),
        pair_added_bytes=float(sum(_pair_added_bytes(moment, layer, manifest, itemsize) for moment in busiest.pairs)),
        correction_flops=float(tokens * _correction_flops(busiest, forward)),
        refinement=refine_work(
            manifest,
            forward,
            packed,
            tokens * layer.hidden * itemsize,
            layer_descent_flops(layer, keep),
            2.0 * layer.hidden**2 if OUTPUT_GRADIENT in busiest.gradients else 0.0,
        ),
        rounding=rounding_work(job.tasks, manifest, job.geometry.layers, 1.0 - REMOVED_SHARE),
        trials=trials(manifest),
        compare_flops=3.0 * COMPARED_TOKENS * forward_flops(layer, COMPARED_TOKENS),
        held_out_flops=(_held_out_tokens(manifest) * forward, _held_out_tokens(manifest) * packed),
    )


@dataclass(frozen=True)
class _Busiest:
    """The claimed layer with the most moments, and the needs of its tasks.

    Attributes:
        moments: without `samples` of values and `gradients`.
        tasks: with their groups; without the moments that only their rounding needs.
    """

    job: PlannedJob
    layer: LayerGeometry
    moments: tuple[Moment, ...]
    samples: tuple[Moment, ...]
    gradients: tuple[Moment, ...]
    tasks: tuple[tuple[Task, Group[Any]], ...]

    @property
    def pairs(self) -> list[Moment]:
        """Return the pairs of all corrections."""
        return sorted({moment for task, _ in self.tasks for moment in task.corrections})

    def solves(self) -> tuple[Work, ...]:
        """Return the work of each task's solve."""
        calibration, predicted = self.job.manifest.calibration, self.job.predicted
        dense = calibration is not None and calibration.propagate == "dense"
        return tuple(
            solve_work(task, group, self.job.tokens, hinted=dense and task.key in predicted)
            for task, group in self.tasks
        )

    def curves(self) -> tuple[Work, ...]:
        """Return the work of each task's curve, if it has one, with the solves that are rounded to choose bits."""
        job, sizes = self.job, SIZES_TRIED if trials(self.job.manifest) else 0
        tokens = tried_tokens(job.tokens)
        return tuple(
            sum([solve_work(task, group, tokens, hinted=True)] * sizes, start=curve_work(task, group, job.tokens))
            for task, group in self.tasks
            if task.key in job.predicted
        )


def _busiest(job: PlannedJob) -> _Busiest:
    inner = replace(job, tasks=[task for task in job.tasks if task.roles[0] not in OUTER_ROLES])
    layer, own = max(
        inner.claimed,
        key=lambda each: (len(each[1].moments), each[0].numbers()),
        default=(job.geometry.layers[0], NO_TASKS),
    )
    groups = ((task, job.groups[task.key]) for task in own.tasks if task.key in job.groups)
    return _Busiest(
        job,
        layer,
        moments=tuple(moment for moment in own.moments if moment.kind != "sample"),
        samples=tuple(moment for moment in own.moments if moment.kind == "sample"),
        gradients=own.gradients,
        # With `quantize`, tasks as methods claim them, without the moments for rounding.
        tasks=tuple((group.task(task.method) if job.manifest.quantize else task, group) for task, group in groups),
    )


def _passes_dense(job: PlannedJob) -> bool:
    """Return True if a pass of calibration text sums moments or measures importance, apart from corrections."""
    return "importance" in job.passes.scores or any(task.moments for task in job.tasks)


def _measured_tokens(manifest: Manifest) -> float:
    """Return the tokens on which importance is measured."""
    if (calibration := manifest.calibration) is None:
        return 0.0
    shards, samples, sequence = calibration.shards, calibration.samples, calibration.sequence_length
    return samples * sequence * len(importance_shards(shards, samples, sequence)) / shards


def _held_out_tokens(manifest: Manifest) -> int:
    if (calibration := manifest.calibration) is None:
        return 0
    samples, sequence = calibration.samples, calibration.sequence_length
    return held_out_windows(samples, samples, sequence) * sequence


def _gradient_work(
    geometry: LayerGeometry,
    gradients: Sequence[Moment],
    forward: float,
    gradient_tokens: int,
    manifest: Manifest,
) -> dict[str, float]:
    """Count the backward pass, by fields of `LayerWork`. `forward`: operations of a forward pass per token."""
    if not gradient_tokens or manifest.calibration is None:
        return {"gradient_flops": 0.0}
    pulled = sum(2.0 * geometry.numbers(_pulled_roles(moment)) for moment in gradients)
    sequence, flops, moved = manifest.calibration.sequence_length, 0.0, 0.0
    samples = gradient_tokens // sequence
    shards = min(manifest.calibration.shards, samples)
    for moment in gradients:
        width, rows = moment_width(moment, geometry), moment.heads // moment.groups * sequence
        if moment.diagonal:
            moved += DIAGONAL_BYTES * geometry.share(moment.point) * gradient_tokens * moment.heads * width
            continue
        smaller, larger = sorted((width, rows))
        products = shards * math.ceil(rows * samples / shards / ROWS_PER_PRODUCT)
        flops += 2.0 * samples * (rows * _banded_numbers(moment, geometry) + moment.groups * smaller**2 * larger)
        moved += ADDED_BYTES * products * _banded_numbers(moment, geometry)
        moved += 2 * SCALED_PASSES * RESIDUAL_BYTES * gradient_tokens * moment.heads * width  # for sum and norm
        moved += SQUARED_BYTES * samples * moment.groups * smaller**2
    return {
        "gradient_flops": float(gradient_tokens * (BACK * forward + pulled)),
        "gradient_moment_flops": flops,
        "gradient_moved_bytes": moved,
        "gradient_grid_flops": float(min(GRID_TOKENS, sequence) * BACK * forward),
    }


def _moment_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Return the operations of a token's products, on average over all tokens."""
    return geometry.share(moment.point) * (moment.heads // moment.groups * 2 * _banded_numbers(moment, geometry))


def _added_bytes(moment: Moment, geometry: LayerGeometry, manifest: Manifest, itemsize: int) -> float:
    """Return the bytes moved to sum a moment. The last product of a shard may have fewer rows."""
    calibration = manifest.calibration
    assert calibration is not None
    tokens, products = calibration.samples * calibration.sequence_length, _products(moment, manifest)
    passing = geometry.share(moment.point) * tokens
    values = SCALED_PASSES * itemsize * passing * moment.heads * moment_width(moment, geometry)
    return float(ADDED_BYTES * _banded_numbers(moment, geometry) * products + values)


def _products(moment: Moment, manifest: Manifest) -> int:
    """Return the number of a moment's products in all shards."""
    calibration = manifest.calibration
    assert calibration is not None
    rows = moment.heads // moment.groups * math.ceil(calibration.samples / calibration.shards)
    return calibration.shards * math.ceil(rows * calibration.sequence_length / ROWS_PER_PRODUCT)


def _banded_numbers(moment: Moment, geometry: LayerGeometry) -> int:
    """Return the numbers of a moment's sum during addition: bands of rows, each from the diagonal on."""
    width = moment_width(moment, geometry)
    if moment.diagonal:
        return moment.groups * width
    return moment.groups * sum(min(BAND, width - start) * (width - start) for start in range(0, width, BAND))


def _pulled_roles(moment: Moment) -> tuple[str, ...]:
    """Return the roles whose weights propagate the gradient back to their input."""
    return tuple(moment.point.removeprefix("pull:").split("+")) if moment.point.startswith("pull:") else ()


def forward_flops(geometry: LayerGeometry, sequence: int) -> float:
    """Return the operations per token and layer: two for every weight, and attention over half the sequence on
    average."""
    return 2.0 * geometry.passed_numbers + 2.0 * sequence * geometry.query_features


def scoring_flops(geometry: Geometry, window: int) -> float:
    """Return the operations of one token in a window of the evaluation text, with the head."""
    return sum(forward_flops(layer, window) for layer in geometry.layers) + 2.0 * geometry.hidden * geometry.vocab


def _correction_flops(busiest: _Busiest, forward: float) -> float:
    """Return the operations of a correction per token. `forward`: operations of a forward pass."""
    layer, pairs = busiest.layer, busiest.pairs
    if not pairs:
        return 0.0
    mlp = 2.0 * sum(block.share * block.numbers(block.width) for block in layer.mlps)
    held = layer.attention_steps is not None and not any(task.refine for task, _ in busiest.tasks)
    through_attention, through_mlp = WALKED_HELD if held else WALKED
    walked = through_attention * (forward - mlp) + through_mlp * mlp
    return walked + sum(_pair_flops(moment, layer) for moment in pairs)


def pair_bytes(pairs: Sequence[Moment], geometry: LayerGeometry) -> tuple[int, ...]:
    """Return the sizes of the pairs of each step: of one triangle of Σ x xᵀ, and of Σ e xᵀ."""
    sizes = {moment.point: geometry.features(moment.point) for moment in pairs}
    numbers = {point: width * (width + 1) // 2 + geometry.hidden * width for point, width in sizes.items()}
    steps = [sum(numbers.get(point, 0) for point in points) for points in geometry.corrected_points]
    return tuple(8 * step for step in steps if step)


def _pair_added_bytes(moment: Moment, geometry: LayerGeometry, manifest: Manifest, itemsize: int) -> float:
    """Return the bytes moved to sum a pair: x like a moment, and e for each number of its sum, per product."""
    assert manifest.calibration is not None
    tokens = manifest.calibration.samples * manifest.calibration.sequence_length
    numbers = geometry.hidden * geometry.features(moment.point)
    errors = PAIRED_BYTES * _products(moment, manifest) * numbers + ERROR_BYTES * tokens * geometry.hidden
    return errors + _added_bytes(moment, geometry, manifest, itemsize)


def _pair_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Return the operations per token of one triangle of Σ x xᵀ, and of Σ e xᵀ in float32 at half the rate."""
    features = geometry.features(moment.point)
    return geometry.share(moment.point) * features * (features + 4.0 * geometry.hidden)
