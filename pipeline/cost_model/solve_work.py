"""The work of solving a task, or of comparing its sizes. docs/plan.md#work-of-a-layer.

Legend: D hidden, H heads, d head_dim, N intermediate, F width of a moment, R readers of the MLP's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.cost_model.completion_work import completion_flops, without_others
from pipeline.families.blocks import AttentionBlock, LatentAttentionBlock, MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Moment, Task

REMOVED_SHARE = 0.25  # removed share of an MLP's channels, while ranks are unknown
EIGEN_FLOPS, VALUES_FLOPS = 10.0, 4.0  # times n³, with and without vectors; equivalent to their time on a CPU
ALONE, ROUND_STEPS = 512, 3  # up to 512 channels, one is removed at a time; else a round of several costs 3 removals
BASES = 16  # the most ranks of the value basis that are compared
TURNS, GRADIENT_STEPS = 3, 14  # iterations of the fit of values and o in a curve; conjugate gradients in each
SOLVE_TURNS = 3  # average iterations of the fit in a solve: seven if values are cut, in about every other layer
GRADIENT_WAITS = 2  # the time of one conjugate gradient of small matrices, in removals
PROBED = 3  # widths of an MLP at which a sample is run: the smallest, one between, the largest
PROBES = (0.125, 0.375, 0.75)  # shares of the full rank of gate and up at each
SAMPLE_TOKENS, LEAST_SAMPLE = 16, 65_536  # tokens to refit down: per kept channel, and in all
PROBE_TOKENS, LEAST_PROBE = 3, 2048  # tokens of a probe: per channel, and in all
PROBE_OUTPUTS = 256  # the most mixtures of outputs
FIT_TOKENS = 2  # tokens per fitted channel, at least
CUT_SHARE = 0.65  # share of the full rank, while ranks are unknown
BASIS_SHARE = 0.75  # share of the values' full rank, while ranks are unknown
LATENT_CHOICES, FIT_CALLS = 56, 40  # most choices of rotated dimensions; evaluations of the loss of a normed latent
SWAPS = 32  # row swaps until a pivoted form's coefficients are small
SWAPPED_BYTES = 64  # moved for each coefficient and swap: magnitudes, their maximum, the update
WEIGHT_BYTES, MOMENT_BYTES = 160, 64  # per number of weights and moments: read, checked, float64, and back
WIDTH_BYTES = 200  # per width of an MLP's curve and each of D² numbers: two growing moments, two eigenproblems


@dataclass(frozen=True)
class SolveWork:
    """The work of one task.

    Attributes:
        flops: float64 operations, including eigenproblems and factors.
        steps: removals of channels, one after another.
        sample_flops: operations on a sample, in the checkpoint's dtype.
        pieces: the number of pieces of the curve.
        shared: the part of this work before the pieces; None without pieces.
        eigen_flops: float64 operations of eigenproblems.
        factor_flops: float64 operations of Cholesky, LU, QR, triangular solves, and updates by few columns.
        moved_bytes: bytes of device memory that elementwise work moves.
        repeated_flops: float64 operations that each piece of a curve repeats.
    """

    name: str
    flops: float
    steps: int
    sample_flops: float = 0.0
    pieces: int = 1
    shared: SolveWork | None = None
    eigen_flops: float = 0.0
    factor_flops: float = 0.0
    moved_bytes: float = 0.0
    repeated_flops: float = 0.0

    def plus(self, *others: SolveWork) -> SolveWork:
        """Add the work of others. The result has the pieces of this one."""
        every = (self, *others)
        return replace(
            self,
            flops=sum(each.flops for each in every),
            steps=sum(each.steps for each in every),
            sample_flops=sum(each.sample_flops for each in every),
            eigen_flops=sum(each.eigen_flops for each in every),
            factor_flops=sum(each.factor_flops for each in every),
            moved_bytes=sum(each.moved_bytes for each in every),
        )


def _attentions(geometry: LayerGeometry) -> tuple[AttentionBlock | LatentAttentionBlock, ...]:
    """Return the attention block whose values and output projection are compressed, or none if it is copied."""
    return geometry.attentions or ((geometry.latent_attention,) if geometry.latent_attention else ())


def _value_width(geometry: LayerGeometry) -> int:
    """Return the width of a value head."""
    (block,) = _attentions(geometry)
    return block.value_width if isinstance(block, LatentAttentionBlock) else block.head_dim


def triangle_numbers(moment: Moment, geometry: LayerGeometry) -> int:
    """Count the numbers of one triangle of each group's moment, or of its diagonal."""
    width = moment_width(moment, geometry)
    return moment.groups * (width if moment.diagonal else width * (width + 1) // 2)


def moment_width(moment: Moment, geometry: LayerGeometry) -> int:
    """Return the width of one head's moment, or of the whole one."""
    return geometry.features(moment.point) // moment.heads


def curve_work(task: Task, geometry: LayerGeometry, tokens: int, multiple: int = 1) -> SolveWork:
    """Return the work of comparing a task's sizes. docs/plan.md#work-of-a-layer.

    Three kinds of curves have their own arithmetic: those of MLPs, of v and o, and of readers of the layer's input in
    the metric of the loss. Any other curve takes as long as solving the task.
    """
    added = completion_flops(task, geometry, tokens)
    task = without_others(task, geometry)
    samples = [min(moment.tokens, tokens) for moment in task.moments if moment.kind == "sample"]
    contexts = [block.writer.reads for block in _attentions(geometry)]
    if _is_latent(task, geometry):
        work = _latent_work(geometry, LATENT_CHOICES, 0)
    elif samples:
        work = _mlp_curve(task, geometry.mlp_of(task.roles[0]), samples[0])
    elif any(moment.point in contexts and moment.heads == 1 for moment in task.moments):
        work = _value_curve(task, geometry, min(BASES, max(1, _value_width(geometry) // multiple)))
    elif pulls := [moment for moment in task.moments if moment.point.startswith("pull:")]:
        cube = sum(float(geometry.features(moment.point)) ** 3 for moment in pulls)
        eigen = VALUES_FLOPS * cube
        work = SolveWork(task.name, (1 / 3 + 4.0) * cube + eigen, 0, eigen_flops=eigen, factor_flops=cube / 3)
    else:
        return solve_work(task, geometry, tokens)
    return work.plus(_elementwise(task, geometry), SolveWork("", 0.0, 0, sample_flops=added))


def solve_work(task: Task, geometry: LayerGeometry, tokens: int, hinted: bool = False) -> SolveWork:
    """Return the work of solving a task.

    It consists of the moments' eigenproblems and, with a full moment of the MLP's channels, of an elimination with its
    refit. With a sample, at most all calibration `tokens`, the dense and the cut MLP run on it, and down is fitted.
    Matrices that are cut in the metric of the loss add the directions of the stack and its pivoted form.

    `hinted`: a curve was computed from the same moments, so that the kept channels of an MLP with a sample are known.
    """
    added = completion_flops(task, geometry, tokens)
    task = without_others(task, geometry)
    samples = [min(moment.tokens, tokens) for moment in task.moments if moment.kind == "sample"]
    points = {moment.point for moment in task.moments if moment.heads == 1}
    outputs = [{block.writer.reads, block.writer.feeds} for block in _attentions(geometry)]
    if _is_latent(task, geometry):
        return _elementwise(task, geometry).plus(_latent_work(geometry, 1, samples[0]))
    attention = geometry.latent_attention
    latents = [latent for latent in attention.latents if latent.reader.role in task.roles] if attention else []
    if attention and latents and attention.writer.role in task.roles:
        return _elementwise(task, geometry).plus(_directions(latents[0].width), _directed_output(geometry))
    if pulled := [point for point in points if point.startswith("pull:")]:
        return _elementwise(task, geometry).plus(_directed_stack(task, geometry, geometry.features(pulled[0])))
    if any(output <= points for output in outputs) and not any(moment.heads > 1 for moment in task.moments):
        return _elementwise(task, geometry).plus(_directed_output(geometry))
    work = _elementwise(task, geometry).plus(SolveWork("", 0.0, 0, sample_flops=added))
    mlps = {block.writer.reads: block for block in geometry.mlps if block.writer.role in task.roles}
    for moment in task.moments:
        width = moment_width(moment, geometry)
        if moment.point in mlps and moment.heads == 1 and len(task.roles) > 1:
            block = mlps[moment.point]
            if not (hinted and samples):
                work = work.plus(_elimination(block, REMOVED_SHARE, refit=not samples))
            if not samples and any(other.kind == "gradient" for other in task.moments):  # also W_down's energy
                work = work.plus(SolveWork("", geometry.hidden * float(block.width) ** 2, 0))
        elif not moment.diagonal and moment.kind != "sample" and not (samples and _narrow(_mlp(task, geometry))):
            eigen = EIGEN_FLOPS * moment.groups * width**3
            work = work.plus(SolveWork("", eigen, 0, eigen_flops=eigen))
            if moment.heads == 1 and all(other.kind == "value" for other in task.moments):
                work = work.plus(_low_rank(task, geometry, width))
    return work.plus(_fits(_mlp(task, geometry), samples[0])) if samples else work


def _mlp(task: Task, geometry: LayerGeometry) -> MLPBlock:
    return geometry.mlp_of(task.roles[0])


def _narrow(block: MLPBlock) -> bool:
    """Return True if the readers have fewer rows than inputs: eigenproblems are those of the rows, and the factors of
    the moments of width D are those of the layer, computed once for all experts."""
    return len(block.readers) * block.width < block.writer.outputs


def _is_latent(task: Task, geometry: LayerGeometry) -> bool:
    """Return True if a task makes attention latent, in which case it has a sample of the attention's inputs."""
    inputs = [block.input for block in geometry.attentions]
    return any(moment.kind == "sample" and moment.point in inputs for moment in task.moments)


def _latent_work(geometry: LayerGeometry, choices: int, tokens: int) -> SolveWork:
    """Return the work of the directions of keys and values, for each choice, and of a fit on a sample of `tokens`."""
    hidden, outputs = geometry.hidden, geometry.attention.cache_numbers
    rank = CUT_SHARE * min(outputs, hidden)
    eigen = choices * EIGEN_FLOPS * float(outputs) ** 3
    products = choices * 2.0 * outputs * hidden * (hidden + outputs)
    step = tokens * (4.0 * hidden * rank + 6.0 * rank * outputs + 2.0 * rank**2)
    return SolveWork("", eigen + products + FIT_CALLS * step, 0, eigen_flops=eigen)


def _elementwise(task: Task, geometry: LayerGeometry) -> SolveWork:
    """Return the elementwise work on a task's weights and moments before and after solving."""
    numbers = [triangle_numbers(moment, geometry) for moment in task.moments if moment.kind != "sample"]
    moved = WEIGHT_BYTES * geometry.numbers(task.roles) + MOMENT_BYTES * 2.0 * sum(numbers)
    return SolveWork(task.name, 0.0, 0, moved_bytes=moved)


def _directions(hidden: int) -> SolveWork:
    """Return the work of directions in a metric: factor the metric, transform a moment, take eigenvectors, transform
    back."""
    cube = float(hidden) ** 3
    eigen, factors = EIGEN_FLOPS * cube, cube / 3 + cube
    return SolveWork("", eigen + factors + 6.0 * cube, 0, eigen_flops=eigen, factor_flops=factors)


def _pivoted(outputs: float, inputs: float, rank: float) -> SolveWork:
    """Return the work of a pivoted form: QR of its left factor, LU, two solves and swaps. kernels/pivoted.py."""
    orthogonal = 4.0 * (outputs * rank**2 - rank**3 / 3)
    factors = orthogonal * 1.25 + 2.0 * (2.0 * rank**3 / 3 + 2.0 * outputs * rank**2)
    moved = SWAPS * SWAPPED_BYTES * outputs * rank
    return SolveWork("", factors + 2.0 * rank**2 * inputs, 0, factor_flops=factors, moved_bytes=moved)


def _low_rank(task: Task, geometry: LayerGeometry, inputs: int) -> SolveWork:
    """Return the work of factoring matrices times the root of their input moment: singular values from a Gram matrix,
    and factors."""
    matrices = (geometry.matrices[role] for role in task.roles if role in geometry.matrices)
    outputs = sum(matrix.outputs for matrix in matrices if matrix.inputs == inputs)
    least = min(outputs, inputs)
    eigen, rank = EIGEN_FLOPS * float(least) ** 3, CUT_SHARE * least
    roots = 4.0 * float(inputs) ** 3
    products = 2.0 * outputs * inputs * (inputs + least + rank) + 2.0 * inputs**2 * rank
    return SolveWork("", eigen + roots + products, 0, eigen_flops=eigen)


def _directed_stack(task: Task, geometry: LayerGeometry, inputs: int) -> SolveWork:
    """Return the work of factoring, in the metric of the loss, matrices with a common input of width `inputs`."""
    outputs = sum(geometry.weight_shape(role)[0] for role in task.roles)
    rank = CUT_SHARE * min(outputs, inputs)
    product = SolveWork("", 2.0 * outputs * inputs * rank, 0)
    return _directions(inputs).plus(product, _pivoted(outputs, inputs, rank))


def _directed_output(geometry: LayerGeometry) -> SolveWork:
    """Return the work on v and o: fit both at a rank of the values, then factor o at its own rank."""
    hidden, features = _attentions(geometry)[0].writer.shape
    reduced = BASIS_SHARE * features
    rank = CUT_SHARE * min(reduced, hidden)
    product = SolveWork("", 2.0 * hidden * reduced * (reduced + hidden) + 2.0 * rank * hidden * reduced, 0)
    damped = features**3 / 3
    problem = SolveWork("", 2.0 * hidden * features * (hidden + features) + damped, 0, factor_flops=damped)
    fit = _value_fit(geometry, reduced, SOLVE_TURNS)
    return _directions(hidden).plus(problem, fit, product, _pivoted(hidden, reduced, rank))


def _value_fit(geometry: LayerGeometry, reduced: float, turns: int) -> SolveWork:
    """Return the work of fitting values and o, with `reduced` numbers in all heads. kernels/value_output.py."""
    hidden, features = _attentions(geometry)[0].writer.shape
    solved = (turns + 1) * (reduced**3 / 3 + hidden * reduced**2) + (turns + 1) * hidden * reduced**2
    steps = turns * GRADIENT_STEPS
    # Head by head: few columns at a time.
    solved += steps * 2.0 * _value_width(geometry) * reduced * (reduced + features)
    products = turns * 2.0 * hidden * reduced**2
    stepped = 32.0 * reduced * features + 8.0 * (reduced**2 + features**2)  # both products of a step and copies between
    refitted = 24.0 * reduced * (features + reduced + 2 * hidden)
    moved = steps * stepped + (turns + 1) * refitted
    waits = steps * GRADIENT_WAITS
    return SolveWork("", solved + products, waits, factor_flops=solved, moved_bytes=moved)


def _mlp_curve(task: Task, block: MLPBlock, tokens: int) -> SolveWork:
    """Return the work of an MLP's curve.

    It consists of the elimination down to the smallest width, a factor of the moment in the channels' order, the
    moments of each width and their eigenvalues and, at three widths, the directions of the readers and a sample.
    """
    hidden, inner, readers = block.writer.outputs, block.width, len(block.readers)
    widths = [inner * place / task.pieces for place in range(1, task.pieces + 1)]
    ordered = hidden**3 / 3 + 2.0 * hidden**2 * inner + inner**3 / 3 + hidden * inner**2
    shared = replace(_elimination(block, 1 - 1 / task.pieces), name="shared")
    flops, seen = hidden**3 / 3 + (4.0 * readers + 2.0) * inner * hidden**2, 0.0
    probed = _spaced([width for width in widths if tokens >= FIT_TOKENS * width])
    eigen = (2 * task.pieces * VALUES_FLOPS + len(probed) * (EIGEN_FLOPS - VALUES_FLOPS)) * hidden**3
    directions, moved = 3.0 * hidden**3, WIDTH_BYTES * task.pieces * float(hidden) ** 2
    if _narrow(block):
        ordered -= hidden**3 / 3
        rows = [(readers * width, width) for width in widths]
        flops = sum(2.0 * row * hidden**2 + 2.0 * hidden * (row**2 + width**2) for row, width in rows)
        eigen = sum(VALUES_FLOPS * (row**3 + width**3) for row, width in rows)
        eigen += sum((EIGEN_FLOPS - VALUES_FLOPS) * (readers * width) ** 3 for width in probed)
        moved = WIDTH_BYTES * sum(float(row) ** 2 for row, _ in rows)
    mixtures = min(PROBE_OUTPUTS, hidden)
    for width in probed:
        ranks = [share * min(readers * width, hidden) for share in PROBES]
        if _narrow(block):
            directions = 3.0 * readers * width * hidden**2
        flops += directions + _refit_flops(block, width) + 2.0 * readers * max(ranks) * hidden * width
        flops += len(ranks) * (width**3 / 3 + 2.0 * mixtures * width**2)
        whole = 2.0 * readers * hidden * inner + 4.0 * mixtures * inner
        cut = sum(2.0 * rank * (hidden + readers * width) + width**2 + 8.0 * mixtures * width for rank in ranks)
        seen += min(tokens, max(LEAST_PROBE, PROBE_TOKENS * width)) * (whole + cut)
    factored = inner**3 / 3 + (0.0 if _narrow(block) else hidden**3 / 3)
    shared = shared.plus(SolveWork("", ordered, 0, factor_flops=factored))
    grown = SolveWork("", flops + eigen, 0, seen, eigen_flops=eigen, moved_bytes=moved)
    again = ordered + (0.0 if _narrow(block) else hidden**3 / 3)
    return replace(shared.plus(grown), name=task.name, pieces=task.pieces, shared=shared, repeated_flops=again)


def _spaced(widths: Sequence[float]) -> list[float]:
    count = min(PROBED, len(widths))
    return [widths[place * (len(widths) - 1) // max(1, count - 1)] for place in range(count)]


def _value_curve(task: Task, geometry: LayerGeometry, bases: int) -> SolveWork:
    """Return the work of fitting values and o at each rank of the basis, with eigenvalues for the ranks of o."""
    hidden, features = _attentions(geometry)[0].writer.shape
    factored = (hidden**3 + features**3) / 3
    flops = factored + 4.0 * hidden**3 + 4.0 * hidden * features * (hidden + features)
    eigen = VALUES_FLOPS * hidden**3
    work = SolveWork(task.name, flops + eigen, 0, eigen_flops=eigen, factor_flops=factored)
    for place in range(1, bases):
        reduced = features * place / bases
        values = VALUES_FLOPS * min(reduced, hidden) ** 3
        predicted = SolveWork("", 2.0 * hidden * reduced * min(reduced, hidden) + values, 0, eigen_flops=values)
        work = work.plus(_value_fit(geometry, reduced, TURNS), predicted)
    return work


def _elimination(block: MLPBlock, share: float, refit: bool = False) -> SolveWork:
    """Return the work of eliminating a share of an MLP's channels. kernels/elimination.py.

    N³ for the inverse, D N² for W_down's gram, and 3 n² for each removal from n channels, or 2 D n more with its refit.
    """
    hidden, width = block.writer.outputs, block.width
    removed, together = int(share * width), max(1, width // ALONE)
    factors = width**3 + (width**3 - (width - removed) ** 3) * 1.0
    if refit:
        factors += hidden * (width**2 - (width - removed) ** 2)
    steps = removed if together == 1 else ROUND_STEPS * removed // together
    return SolveWork("", factors + 1.0 * hidden * width**2, steps, factor_flops=factors)


def _refit_flops(block: MLPBlock, kept: float) -> float:
    """Count the operations of refitting down on a part of the channels, from their moment."""
    if kept >= block.width:
        return 0.0
    return kept**3 / 3 + 2.0 * block.writer.outputs * kept * block.width


def _fits(block: MLPBlock, tokens: int) -> SolveWork:
    """Return the work of solving an MLP with a sample, without elimination and eigenproblems."""
    hidden, inner, readers = block.writer.outputs, block.width, len(block.readers)
    kept = (1 - REMOVED_SHARE) * inner
    rank = CUT_SHARE * min(readers * kept, hidden)
    metrics, eigen = 8.0 * hidden**3 + 2.0 * hidden**2 * inner + (4.0 * readers + 2.0) * hidden**2 * kept, 0.0
    if _narrow(block):
        eigen = EIGEN_FLOPS * ((readers * kept) ** 3 + kept**3)
        metrics = eigen + 2.0 * hidden**2 * inner + 5.0 * hidden**2 * kept * (readers + 1)
    fits = _refit_flops(block, kept) + kept**3 / 3 + 4.0 * hidden * kept**2 + 2.0 * readers * hidden * rank * kept
    whole = 2.0 * (readers + 1) * hidden * inner
    per_token = whole + 2.0 * rank * (hidden + readers * kept) + 2.0 * hidden * kept + kept**2
    fitted = min(tokens, max(LEAST_SAMPLE, SAMPLE_TOKENS * kept))
    stored = _pivoted(readers * kept, hidden, rank), _pivoted(hidden, kept, CUT_SHARE * min(hidden, kept))
    return SolveWork("", metrics + fits, 0, fitted * per_token, eigen_flops=eigen).plus(*stored)
