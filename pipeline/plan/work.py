"""What a layer costs whoever does it: operations and bytes, from the geometry and the tasks alone. docs/plan.md.

Legend: D hidden, H heads, d head_dim, N intermediate, F width of a moment, T calibration tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manifests.quantize import OUTER_ROLES
from manifests.schema import Manifest
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.method import Moment, Task
from pipeline.methods.registry import (
    build_methods,
    claim_tasks,
    layer_gradients,
    layer_moments,
    layers_of,
    predict_tasks,
)
from pipeline.plan.rounding_work import RoundWork, rounding_work

ROWS_PER_PRODUCT = 4096  # tokens whose product is rounded and added at once
ADDED_BYTES = 24  # of device memory for each number: the product written and read, the float64 sum read and written
COSINE_BYTES = 48  # for each hidden number: read, widened to float64, scaled, multiplied
REMOVED_SHARE = 0.25  # of an MLP's channels, where ranks are not known yet
EIGEN_FLOPS = 10.0  # times n³
BACK, BACK_AGAIN = 3, 3 + 7  # forward passes that a backward pass costs; with a second: once forth, and two blocks
WALKED, WALKED_SHORT = 4, 4  # layers that a walk of corrections goes through, to the end and to their attention's
COMPARED_TOKENS = 128  # that both models go through side by side, as `verify` does again
HELD_OUT = 10  # one window held out for so many samples
WIDTH_FLOPS, BASE_FLOPS = 52.0, 46.0  # times D³: what a width of an MLP takes, or a basis of values, with its losses
BASES = 16  # ranks of the value basis that are compared at most
PROBED = 12  # runs of an MLP whose gate and up are cut, by which a curve is scaled: three widths, four ranks
PROBE_TOKENS = 4  # of the sample, for each channel
FIT_TOKENS = 2  # for each channel that is fitted, at least


@dataclass(frozen=True)
class SolveWork:
    """One task: float64 operations, of them those of eigenproblems, those on a sample in the checkpoint's dtype, and
    removals that wait for one another.

    Of a curve: `pieces` into which it may be cut, and of the above what is done before (`begun`, None: it is not cut).
    """

    name: str
    flops: float
    steps: int
    sample_flops: float = 0.0
    pieces: int = 1
    begun: SolveWork | None = None
    eigen_flops: float = 0.0


@dataclass(frozen=True)
class LayerWork:
    """One layer, all calibration tokens: operations, and bytes.

    Attributes:
        largest_bytes: of its largest tensor.
        statistics_flops: of a forward pass that ends at the last tap; `forward_flops`: of a whole one;
            `packed_flops`: of one through what has become of the layer.
        added_bytes: of device memory that summing the moments moves.
        moment_bytes: what the sums of a layer take, one triangle each.
        gradient_flops: of the backward pass, or of both where there are two rounds; 0 without one.
        curves: of each task whose sizes are compared by predicted loss, in every round.
        gradient_bytes: of the moments that one shard of the backward pass sums.
        correction_flops: of the walk of `correct: output`: two layers to each point and once to the end, their pairs.
        held_out_flops: of the dense model, and of the compressed one, on what is held out, in float32 on tensor cores.
        rounding: of every task of the job that is rounded, those of all layers and what is outside of them.
        compare_flops: of what `verify` measures again: a layer, and what became of it on both models' hidden states, in
            float32.
    """

    weight_bytes: int
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
    solves: tuple[SolveWork, ...]
    packed_flops: float = 0.0
    curves: tuple[SolveWork, ...] = ()
    gradient_bytes: int = 0
    correction_flops: float = 0.0
    held_out_flops: tuple[float, float] = (0.0, 0.0)
    rounding: tuple[RoundWork, ...] = ()
    compare_flops: float = 0.0


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
    rounding = rounding_work(tasks, manifest, geometry.layers, 1.0 - REMOVED_SHARE)
    tasks = [task for task in tasks if task.roles[0] not in OUTER_ROLES]
    claims = claim_tasks(build_methods(manifest), geometry) if manifest.quantize else ()
    own = {task.key: task for task in claims}  # without what rounding needs
    claimed = layers_of(tasks)
    busiest = max(
        claimed, key=lambda layer: (len(layer_moments(tasks, layer)), geometry.layers[layer].numbers()), default=0
    )
    layer = geometry.layers[busiest]
    moments = [moment for moment in layer_moments(tasks, busiest) if moment.kind != "sample"]
    gradients = layer_gradients(tasks, busiest)
    forward = forward_flops(layer, sequence)
    packed = forward - 2.0 * (1.0 - kept) * layer.numbers()
    held_out = -(-calibration.samples // HELD_OUT) * sequence if calibration else 0
    two_rounds = any(getattr(entry, "rounds", 1) == 2 for entry in manifest.methods)
    busy = [own.get(task.key, task) for task in tasks if task.layer == busiest]
    pairs = {moment for task in busy for moment in task.corrections}
    predicted = {task.name for task in predict_tasks(build_methods(manifest), geometry) if task.layer == busiest}
    mlp = 2.0 * layer.numbers(tuple(role for role in layer.roles if role in ("gate", "up", "down")))
    walked = WALKED * forward + WALKED_SHORT * (forward - mlp)
    skipped = 2.0 * layer.hidden * layer.intermediate if any(m.point == "down.in" for m in moments) else 0.0
    sizes = [triangle_numbers(moment, layer) for moment in moments]
    weight_bytes = layer.numbers() * itemsize
    return LayerWork(
        weight_bytes=weight_bytes,
        largest_bytes=max((layer.numbers((role,)) for role in layer.roles), default=0) * itemsize,
        written_bytes=int(kept * weight_bytes),
        hidden_bytes=tokens * layer.hidden * itemsize,
        forward_flops=tokens * forward,
        packed_flops=tokens * packed,
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
        solves=tuple(solve_work(task, layer, tokens) for task in busy for _ in range(1 + two_rounds)),
        curves=tuple(
            curve_work(task, layer, tokens, _multiple(task, manifest, layer))
            for task in busy
            if task.name in predicted
            for _ in range(1 + two_rounds)
        ),
        gradient_bytes=8 * sum(2 * triangle_numbers(moment, layer) for moment in gradients),
        correction_flops=float(tokens * (walked + sum(_pair_flops(moment, layer) for moment in pairs)))
        if pairs
        else 0.0,
        rounding=rounding,
        compare_flops=3.0 * COMPARED_TOKENS * forward_flops(layer, COMPARED_TOKENS),
        held_out_flops=(held_out * forward, held_out * packed),
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


def curve_work(task: Task, geometry: LayerGeometry, tokens: int, multiple: int = 1) -> SolveWork:
    """What comparing a task's sizes takes. docs/plan.md#work-of-a-layer.

    Of an MLP whose widths are compared: an elimination down to the smallest, and of each width a Cholesky factor, the
    products of gate, up and down, and two eigenproblems with what leads to losses by rank; a sample at three of them.
    Of v and o: what each rank of the basis takes. Of others, what solving them takes.
    """
    samples = [moment for moment in task.moments if moment.kind == "sample"]
    hidden, inner = geometry.hidden, geometry.intermediate
    if samples:
        share = [place / task.pieces for place in range(1, task.pieces + 1)]
        mean = [sum(part**power for part in share) / task.pieces for power in (1, 2, 3)]
        of_width = (
            WIDTH_FLOPS * hidden**3
            + 8.0 * mean[0] * inner * hidden**2
            + 4.0 * mean[1] * hidden * inner**2
            + mean[2] * inner**3 / 3
        )
        begun = _elimination(
            "begun", geometry, 1 - 1 / task.pieces, EIGEN_FLOPS * hidden**3 + hidden * float(inner) ** 2
        )
        probe = min(PROBE_TOKENS * inner, tokens, samples[0].tokens)
        fitted = min(1.0, probe / (FIT_TOKENS * inner))  # of the channels, that so many tokens can fit
        seen = probe * (_sample_flops(geometry, 0.0) + PROBED * _cut_flops(geometry, 0.54 * fitted, 0.42 * fitted**2))
        return SolveWork(task.name, begun.flops + task.pieces * of_width, begun.steps, seen, task.pieces, begun)
    if any(moment.point == "o.in" and moment.heads == 1 for moment in task.moments):
        bases = min(BASES, max(1, geometry.head_dim // multiple))
        return SolveWork(task.name, bases * BASE_FLOPS * hidden**3, 0)
    return solve_work(task, geometry, tokens)


def _multiple(task: Task, manifest: Manifest, geometry: LayerGeometry) -> int:
    """What the ranks of a task are multiples of; of one that only bits are chosen for, no matter."""
    entries = [entry.in_steps_of(manifest.rank_multiple) for entry in manifest.methods]
    return entries[task.method].multiple(geometry.hidden) if task.method < len(entries) else 1


def _elimination(name: str, geometry: LayerGeometry, share: float, others: float) -> SolveWork:
    """Of a share of an MLP's channels, and other operations besides. kernels/elimination.py.

    N³ for the inverse, 3 N² for each removal, D N² for the gram of W_down, 2 D N for each removal in the refit.
    """
    width = geometry.intermediate
    removed = int(share * width)
    flops = width**3 + 3.0 * removed * width**2 + geometry.hidden * width * (width + 2.0 * removed)
    return SolveWork(name, flops + others, removed)


def _sample_flops(geometry: LayerGeometry, kept: float) -> float:
    """Per token of the sample: what the dense MLP gives and, where channels are kept, what a cut one does."""
    return 6.0 * geometry.hidden * geometry.intermediate + (_cut_flops(geometry, kept, kept**2) if kept else 0.0)


def _cut_flops(geometry: LayerGeometry, width: float, square: float) -> float:
    """Per token: gate and up on a share of the channels, and the sums that down is fitted by; means of k and of k².

    One triangle of moments. The product with the targets, of float32, counts twice.
    """
    hidden, inner = geometry.hidden, geometry.intermediate
    return 8.0 * width * hidden * inner + square * inner**2 + hidden**2


def _pair_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Of one triangle of Σ x xᵀ, and of Σ e xᵀ, in float32 at half the rate, for a token."""
    features = point_features(moment.point, geometry)
    return features * (features + 4.0 * geometry.hidden)


def solve_work(task: Task, geometry: LayerGeometry, tokens: int) -> SolveWork:
    """The moments' eigenproblems; for a whole moment of the MLP's channels, an elimination with its refit.

    For a sample, of all calibration `tokens` at most, what the MLP gives on it, whole and cut, and the fit of down.
    """
    found = SolveWork(task.name, 0.0, 0)
    for moment in task.moments:
        width = moment_width(moment, geometry)
        if moment.kind == "sample":
            single = min(moment.tokens, tokens) * _sample_flops(geometry, 1 - REMOVED_SHARE)
            found = replace(found, sample_flops=found.sample_flops + single)
        elif moment.point == "down.in" and moment.heads == 1:
            felt = any(other.kind == "gradient" for other in task.moments)  # then W_down's energy is taken apart
            energy = geometry.hidden * float(geometry.intermediate) ** 2 if felt else 0.0
            removing = _elimination(task.name, geometry, REMOVED_SHARE, energy)
            found = replace(found, flops=found.flops + removing.flops, steps=found.steps + removing.steps)
        elif not moment.diagonal:
            eigen = EIGEN_FLOPS * moment.groups * width**3
            found = replace(found, flops=found.flops + eigen, eigen_flops=found.eigen_flops + eigen)
    return found
