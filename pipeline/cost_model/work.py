"""The operations and bytes of a layer, from geometry and tasks. docs/plan.md.

Legend: D hidden, H heads, d head_dim, N intermediate, F width of a moment, T calibration tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manifests.quantize import OUTER_ROLES
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.rates import BACK
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
from pipeline.methods.work import Work, moment_width, tried_tokens
from pipeline.units.sharding import GRID_TOKENS

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


def layer_work(job: PlannedJob, keep: float = 1.0) -> LayerWork:
    """Count the work of the largest claimed layer among those with the most moments, as a model of every layer.

    `keep`: the written share of a layer's numbers.
    """
    tokens, busiest = job.tokens, _busiest(job)
    layer, moments, forward = busiest.layer, busiest.moments, busiest.forward
    packed = forward - 2.0 * (1.0 - keep) * layer.passed_numbers
    decoded_bytes, held_out = layer.numbers() * job.itemsize, job.held_out_windows * job.sequence
    return LayerWork(
        weight_bytes=layer.stored_bytes(),
        decoded_bytes=decoded_bytes,
        largest_bytes=max((layer.stored_bytes((role,)) for role in layer.roles), default=0),
        written_bytes=int(keep * decoded_bytes),
        hidden_bytes=job.hidden_bytes,
        forward_flops=tokens * forward,
        packed_flops=tokens * packed,
        statistics_flops=tokens * (forward - busiest.skipped) * (job.has_moments or "importance" in job.passes.scores),
        moment_flops=float(tokens * sum(_moment_flops(moment, layer) for moment in moments)),
        built_bytes=float(BUILT_BYTES * layer.numbers()),
        grid_flops=float(min(GRID_TOKENS, job.sequence) * forward) if moments else 0.0,
        added_bytes=float(sum(map(busiest.added_bytes, moments))),
        cosine_bytes=float(COSINE_BYTES * busiest.measured_tokens * layer.hidden),
        moment_bytes=8 * sum(triangle_numbers(moment, layer) for moment in moments),
        **busiest.gradient_work(),
        solves=busiest.solves(),
        curves=busiest.curves(),
        gradient_input_bytes=job.gradient_tokens * layer.hidden * job.itemsize,
        gradient_bytes=8 * sum(triangle_numbers(moment, layer) for moment in busiest.gradients),
        sample_bytes=busiest.sample_bytes,
        pair_bytes=pair_bytes(busiest.pairs, layer),
        pair_added_bytes=float(sum(map(busiest.pair_added_bytes, busiest.pairs))),
        correction_flops=float(tokens * busiest.correction_flops()),
        refinement=busiest.refinement(packed, keep),
        rounding=rounding_work(job),
        trials=trials(job.manifest),
        compare_flops=3.0 * COMPARED_TOKENS * forward_flops(layer, COMPARED_TOKENS),
        held_out_flops=(held_out * forward, held_out * packed),
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
    def forward(self) -> float:
        """The operations of a token's forward pass."""
        return forward_flops(self.layer, self.job.sequence)

    @property
    def skipped(self) -> float:
        """The operations of a token behind the last tap."""
        points = {moment.point for moment in self.moments}
        writers = (block for block in self.layer.mlps if block.writer.reads in points)
        return sum(2.0 * self.layer.hidden * block.width * block.share for block in writers)

    @property
    def pairs(self) -> list[Moment]:
        """The pairs of all corrections."""
        return sorted({moment for task, _ in self.tasks for moment in task.corrections})

    @property
    def measured_tokens(self) -> float:
        """The tokens on which importance is measured."""
        passes = self.job.passes
        return self.job.tokens * len(passes.importance_shards) / passes.shards

    @property
    def sample_bytes(self) -> int:
        """The size of the samples of values, which have at most all tokens."""
        job, layer = self.job, self.layer
        numbers = sum(min(moment.tokens, job.tokens) * moment_width(moment, layer) for moment in self.samples)
        return numbers * job.itemsize

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

    def refinement(self, packed: float, keep: float) -> RefineWork:
        """Return the work of the training. `packed`: operations of a token's pass through the compressed layer."""
        weighting = 2.0 * self.layer.hidden**2 if OUTPUT_GRADIENT in self.gradients else 0.0
        descent = layer_descent_flops(self.layer, keep)
        return refine_work(self.job, self.forward, packed, descent, weighting)

    def added_bytes(self, moment: Moment) -> float:
        """Return the bytes moved to sum a moment. The last product of a shard may have fewer rows."""
        layer = self.layer
        passing = layer.share(moment.point) * self.job.tokens
        values = SCALED_PASSES * self.job.itemsize * passing * moment.heads * moment_width(moment, layer)
        return float(ADDED_BYTES * _banded_numbers(moment, layer) * self._products(moment) + values)

    def pair_added_bytes(self, moment: Moment) -> float:
        """Return the bytes moved to sum a pair: x like a moment, and e for each number of its sum, per product."""
        hidden = self.layer.hidden
        numbers = hidden * self.layer.features(moment.point)
        errors = PAIRED_BYTES * self._products(moment) * numbers + ERROR_BYTES * self.job.tokens * hidden
        return errors + self.added_bytes(moment)

    def _products(self, moment: Moment) -> int:
        """Return the number of a moment's products in all shards."""
        calibration = self.job.manifest.calibration
        assert calibration is not None
        rows = moment.heads // moment.groups * math.ceil(calibration.samples / calibration.shards)
        return calibration.shards * math.ceil(rows * calibration.sequence_length / ROWS_PER_PRODUCT)

    def gradient_work(self) -> dict[str, float]:
        """Count the backward pass, by fields of `LayerWork`."""
        job, tokens = self.job, self.job.gradient_tokens
        if not tokens:
            return {"gradient_flops": 0.0}
        pulled = sum(2.0 * self.layer.numbers(_pulled_roles(moment)) for moment in self.gradients)
        flops, moved = self._gradient_sums()
        return {
            "gradient_flops": float(tokens * (BACK * self.forward + pulled)),
            "gradient_moment_flops": flops,
            "gradient_moved_bytes": moved,
            "gradient_grid_flops": float(min(GRID_TOKENS, job.sequence) * BACK * self.forward),
        }

    def _gradient_sums(self) -> tuple[float, float]:
        """Return the operations of the gradients' moments and of the norms of samples, and the bytes moved for both."""
        job, layer, samples = self.job, self.layer, self.job.passes.gradient_samples
        shards, flops, moved = min(job.passes.shards, samples), 0.0, 0.0
        for moment in self.gradients:
            width, rows = moment_width(moment, layer), moment.heads // moment.groups * job.sequence
            if moment.diagonal:
                moved += DIAGONAL_BYTES * layer.share(moment.point) * job.gradient_tokens * moment.heads * width
                continue
            smaller, larger = sorted((width, rows))
            products = shards * math.ceil(rows * samples / shards / ROWS_PER_PRODUCT)
            flops += 2.0 * samples * (rows * _banded_numbers(moment, layer) + moment.groups * smaller**2 * larger)
            moved += ADDED_BYTES * products * _banded_numbers(moment, layer)
            moved += 2 * SCALED_PASSES * RESIDUAL_BYTES * job.gradient_tokens * moment.heads * width  # for sum and norm
            moved += SQUARED_BYTES * samples * moment.groups * smaller**2
        return flops, moved

    def correction_flops(self) -> float:
        """Return the operations of a correction per token."""
        layer, pairs = self.layer, self.pairs
        if not pairs:
            return 0.0
        mlp = 2.0 * sum(block.share * block.numbers(block.width) for block in layer.mlps)
        held = layer.attention_steps is not None and not any(task.refine for task, _ in self.tasks)
        through_attention, through_mlp = WALKED_HELD if held else WALKED
        walked = through_attention * (self.forward - mlp) + through_mlp * mlp
        return walked + sum(_pair_flops(moment, layer) for moment in pairs)


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


def _moment_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Return the operations of a token's products, on average over all tokens."""
    return geometry.share(moment.point) * (moment.heads // moment.groups * 2 * _banded_numbers(moment, geometry))


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


def pair_bytes(pairs: Sequence[Moment], geometry: LayerGeometry) -> tuple[int, ...]:
    """Return the sizes of the pairs of each step: of one triangle of Σ x xᵀ, and of Σ e xᵀ."""
    sizes = {moment.point: geometry.features(moment.point) for moment in pairs}
    numbers = {point: width * (width + 1) // 2 + geometry.hidden * width for point, width in sizes.items()}
    steps = [sum(numbers.get(point, 0) for point in points) for points in geometry.corrected_points]
    return tuple(8 * step for step in steps if step)


def _pair_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Return the operations per token of one triangle of Σ x xᵀ, and of Σ e xᵀ in float32 at half the rate."""
    features = geometry.features(moment.point)
    return geometry.share(moment.point) * features * (features + 4.0 * geometry.hidden)
