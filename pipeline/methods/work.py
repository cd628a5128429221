"""The operations of curves, solves and rounding, which the cost model prices. docs/plan.md#work-of-a-layer.

Legend: D hidden, N channels of an MLP, k of them kept, n size of an eigenproblem, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Moment

REMOVED_SHARE = 0.25  # removed share of an MLP's channels, while ranks are unknown
CUT_SHARE = 0.65  # share of the full rank, while ranks are unknown
BASIS_SHARE = 0.75  # share of the values' full rank, while ranks are unknown
ALONE, ROUND_STEPS = 512, 3  # up to 512 channels, one is removed at a time; else a round of several costs 3 removals
BASES = 16  # the most ranks of the value basis that are compared
TURNS, GRADIENT_STEPS = 3, 14  # iterations of the fit of values and o in a curve; conjugate gradients in each
SOLVE_TURNS = 3  # average iterations of the fit in a solve: seven if values are cut, in about every other layer
GRADIENT_WAITS = 2  # the time of one conjugate gradient of small matrices, in removals
PROBED = 3  # widths of an MLP at which a sample is run: the smallest, one between, the largest
PROBES = (0.125, 0.375, 0.75)  # shares of the full rank of an MLP's readers at each
SAMPLE_TOKENS, LEAST_SAMPLE = 16, 65_536  # to refit down: per kept channel, and in all, if the text has that many
TRIED_SHARE, LEAST_TRIED = 4, 16_384  # the part of that, and the least, to choose bits: sizes that are only tried
PROBE_TOKENS, LEAST_PROBE = 3, 2048  # enough to measure the loss of a rank of the readers: per kept channel, in all
PROBE_OUTPUTS = 256  # a probe's loss is measured in at most this many random mixtures of outputs
FIT_TOKENS = 2  # tokens per channel, at least, to fit down to a sample
SWAPS = 32  # row swaps until a pivoted form's coefficients are small
SWAPPED_BYTES = 64  # moved for each coefficient and swap: magnitudes, their maximum, the update
WIDTH_BYTES = 200  # per width of an MLP's curve and each of D² numbers: two growing moments, two eigenproblems
COUNTS = ("products", "single", "factors", "vectors", "values", "steps", "columns", "sampled", "moved")


@dataclass(frozen=True)
class Work:
    """Counts of the operations of a curve, a solve or the rounding of a solution.

    Attributes:
        products: float64 operations of matrix products; `single`: float32 operations.
        factors: of Cholesky, LU, QR, triangular solves, and updates by few columns.
        vectors, values: sums of n³ over eigenproblems, with vectors and without.
        steps: removals of channels, one after another; `columns`: columns that are rounded one after another.
        sampled: operations on a sample, in the checkpoint's dtype.
        moved: bytes of device memory that elementwise work moves.
        pieces: the number of pieces of a curve; `shared`: the part of this work before them; None without pieces.
        repeated: float64 operations that each piece repeats.
    """

    products: float = 0.0
    factors: float = 0.0
    vectors: float = 0.0
    values: float = 0.0
    steps: int = 0
    sampled: float = 0.0
    moved: float = 0.0
    pieces: int = 1
    shared: Work | None = None
    repeated: float = 0.0
    single: float = 0.0
    columns: int = 0

    def __add__(self, other: Work) -> Work:
        """Add the counts of another. The result has the pieces of this one."""
        return replace(self, **{count: getattr(self, count) + getattr(other, count) for count in COUNTS})


def tried_tokens(sampled: int) -> int:
    """Return on how many of a sample's tokens sizes are fitted that are only tried, to choose bits."""
    return min(sampled, max(LEAST_TRIED, sampled // TRIED_SHARE))


def moment_width(moment: Moment, layer: LayerGeometry) -> int:
    """Return the width of one head's moment, or of the whole one."""
    return layer.features(moment.point) // moment.heads


def spectra(moments: Iterable[Moment], layer: LayerGeometry) -> Work:
    """Count the eigenproblems of some moments."""
    return Work(vectors=float(sum(moment.groups * moment_width(moment, layer) ** 3 for moment in moments)))


def directions(inputs: int) -> Work:
    """Count directions in a metric: factor the metric, transform a moment, take eigenvectors, transform back."""
    cube = float(inputs) ** 3
    return Work(6.0 * cube, cube / 3 + cube, vectors=cube)


def direction_losses(inputs: int) -> Work:
    """Count the losses of all ranks in a metric, without directions."""
    cube = float(inputs) ** 3
    return Work(4.0 * cube, cube / 3, values=cube)


def pivoted(outputs: float, inputs: float, rank: float) -> Work:
    """Count a pivoted form: QR of its left factor, LU, two solves and swaps. kernels/pivoted.py."""
    orthogonal = 4.0 * (outputs * rank**2 - rank**3 / 3)
    factors = orthogonal * 1.25 + 2.0 * (2.0 * rank**3 / 3 + 2.0 * outputs * rank**2)
    return Work(2.0 * rank**2 * inputs, factors, moved=SWAPS * SWAPPED_BYTES * outputs * rank)


def directed_stack(outputs: int, inputs: int) -> Work:
    """Count the factors, in the metric of the loss, of matrices with a common input."""
    rank = CUT_SHARE * min(outputs, inputs)
    return directions(inputs) + Work(2.0 * outputs * inputs * rank) + pivoted(outputs, inputs, rank)


def low_rank(matrices: Iterable[Matrix], inputs: int) -> Work:
    """Count the factors of those matrices that have so many inputs, times the root of their input's moment: the root,
    singular values from a Gram matrix, and factors."""
    outputs = sum(matrix.outputs for matrix in matrices if matrix.inputs == inputs)
    least = min(outputs, inputs)
    products = 2.0 * outputs * inputs * (inputs + least + CUT_SHARE * least) + 2.0 * inputs**2 * CUT_SHARE * least
    return Work(4.0 * float(inputs) ** 3 + products, vectors=float(inputs) ** 3 + float(least) ** 3)


def directed_output(writer: Matrix, width: int) -> Work:
    """Count the solve of v and o: fit both at a rank of the values, then factor o at its own rank. `width`: of a
    head's values."""
    hidden, features = writer.shape
    reduced = BASIS_SHARE * features
    rank = CUT_SHARE * min(reduced, hidden)
    product = Work(2.0 * hidden * reduced * (reduced + hidden) + 2.0 * rank * hidden * reduced)
    problem = Work(2.0 * hidden * features * (hidden + features), features**3 / 3)
    fit = value_fit(writer, width, reduced, SOLVE_TURNS)
    return directions(hidden) + problem + fit + product + pivoted(hidden, reduced, rank)


def value_fit(writer: Matrix, width: int, reduced: float, turns: int) -> Work:
    """Count a fit of values and o, with `reduced` numbers in all heads. kernels/value_output.py."""
    hidden, features = writer.shape
    solved = (turns + 1) * (reduced**3 / 3 + hidden * reduced**2) + (turns + 1) * hidden * reduced**2
    steps = turns * GRADIENT_STEPS
    solved += steps * 2.0 * width * reduced * (reduced + features)  # head by head: few columns at a time
    stepped = 32.0 * reduced * features + 8.0 * (reduced**2 + features**2)  # both products of a step and copies between
    refitted = 24.0 * reduced * (features + reduced + 2 * hidden)
    moved = steps * stepped + (turns + 1) * refitted
    return Work(turns * 2.0 * hidden * reduced**2, solved, steps=steps * GRADIENT_WAITS, moved=moved)


def value_curve(writer: Matrix, width: int, multiple: int) -> Work:
    """Count the fits of values and o at each rank of the basis, with eigenvalues for the ranks of o."""
    hidden, features = writer.shape
    products = 4.0 * hidden**3 + 4.0 * hidden * features * (hidden + features)
    work = Work(products, (hidden**3 + features**3) / 3, values=float(hidden) ** 3)
    bases = min(BASES, max(1, width // multiple))
    for place in range(1, bases):
        reduced = features * place / bases
        least = min(reduced, hidden)
        work += value_fit(writer, width, reduced, TURNS) + Work(2.0 * hidden * reduced * least, values=least**3)
    return work


def elimination(block: MLPBlock, share: float = REMOVED_SHARE, refit: bool = False) -> Work:
    """Count the elimination of a share of an MLP's channels. kernels/elimination.py.

    N³ for the inverse, D N² for W_down's gram, and 3 n² for each removal from n channels, or 2 D n more with its refit.
    """
    hidden, width = block.writer.outputs, block.width
    removed, together = int(share * width), max(1, width // ALONE)
    factors = width**3 + (width**3 - (width - removed) ** 3) * 1.0
    if refit:
        factors += hidden * (width**2 - (width - removed) ** 2)
    steps = removed if together == 1 else ROUND_STEPS * removed // together
    return Work(1.0 * hidden * width**2, factors, steps=steps)


def is_narrow(block: MLPBlock) -> bool:
    """Return True if the readers have fewer rows than inputs: eigenproblems are those of the rows, and the factors of
    the moments of width D are those of the layer, computed once for all experts."""
    return len(block.readers) * block.width < block.writer.outputs


def refit_flops(block: MLPBlock, kept: float) -> float:
    """Count the operations of refitting down on a part of the channels, from their moment."""
    if kept >= block.width:
        return 0.0
    return kept**3 / 3 + 2.0 * block.writer.outputs * kept * block.width


def mlp_fit(block: MLPBlock, tokens: int) -> Work:
    """Count the solve of an MLP with a sample of so many tokens, without elimination and eigenproblems of moments."""
    hidden, inner, readers = block.writer.outputs, block.width, len(block.readers)
    kept = (1 - REMOVED_SHARE) * inner
    rank = CUT_SHARE * min(readers * kept, hidden)
    metrics, vectors = 8.0 * hidden**3 + 2.0 * hidden**2 * inner + (4.0 * readers + 2.0) * hidden**2 * kept, 0.0
    if is_narrow(block):
        vectors = (readers * kept) ** 3 + kept**3
        metrics = 2.0 * hidden**2 * inner + 5.0 * hidden**2 * kept * (readers + 1)
    fits = refit_flops(block, kept) + kept**3 / 3 + 4.0 * hidden * kept**2 + 2.0 * readers * hidden * rank * kept
    whole = 2.0 * (readers + 1) * hidden * inner
    per_token = whole + 2.0 * rank * (hidden + readers * kept) + 2.0 * hidden * kept + kept**2
    fitted = min(tokens, max(LEAST_SAMPLE, SAMPLE_TOKENS * kept))
    stored = pivoted(readers * kept, hidden, rank) + pivoted(hidden, kept, CUT_SHARE * min(hidden, kept))
    return Work(metrics + fits, vectors=vectors, sampled=fitted * per_token) + stored


def mlp_curve(block: MLPBlock, pieces: int, tokens: int) -> Work:
    """Count an MLP's curve of so many widths, with a sample of so many tokens.

    It consists of the elimination down to the smallest width, a factor of the moment in the channels' order, the
    moments of each width and their eigenvalues and, at three widths, the directions of the readers and a sample.
    """
    hidden, inner, readers = block.writer.outputs, block.width, len(block.readers)
    widths = [inner * place / pieces for place in range(1, pieces + 1)]
    input_factor = 0.0 if is_narrow(block) else hidden**3 / 3
    ordered = Work(2.0 * hidden**2 * inner + hidden * inner**2, inner**3 / 3 + input_factor)
    shared = elimination(block, 1 - 1 / pieces) + ordered
    products, sampled = hidden**3 / 3 + (4.0 * readers + 2.0) * inner * hidden**2, 0.0
    probed = _spaced([width for width in widths if tokens >= FIT_TOKENS * width])
    values, vectors = (2 * pieces - len(probed)) * float(hidden) ** 3, len(probed) * float(hidden) ** 3
    turned, moved = 3.0 * hidden**3, WIDTH_BYTES * pieces * float(hidden) ** 2
    if is_narrow(block):
        rows = [(readers * width, width) for width in widths]
        products = sum(2.0 * row * hidden**2 + 2.0 * hidden * (row**2 + width**2) for row, width in rows)
        vectors = sum((readers * width) ** 3 for width in probed)
        values = sum(row**3 + width**3 for row, width in rows) - vectors
        moved = WIDTH_BYTES * sum(float(row) ** 2 for row, _ in rows)
    mixtures = min(PROBE_OUTPUTS, hidden)
    for width in probed:
        ranks = [share * min(readers * width, hidden) for share in PROBES]
        if is_narrow(block):
            turned = 3.0 * readers * width * hidden**2
        products += turned + refit_flops(block, width) + 2.0 * readers * max(ranks) * hidden * width
        products += len(ranks) * (width**3 / 3 + 2.0 * mixtures * width**2)
        whole = 2.0 * readers * hidden * inner + 4.0 * mixtures * inner
        cut = sum(2.0 * rank * (hidden + readers * width) + width**2 + 8.0 * mixtures * width for rank in ranks)
        sampled += min(tokens, max(LEAST_PROBE, PROBE_TOKENS * width)) * (whole + cut)
    grown = Work(products, vectors=vectors, values=values, sampled=sampled, moved=moved)
    repeated = ordered.products + ordered.factors + input_factor
    return replace(shared + grown, pieces=pieces, shared=shared, repeated=repeated)


def _spaced(widths: Sequence[float]) -> list[float]:
    count = min(PROBED, len(widths))
    return [widths[place * (len(widths) - 1) // max(1, count - 1)] for place in range(count)]
