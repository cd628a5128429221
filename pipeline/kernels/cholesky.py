"""Cholesky factor and inverse in place, by blocks of a size fixed by the order alone.

n the order of a symmetric A, b a block. Only the lower triangle of A is read; the upper one is undefined afterwards.
Matrix products do the work on any device, with a workspace of b x n and without a library's limit on n.
"""

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
LARGE = 64 * BLOCK  # matrices of this order or more get blocks four times as wide: fewer, larger products


def blocks_of(size: int) -> list[slice]:
    """Cut 0..size-1 into blocks."""
    width = BLOCK if size < LARGE else 4 * BLOCK
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def empty_lower(size: int, device: torch.device) -> Tensor:
    """Allocate a float64 n x n matrix whose lower triangle alone will be used.

    On a CPU, the matrix is a separate memory mapping, so that pages above the diagonal take no memory. torch would
    request huge pages, and hardly any huge page is wholly above the diagonal.
    """
    if device.type != "cpu":
        return torch.empty(size, size, dtype=torch.float64, device=device)
    mapped = mmap.mmap(-1, size * size * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.float64).view(size, size)


def factor_(matrix_nn: Tensor, least_pivot: float = 0.0) -> float | None:
    """Factor A = L Lᵀ in place, with n³/3 multiplications and additions. Returns None on success.

    If a pivot (squared diagonal of L) is not positive or below `least_pivot`, returns an upper bound of A's least
    eigenvalue instead: a jitter below its negative cannot help. A is then overwritten.
    """
    size = matrix_nn.shape[0]
    for block in blocks_of(size):
        corner_bb = matrix_nn[block, block]
        factor_bb, info = torch.linalg.cholesky_ex(corner_bb)
        pivots_b = factor_bb.diagonal().square()
        if int(info) or not bool((torch.isfinite(pivots_b) & (pivots_b >= least_pivot)).all()):
            return _eigenvalue_bound(matrix_nn, block)
        corner_bb.copy_(factor_bb)
        below_nb = matrix_nn[block.stop :, block]
        if len(below_nb) == 0:
            break
        below_nb.copy_(torch.linalg.solve_triangular(factor_bb, below_nb.mT, upper=False).mT)
        for rest in blocks_of(len(below_nb)):
            trailing = matrix_nn[block.stop + rest.start :, block.stop + rest.start : block.stop + rest.stop]
            trailing.addmm_(below_nb[rest.start :], below_nb[rest].mT, alpha=-1)
    return None


def jittered_factor(
    fill_: Callable[[Tensor], None], into_nn: Tensor, least_pivot: float, jitters: tuple[float, ...]
) -> float:
    """Factor A into `into_nn` with the least of `jitters` that suffices; return it, or 0.0 if none is needed.

    `fill_` writes the lower triangle of A. Jitters that cannot suffice are skipped. Raises ValueError if none does.
    """
    fill_(into_nn)
    bound = factor_(into_nn, least_pivot)
    if bound is None:
        return 0.0
    for jitter in jitters:
        if jitter <= -bound:
            continue
        fill_(into_nn)
        into_nn.diagonal().add_(jitter)
        failed = factor_(into_nn)
        if failed is None:
            return jitter
        bound = min(bound, failed - jitter)
    raise ValueError(
        f"moment of shape {tuple(into_nn.shape)} is not positive semidefinite: no Cholesky factor with a relative "
        f"jitter up to {jitters[-1]:g}"
    )


def inverse_(factor_nn: Tensor) -> None:
    """Replace L by the lower triangle of (L Lᵀ)⁻¹, with 2 n³/3 multiplications and additions."""
    blocks = blocks_of(factor_nn.shape[0])
    for number in reversed(range(len(blocks))):
        block = blocks[number]
        corner_bb = factor_nn[block, block]
        corner_bb.copy_(_triangle_inverse(corner_bb))
        for rows in reversed(blocks[number + 1 :]):  # from below: a block of rows needs the unchanged blocks above it
            between = slice(block.stop, rows.stop)
            factor_nn[rows, block] = -(factor_nn[rows, between] @ factor_nn[between, block]) @ corner_bb
    for rows in blocks:
        below = slice(rows.stop, None)
        product_bn = factor_nn[rows, rows].mT @ factor_nn[rows, : rows.stop]
        factor_nn[rows, : rows.stop] = product_bn.addmm_(factor_nn[below, rows].mT, factor_nn[below, : rows.stop])


def inverse_diagonal(factor_nn: Tensor) -> Tensor:
    """diag((L Lᵀ)⁻¹): squared column norms of L⁻¹, a block of columns at a time, n³/3 multiplications and additions."""
    size = factor_nn.shape[0]
    diagonal_n, blocks = factor_nn.new_empty(size), blocks_of(size)
    corners = [_triangle_inverse(factor_nn[block, block]) for block in blocks]
    for number, block in enumerate(blocks):
        # The columns of L⁻¹ are zero above the diagonal.
        columns_nb = factor_nn.new_empty(size - block.start, block.stop - block.start)
        columns_nb[: block.stop - block.start] = corners[number]
        for rows, corner_bb in zip(blocks[number + 1 :], corners[number + 1 :], strict=True):
            above_nb = columns_nb[: rows.start - block.start]
            pulled_bb = factor_nn[rows, block.start : rows.start] @ above_nb
            columns_nb[rows.start - block.start : rows.stop - block.start] = -(corner_bb @ pulled_bb)
        diagonal_n[block] = columns_nb.square_().sum(dim=0)
    return diagonal_n


def _triangle_inverse(factor_bb: Tensor) -> Tensor:
    eye_bb = torch.eye(len(factor_bb), dtype=factor_bb.dtype, device=factor_bb.device)
    inverse_bb: Tensor = torch.linalg.solve_triangular(factor_bb, eye_bb, upper=False)
    return inverse_bb


def _eigenvalue_bound(matrix_nn: Tensor, block: slice) -> float:
    """vᵀAv / vᵀv of v = (−L⁻ᵀ L₂ᵀ u, u): u the least eigenvector of the Schur complement, L₂ the block's rows of L."""
    values_b, vectors_bb = torch.linalg.eigh(matrix_nn[block, block])
    pull_p1 = matrix_nn[block, : block.start].mT @ vectors_bb[:, :1]
    lead_p1 = torch.linalg.solve_triangular(matrix_nn[: block.start, : block.start].mT, pull_p1, upper=True)
    return float(values_b[0] / (1.0 + lead_p1.square().sum()))
