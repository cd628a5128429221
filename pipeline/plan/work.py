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
from pipeline.samples import held_out_windows

ROWS_PER_PRODUCT = 4096  # tokens whose product is rounded and added at once
ADDED_BYTES = 24  # of device memory for each number: the product written and read, the float64 sum read and written
COSINE_BYTES = 48  # for each hidden number: read, widened to float64, scaled, multiplied
REMOVED_SHARE = 0.25  # of an MLP's channels, where ranks are not known yet
EIGEN_FLOPS, VALUES_FLOPS = 10.0, 4.0  # times n³: with vectors, and without, as long as both take on a CPU
BACK, BACK_AGAIN = 3, 3 + 7  # forward passes that a backward pass costs; with a second: once forth, and two blocks
WALKED, WALKED_SHORT = 4, 4  # layers that a walk of corrections goes through, to the end and to their attention's
COMPARED_TOKENS = 128  # that both models go through side by side, as `verify` does again
ALONE, ROUND_STEPS = 512, 3  # channels of which one goes at a time; removals that a round of several waits for
BASES = 16  # ranks of the value basis that are compared at most
TURNS, GRADIENT_STEPS = 3, 24  # of the fit of values and o; conjugate gradients in each
GRADIENT_WAITS = 2  # removals of an elimination that take as long as one of those where matrices are small
PROBED = 3  # widths of an MLP at which the activation is looked at: the smallest, the largest, and between
PROBES = (0.125, 0.375, 0.75)  # shares of the full rank of gate and up at each
SAMPLE_TOKENS, LEAST_SAMPLE = 16, 65_536  # on which down is fitted again, for each channel that stays, and in all
PROBE_TOKENS, LEAST_PROBE = 3, 2048  # of the sample, for each channel, and in all
PROBE_OUTPUTS = 256  # mixtures of outputs at most
FIT_TOKENS = 2  # for each channel that is fitted, at least
CUT_SHARE = 0.5  # of the full rank of gate and up, where ranks are not known yet


@dataclass(frozen=True)
class SolveWork:
    """One task: float64 operations, of them those of eigenproblems, those on a sample in the checkpoint's dtype, and
    removals that wait for one another.

    Of a curve: `pieces` into which it may be cut, of the above what is done before (`begun`, None: it is not cut), and
    the float64 operations that each part does again.
    """

    name: str
    flops: float
    steps: int
    sample_flops: float = 0.0
    pieces: int = 1
    begun: SolveWork | None = None
    eigen_flops: float = 0.0
    again_flops: float = 0.0


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
    samples, sequence = (calibration.samples, calibration.sequence_length) if calibration else (0, 0)
    tokens = samples * sequence
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
    held_out = held_out_windows(samples, samples, sequence) * sequence if calibration else 0
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
        gradient_bytes=8 * sum(triangle_numbers(moment, layer) for moment in gradients),
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

    Of an MLP whose widths are compared, of v and o at each rank of the basis, of what reads the layer's input, where it
    goes by the loss; of others, what solving them takes.
    """
    samples = [min(moment.tokens, tokens) for moment in task.moments if moment.kind == "sample"]
    if samples:
        return _mlp_curve(task, geometry, samples[0])
    if any(moment.point == "o.in" and moment.heads == 1 for moment in task.moments):
        return _value_curve(task, geometry, min(BASES, max(1, geometry.head_dim // multiple)))
    pulls = sum(moment.point.startswith("pull:") for moment in task.moments)
    if pulls:
        eigen = pulls * VALUES_FLOPS * geometry.hidden**3
        return SolveWork(task.name, pulls * (1 / 3 + 4.0) * geometry.hidden**3 + eigen, 0, eigen_flops=eigen)
    return solve_work(task, geometry, tokens)


def _mlp_curve(task: Task, geometry: LayerGeometry, tokens: int) -> SolveWork:
    """An elimination down to the smallest width and a factor in its order; moments that grow from width to width, and
    their eigenvalues; at three widths the directions of gate and up, and a sample of so many tokens.
    """
    hidden, inner, readers = geometry.hidden, geometry.intermediate, _readers(geometry)
    widths = [inner * place / task.pieces for place in range(1, task.pieces + 1)]
    ordered = hidden**3 / 3 + 2.0 * hidden**2 * inner + inner**3 / 3 + hidden * inner**2
    begun = _elimination("begun", geometry, 1 - 1 / task.pieces)
    begun = replace(begun, flops=begun.flops + ordered)
    flops, seen = begun.flops + hidden**3 / 3 + (4.0 * readers + 2.0) * inner * hidden**2, 0.0
    probed = _spaced([width for width in widths if tokens >= FIT_TOKENS * width])
    eigen = (2 * task.pieces * VALUES_FLOPS + len(probed) * (EIGEN_FLOPS - VALUES_FLOPS)) * hidden**3
    mixtures = min(PROBE_OUTPUTS, hidden)
    for width in probed:
        ranks = [share * min(readers * width, hidden) for share in PROBES]
        flops += 3.0 * hidden**3 + _refit_flops(geometry, width) + 2.0 * readers * max(ranks) * hidden * width
        flops += len(ranks) * (width**3 / 3 + 2.0 * mixtures * width**2)
        whole = 2.0 * readers * hidden * inner + 4.0 * mixtures * inner
        cut = sum(2.0 * rank * (hidden + readers * width) + width**2 + 8.0 * mixtures * width for rank in ranks)
        seen += min(tokens, max(LEAST_PROBE, PROBE_TOKENS * width)) * (whole + cut)
    return SolveWork(task.name, flops + eigen, begun.steps, seen, task.pieces, begun, eigen, ordered + hidden**3 / 3)


def _spaced(widths: Sequence[float]) -> list[float]:
    count = min(PROBED, len(widths))
    return [widths[place * (len(widths) - 1) // max(1, count - 1)] for place in range(count)]


def _value_curve(task: Task, geometry: LayerGeometry, bases: int) -> SolveWork:
    """A fit of values and o at each rank of the basis, and the eigenvalues by which a rank of o is told."""
    hidden, features = geometry.hidden, geometry.heads * geometry.head_dim
    flops = hidden**3 / 3 + 4.0 * hidden**3 + 4.0 * hidden * features * (hidden + features)
    eigen = VALUES_FLOPS * hidden**3
    for place in range(1, bases):
        reduced = features * place / bases
        refit, encoder = reduced**3 / 3 + hidden * reduced**2, 3.0 * hidden * reduced**2
        encoder += GRADIENT_STEPS * 2.0 * geometry.head_dim * reduced * (reduced + features)
        flops += (TURNS + 1) * refit + TURNS * encoder + hidden * reduced**2
        flops += 2.0 * hidden * reduced * min(reduced, hidden)
        eigen += VALUES_FLOPS * min(reduced, hidden) ** 3
    waits = (bases - 1) * TURNS * GRADIENT_STEPS * GRADIENT_WAITS
    return SolveWork(task.name, flops + eigen, waits, eigen_flops=eigen)


def _multiple(task: Task, manifest: Manifest, geometry: LayerGeometry) -> int:
    """What the ranks of a task are multiples of; of one that only bits are chosen for, no matter."""
    entries = [entry.in_steps_of(manifest.rank_multiple) for entry in manifest.methods]
    return entries[task.method].multiple(geometry.hidden) if task.method < len(entries) else 1


def _elimination(name: str, geometry: LayerGeometry, share: float, refit: bool = False) -> SolveWork:
    """Of a share of an MLP's channels. kernels/elimination.py.

    N³ for the inverse, 3 n² for each removal from n channels, D N² for W_down's gram; 2 D n for each removal with its
    refit.
    """
    hidden, width = geometry.hidden, geometry.intermediate
    removed, together = int(share * width), max(1, width // ALONE)
    flops = width**3 + (width**3 - (width - removed) ** 3) + 1.0 * hidden * width**2
    if refit:
        flops += hidden * (width**2 - (width - removed) ** 2)
    return SolveWork(name, flops, removed if together == 1 else ROUND_STEPS * removed // together)


def _refit_flops(geometry: LayerGeometry, kept: float) -> float:
    """Of down on a part of the channels, from their moment."""
    if kept >= geometry.intermediate:
        return 0.0
    return kept**3 / 3 + 2.0 * geometry.hidden * kept * geometry.intermediate


def _readers(geometry: LayerGeometry) -> int:
    """How many roles read the MLP's input."""
    return sum(role in geometry.roles for role in ("gate", "up"))


