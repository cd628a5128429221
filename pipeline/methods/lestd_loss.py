"""Predicted loss of Tucker decompositions by size. docs/methods.md#curves for LeSTD.

Legend: D hidden, F outputs of a projection, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from manifests.records import Curve
from pipeline.families.blocks import Block, Matrix
from pipeline.kernels.sensitivity import change_loss
from pipeline.methods.method import Moment, Statistics
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, steps, to_columns

SOLVED = (0.03, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)  # solved sizes: 0 is the least size, 1 the largest
CHOICES = 64


def moments(block: Block) -> tuple[Moment, ...]:
    """Return the moments of each matrix's input and of the gradients at its outputs."""
    inputs, gradients = map(input_moment, block.matrices), map(output_gradient, block.matrices)
    return tuple(dict.fromkeys((*inputs, *gradients)))


def loss_of(changes: Mapping[Matrix, Tensor], statistics: Statistics) -> float:
    """Sum ½ tr(G Δ C Δᵀ) over matrices, as if their errors were not correlated; changes are (out, in)."""
    return sum(
        change_loss(change, statistics.mean(input_moment(matrix))[0], statistics.mean(output_gradient(matrix))[0])
        for matrix, change in changes.items()
    )


def matrix_changes(block: Block, errors: Mapping[str, Tensor]) -> dict[Matrix, Tensor]:
    """Map each matrix to its change (out, in).

    `errors`: role -> the error (D, width, H) of the weight in its stacked tensor.
    """
    return {
        matrix: errors[matrix.role].permute(0, 2, 1).flatten(1)
        if matrix.writes_stream
        else errors[matrix.role].permute(2, 1, 0).flatten(0, 1)
        for matrix in block.matrices
    }


def curve(variable: RankVariable, cache: int, loss_at: Callable[[int], float]) -> Curve:
    """Solve a few sizes, and interpolate the logarithm of the loss between them. The loss at the cap is 0.

    `cache`: the numbers per token that the group caches, at every size.
    """
    least, cap = variable.least, variable.cap
    while variable.cost(least) == variable.cost(min(least * 2, cap)) and least * 2 < cap:
        least *= 2  # sizes below the smallest that can be stored cost the same
    sizes = sorted({round(least + share * (cap - least)) for share in SOLVED} - {cap})
    solved = [(size, loss_at(size)) for size in sizes]
    choices = [size for size in steps(cap, variable.multiple, CHOICES, sizes[0]) if size < cap]
    points = [
        Point({variable.name: size}, round(variable.cost(size)), _between(solved, size), cache) for size in choices
    ]
    return to_columns([*points, Point({variable.name: cap}, round(variable.cost(cap)), 0.0, cache)])


def _between(solved: list[tuple[int, float]], size: int) -> float:
    below = max((pair for pair in solved if pair[0] <= size), default=solved[0])
    above = min((pair for pair in solved if pair[0] > size), default=solved[-1])
    if below[0] == above[0] or min(below[1], above[1]) <= 0.0:
        return below[1]
    share = (size - below[0]) / (above[0] - below[0])
    return math.exp((1.0 - share) * math.log(below[1]) + share * math.log(above[1]))
