"""What a layer costs whoever does it: operations and bytes, from the geometry and the tasks alone. docs/plan.md.

Legend: D hidden, H heads, d head_dim, N intermediate, F width of a moment, T calibration tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manifests.schema import Manifest
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import build_methods, layer_gradients, layer_moments, layers_of, predict_tasks

ROWS_PER_PRODUCT = 4096  # tokens whose product is rounded and added at once
ADDED_BYTES = 24  # of device memory for each number: the product written and read, the float64 sum read and written
COSINE_BYTES = 48  # for each hidden number: read, widened to float64, scaled, multiplied
REMOVED_SHARE = 0.25  # of an MLP's channels, where ranks are not known yet
EIGEN_FLOPS = 10.0  # times n³
BACK, BACK_AGAIN = 3, 3 + 7  # forward passes that a backward pass costs; with a second: once forth, and two blocks
HELD_OUT = 10  # one window held out for so many samples
PROBED = 12  # runs of an MLP whose gate and up are cut, by which a curve is scaled: three widths, four ranks
PROBE_SHARE = 4  # of the sample's tokens, one in so many


@dataclass(frozen=True)
class SolveWork:
    """One task: float64 operations, and removals that wait for one another."""

    name: str
    flops: float
    steps: int


@dataclass(frozen=True)
class LayerWork:
    """One layer, all calibration tokens: operations, and bytes.

    Attributes:
        statistics_flops: of a forward pass that ends at the last tap; `forward_flops`: of a whole one.
        added_bytes: of device memory that summing the moments moves.
        moment_bytes: what the sums of a layer take, one triangle each.
        gradient_flops: of the backward pass, or of both where there are two rounds; 0 without one.
        curves: of each task whose sizes are compared by predicted loss, in every round.
        correction_flops: of the walk of `correct: output`: five passes of two layers, and their pairs.
        held_out_flops: of both models on what is held out, in float32.
    """

    weight_bytes: int
    written_bytes: int
    hidden_bytes: int
    forward_flops: float
    statistics_flops: float
    moment_flops: float
    added_bytes: float
    cosine_bytes: float
    moment_bytes: int
    gradient_flops: float
    solves: tuple[SolveWork, ...]
    curves: tuple[SolveWork, ...] = ()
    correction_flops: float = 0.0
    held_out_flops: float = 0.0


def layer_work(
    manifest: Manifest,
    geometry: Geometry,
    tasks: Sequence[Task],
    itemsize: int,
    gradient_tokens: int = 0,
    kept: float = 1.0,
) -> LayerWork:
    """Of the claimed layer that asks for most, the largest of those; `kept`: the share of a layer's numbers that is
    written. All layers are counted by it: too much where they differ.
    """
    calibration = manifest.calibration
    sequence = calibration.sequence_length if calibration else 0
    tokens = calibration.samples * sequence if calibration else 0
    claimed = layers_of(tasks)
    busiest = max(
        claimed, key=lambda layer: (len(layer_moments(tasks, layer)), geometry.layers[layer].numbers()), default=0
    )
    layer = geometry.layers[busiest]
    moments = [moment for moment in layer_moments(tasks, busiest) if moment.kind != "sample"]
    gradients = layer_gradients(tasks, busiest)
    forward = forward_flops(layer, sequence)
    two_rounds = any(getattr(entry, "rounds", 1) == 2 for entry in manifest.methods)
    busy = [task for task in tasks if task.layer == busiest]
    pairs = {moment for task in busy for moment in task.corrections}
    predicted = {task.name for task in predict_tasks(build_methods(manifest), geometry) if task.layer == busiest}
    skipped = 2.0 * layer.hidden * layer.intermediate if any(m.point == "down.in" for m in moments) else 0.0
    sizes = [triangle_numbers(moment, layer) for moment in moments]
    weight_bytes = layer.numbers() * itemsize
    return LayerWork(
        weight_bytes=weight_bytes,
        written_bytes=int(kept * weight_bytes),
        hidden_bytes=tokens * layer.hidden * itemsize,
        forward_flops=tokens * forward,
        statistics_flops=tokens * (forward - skipped),
        moment_flops=float(
            tokens * sum(moment.heads // moment.groups * 2 * triangle_numbers(moment, layer) for moment in moments)
        ),
        added_bytes=float(ADDED_BYTES * sum(sizes) * tokens / ROWS_PER_PRODUCT),
        cosine_bytes=float(COSINE_BYTES * tokens * layer.hidden),
        moment_bytes=8 * sum(sizes),
        gradient_flops=float(
            gradient_tokens
            * (
                (BACK_AGAIN if two_rounds else BACK) * forward
                + (1 + two_rounds) * 2 * sum(triangle_numbers(moment, layer) for moment in gradients)
            )
        ),
        solves=tuple(solve_work(task, layer) for task in busy for _ in range(1 + two_rounds)),
        curves=tuple(curve_work(task, layer) for task in busy if task.name in predicted for _ in range(1 + two_rounds)),
        correction_flops=float(tokens * (10 * forward + sum(_pair_flops(moment, layer) for moment in pairs)))
        if pairs
        else 0.0,
        held_out_flops=2.0 * -(-calibration.samples // HELD_OUT) * sequence * forward if calibration else 0.0,
    )


def point_features(point: str, geometry: LayerGeometry) -> int:
    """Numbers per token that pass a point of the layer."""
    role, _, side = point.partition(".")
    if role in ("attention", "mlp"):
        return geometry.hidden
    rows, columns = geometry.weight_shape(role)[0], geometry.weight_shape(role)[-1]
    return columns if side == "in" else rows


def triangle_numbers(moment: Moment, geometry: LayerGeometry) -> int:
    """Numbers of one triangle of each group's moment; of a diagonal one, its length."""
    width = moment_width(moment, geometry)
    return moment.groups * (width if moment.diagonal else width * (width + 1) // 2)


def moment_width(moment: Moment, geometry: LayerGeometry) -> int:
    """Of one head's moment, or of the whole one. The gradient's points `mid`, `out` and `pull:` are of hidden size."""
    named = moment.point.partition(".")[0] in {*geometry.roles, "attention", "mlp"}
    features = point_features(moment.point, geometry) if named else geometry.hidden
    return features // moment.heads


def forward_flops(geometry: LayerGeometry, sequence: int) -> float:
    """Per token and layer: two for every weight, and attention over half the sequence on average."""
    return 2.0 * geometry.numbers() + 2.0 * sequence * geometry.heads * geometry.head_dim


def scoring_flops(geometry: Geometry, window: int) -> float:
    """Of one token in a window of the evaluation text, head included."""
    return sum(forward_flops(layer, window) for layer in geometry.layers) + 2.0 * geometry.hidden * geometry.vocab


def curve_work(task: Task, geometry: LayerGeometry) -> SolveWork:
    """What solving a task takes; of an MLP that is looked at on a sample, besides the runs with parts of it cut.

    A run of T tokens at 0.56 of the channels on average: 6 T D k of products, and 2 T k² of the moment that down is
    fitted again to.
    """
    found = solve_work(task, geometry)
    samples = [moment for moment in task.moments if moment.kind == "sample"]
    probes = 0.0
    for moment in samples:
        probed = moment.tokens / PROBE_SHARE
        width = geometry.intermediate
        probes += PROBED * probed * (6 * 0.56 * geometry.hidden * width + 2 * 0.44 * width**2)
    return SolveWork(task.name, found.flops + probes, found.steps)


def _pair_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Of Σ x xᵀ and Σ e xᵀ, for a token."""
    features = point_features(moment.point, geometry)
    return 2.0 * features * (features + geometry.hidden)


def solve_work(task: Task, geometry: LayerGeometry) -> SolveWork:
    """The moments' eigenproblems; for a whole moment of the MLP's channels, an elimination with its refit.

    N³ for the inverse, 3 N² for each removal (kernels/elimination.py), 2 D N² for W_down's gram and energy, and 2 D N
    for each removal in the refit.
    """
    flops, steps = 0.0, 0
    for moment in task.moments:
        width = moment_width(moment, geometry)
        if moment.kind == "sample":
            flops += 2.0 * moment.tokens * width * (width + 2 * geometry.intermediate)
        elif moment.point == "down.in" and moment.heads == 1:
            removed = int(REMOVED_SHARE * width)
            flops += width**3 + 3.0 * removed * width**2 + 2.0 * geometry.hidden * width * (width + removed)
            steps += removed
        elif not moment.diagonal:
            flops += EIGEN_FLOPS * moment.groups * width**3
    return SolveWork(task.name, flops, steps)