def _pair_flops(moment: Moment, geometry: LayerGeometry) -> float:
    """Of one triangle of Σ x xᵀ, and of Σ e xᵀ, in float32 at half the rate, for a token."""
    features = point_features(moment.point, geometry)
    return features * (features + 4.0 * geometry.hidden)


def solve_work(task: Task, geometry: LayerGeometry, tokens: int) -> SolveWork:
    """The moments' eigenproblems; for a whole moment of the MLP's channels, an elimination with its refit.

    For a sample, of all calibration `tokens` at most, what the MLP gives on it, whole and cut, and the fits of down.
    """
    found = SolveWork(task.name, 0.0, 0)
    samples = [min(moment.tokens, tokens) for moment in task.moments if moment.kind == "sample"]
    for moment in task.moments:
        width = moment_width(moment, geometry)
        if moment.point == "down.in" and moment.heads == 1:
            removing = _elimination(task.name, geometry, REMOVED_SHARE, refit=not samples)
            apart = not samples and any(other.kind == "gradient" for other in task.moments)
            energy = (
                geometry.hidden * float(geometry.intermediate) ** 2 if apart else 0.0
            )  # of W_down, not what is felt
            flops = found.flops + removing.flops + energy
            found = replace(found, flops=flops, steps=found.steps + removing.steps)
        elif not moment.diagonal and moment.kind != "sample":
            eigen = EIGEN_FLOPS * moment.groups * width**3
            found = replace(found, flops=found.flops + eigen, eigen_flops=found.eigen_flops + eigen)
    if samples:
        fitting, sample = _fit_flops(geometry)
        fitted = min(samples[0], max(LEAST_SAMPLE, SAMPLE_TOKENS * (1 - REMOVED_SHARE) * geometry.intermediate))
        found = replace(found, flops=found.flops + fitting, sample_flops=fitted * sample)
    return found


def _fit_flops(geometry: LayerGeometry) -> tuple[float, float]:
    """Of an MLP that has a sample, where a share of its channels goes and of the rank of gate and up.

    float64 operations besides elimination and eigenproblems, and those of one token.
    """
    hidden, inner, readers = geometry.hidden, geometry.intermediate, _readers(geometry)
    kept = (1 - REMOVED_SHARE) * inner
    rank = CUT_SHARE * min(readers * kept, hidden)
    metrics = 8.0 * hidden**3 + 2.0 * hidden**2 * inner + (4.0 * readers + 2.0) * hidden**2 * kept
    fits = _refit_flops(geometry, kept) + kept**3 / 3 + 4.0 * hidden * kept**2 + 2.0 * readers * hidden * rank * kept
    whole = 2.0 * (readers + 1) * hidden * inner
    return metrics + fits, whole + 2.0 * rank * (hidden + readers * kept) + 2.0 * hidden * kept + kept**2
