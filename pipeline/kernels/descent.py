"""Steps of training whose lengths are shares of what they change. docs/methods.md#refinement.

A matrix moves along its momentum with all singular values made equal (Muon, Jordan et al. 2024), a vector as by Adam.
Legend: M rows and N columns of the wider form, M <= N.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = 0.9
SQUARES = 0.95  # decay of a vector's mean squares
QUINTIC = (3.4445, -4.7750, 2.0315)  # of the published iteration: singular values end between 0.7 and 1.2
ITERATIONS = 5
REUSED = 3  # steps that share an equalizer, which costs a large layer more than its passes
SQUARE_PRODUCTS = 4 * ITERATIONS - 3  # products of (M, M) matrices


class Descent:
    """Changes parameters by their gradients. A tensor without a gradient in a step stays, its momentum too."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.momenta = [torch.zeros_like(values) for values in parameters]
        self.squares = [None if values.ndim > 1 else torch.zeros_like(values) for values in parameters]
        self.equalizers: dict[int, Tensor] = {}
        self.counts = [0] * len(parameters)
        sizes = [_root_mean_square(values) for values in parameters]
        least = min((size for size in sizes if size > 0), default=0.0)
        self.sizes = [size or least for size in sizes]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take a step: a tensor's root mean square change is `rate` of its own root mean square at first.

        A tensor of zeros counts as large as the smallest of the others.
        """
        for place, values in enumerate(self.parameters):
            if values.grad is None:
                continue
            momentum = self.momenta[place].lerp_(values.grad, 1.0 - MOMENTUM)
            self.counts[place] += 1
            squares, count = self.squares[place], self.counts[place]
            if squares is None:
                ahead = torch.lerp(values.grad, momentum, MOMENTUM)
                if (count - 1) % REUSED == 0:
                    self.equalizers[place] = equalizer(ahead)
                direction = equalized(ahead, self.equalizers[place])
            else:
                squares.lerp_(values.grad.square(), 1.0 - SQUARES)
                roots = (squares / (1.0 - SQUARES**count)).sqrt_()
                direction = momentum / (1.0 - MOMENTUM**count) / roots.clamp_min_(torch.finfo(roots.dtype).tiny)
            size = _root_mean_square(direction)
            if size > 0:
                values.add_(direction, alpha=-rate * self.sizes[place] / size)


def equalizer(matrix: Tensor) -> Tensor:
    """Return E (…, M, M), symmetric, which gives a matrix (…, rows, columns) singular values between 0.7 and 1.2.

    That is a polynomial of its Gram matrix. Those of nearly nothing stay smaller.
    """
    wide_MN = matrix if _is_wide(matrix) else matrix.mT
    norm_11 = torch.linalg.matrix_norm(wide_MN, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    wide_MN = wide_MN / norm_11
    gram_MM = wide_MN @ wide_MN.mT
    whole_MM: Tensor | None = None
    linear, cubic, quintic = QUINTIC
    for iteration in range(ITERATIONS):
        step_MM = cubic * gram_MM + quintic * (gram_MM @ gram_MM)
        step_MM.diagonal(dim1=-2, dim2=-1).add_(linear)
        whole_MM = step_MM if whole_MM is None else step_MM @ whole_MM
        if iteration + 1 < ITERATIONS:
            gram_MM = step_MM @ gram_MM @ step_MM
    assert whole_MM is not None
    result_MM: Tensor = whole_MM / norm_11
    return result_MM


def equalized(matrix: Tensor, equalizer_MM: Tensor) -> Tensor:
    """Return the product of a matrix and its `equalizer`, on its shorter side."""
    return equalizer_MM @ matrix if _is_wide(matrix) else matrix @ equalizer_MM


def descent_flops(rows: int, columns: int) -> float:
    """Return the operations of a step for a matrix."""
    short, long = sorted((rows, columns))
    square = 2.0 * short**2 * long
    return square + (square + 2.0 * SQUARE_PRODUCTS * short**3) / REUSED


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[-2] <= matrix.shape[-1]


def _root_mean_square(values: Tensor) -> float:
    return float(values.detach().square().mean().sqrt()) if values.numel() else 0.0
