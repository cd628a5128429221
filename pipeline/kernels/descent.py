"""Training steps whose lengths are relative to the parameters. docs/methods.md#refinement.

A matrix moves along its momentum with all singular values made equal (Muon, Jordan et al. 2024), a vector as by Adam.
Legend: M rows and N columns of the wider form, M <= N; K blocks of B of these rows, the last filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = 0.9
SQUARES = 0.95  # decay of a vector's mean squares
QUINTIC = (3.4445, -4.7750, 2.0315)  # of the published iteration: singular values end between 0.7 and 1.2
ITERATIONS = 5
REUSED = 3  # steps that share an equalizer
# Rows whose singular values are made equal together. All rows of a large layer at once would cost more than its passes.
BLOCK = 1024
SQUARE_PRODUCTS = 4 * ITERATIONS - 3  # products of (B, B) matrices


class Descent:
    """Changes parameters by their gradients. A step changes neither a tensor without a gradient nor its momentum."""

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

        A tensor of zeros gets the scale of the smallest other tensor.
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
    """Return E (…, K, B, B), symmetric, which gives the blocks of a matrix singular values between 0.7 and 1.2.

    The matrix is (…, rows, columns); its shorter side is cut in blocks of at most `BLOCK`. E is a polynomial of each
    block's Gram matrix. Tiny singular values stay smaller. E of a block of zeros is zero.
    """
    block_KBN = _blocks(matrix)
    # Shorter blocks count as zeros, because E, up to 3.4445⁵ = 485 over the norm, would overflow.
    shortest = 1024 * torch.finfo(matrix.dtype).tiny
    norm_K11 = torch.linalg.matrix_norm(block_KBN, keepdim=True)
    block_KBN = block_KBN / norm_K11.clamp_min(shortest)
    gram_KBB = block_KBN @ block_KBN.mT
    whole_KBB: Tensor | None = None
    linear, cubic, quintic = QUINTIC
    for iteration in range(ITERATIONS):
        step_KBB = cubic * gram_KBB + quintic * (gram_KBB @ gram_KBB)
        step_KBB.diagonal(dim1=-2, dim2=-1).add_(linear)
        whole_KBB = step_KBB if whole_KBB is None else step_KBB @ whole_KBB
        if iteration + 1 < ITERATIONS:
            gram_KBB = step_KBB @ gram_KBB @ step_KBB
    assert whole_KBB is not None
    result_KBB: Tensor = torch.where(norm_K11 < shortest, 0.0, whole_KBB / norm_K11)
    return result_KBB


def equalized(matrix: Tensor, equalizer_KBB: Tensor) -> Tensor:
    """Return the product of a matrix and its `equalizer`, on its shorter side."""
    wide_MN = (equalizer_KBB @ _blocks(matrix)).flatten(-3, -2)[..., : min(matrix.shape[-2:]), :]
    return wide_MN if _is_wide(matrix) else wide_MN.mT


def descent_flops(rows: int, columns: int) -> float:
    """Return the operations of a step for a matrix."""
    short, long = sorted((rows, columns))
    blocks, size = _cut(short)
    square = 2.0 * blocks * size**2 * long
    return square + (square + 2.0 * SQUARE_PRODUCTS * blocks * size**3) / REUSED


def _cut(short: int) -> tuple[int, int]:
    """Return the number of blocks of a side, and their size."""
    blocks = max(1, -(-short // BLOCK))
    return blocks, -(-short // blocks)


def _blocks(matrix: Tensor) -> Tensor:
    """Return the blocks (…, K, B, N) of a matrix in its wider form."""
    wide_MN = matrix if _is_wide(matrix) else matrix.mT
    blocks, size = _cut(wide_MN.shape[-2])
    missing = blocks * size - wide_MN.shape[-2]
    if missing:
        wide_MN = torch.nn.functional.pad(wide_MN, (0, 0, 0, missing))
    return wide_MN.reshape(*wide_MN.shape[:-2], blocks, size, wide_MN.shape[-1])


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[-2] <= matrix.shape[-1]


def _root_mean_square(values: Tensor) -> float:
    return float(values.detach().square().mean().sqrt()) if values.numel() else 0.0
