"""A matrix of rank r as r of its own rows, and coefficients that give the others (docs/methods.md#pivoted-factors).

m outputs, D inputs, r rank, P the pivot rows, t the numerical rank.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_rank

# Below this share of the largest, a direction of the factors is rounding.
_DEPENDENT = 1e-10
# Rows are swapped while a coefficient exceeds this; |C| <= 1 is reached only in the limit.
_LARGEST = 1.1


class PivotedFactors(NamedTuple):
    """W (m, D) = rows at `indices` (r, ascending int64): `rows` (r, D); the others, in order: `coefficients` @ rows."""

    rows: Tensor
    coefficients: Tensor
    indices: Tensor


def pivoted(first_rD: Tensor, second_mr: Tensor) -> PivotedFactors:
    """Return the pivoted form of second @ first, exact but for rounding, with coefficients of magnitude at most 1.1.

    Partial pivoting on an orthonormal basis of the column space of `second` picks rows. They are swapped while a
    coefficient exceeds 1.1; each swap enlarges the volume of the picked rows by that factor (maximum volume; Goreinov
    et al., How to find a good submatrix, 2010). If the numerical rank t is below r, the first unpicked rows fill up,
    with coefficients 0. float64. Raises ValueError on shapes that do not fit, NaN, infinity, or r > m.
    """
    if first_rD.ndim != 2 or second_mr.ndim != 2 or second_mr.shape[1] != first_rD.shape[0]:
        raise ValueError(f"factors {tuple(second_mr.shape)} and {tuple(first_rD.shape)} do not fit")
    outputs, rank = second_mr.shape
    require_rank("rank", rank, outputs)
    require_finite("first", first_rD)
    require_finite("second", second_mr)
    first_rD, second_mr = first_rD.detach().to(torch.float64), second_mr.detach().to(torch.float64)
    basis_mt = _column_space(second_mr)
    picked_t, coefficients_mt = _large_volume(basis_mt)
    is_pivot_m = torch.zeros(outputs, dtype=torch.bool, device=basis_mt.device)
    is_pivot_m[picked_t] = True
    spare = (~is_pivot_m).nonzero()[: rank - picked_t.numel(), 0]
    indices_r, order_r = torch.cat((picked_t, spare)).sort()
    is_pivot_m[spare] = True
    padded_mr = torch.cat((coefficients_mt, coefficients_mt.new_zeros(outputs, spare.numel())), dim=1)
    return PivotedFactors(second_mr[indices_r] @ first_rD, padded_mr[~is_pivot_m][:, order_r].contiguous(), indices_r)


def pivoted_numbers(outputs: int, inputs: int, rank: int, bits: int) -> int:
    """Count the stored numbers of `bits` bits, including r indices of 32 bits; at most as many as the dense matrix."""
    indices = math.ceil(32 * rank / bits)
    return min(rank * inputs + (outputs - rank) * rank + indices, outputs * inputs)


def expand(form: PivotedFactors) -> Tensor:
    """Return W (m, D)."""
    outputs = form.indices.numel() + form.coefficients.shape[0]
    whole_mD = form.rows.new_empty(outputs, form.rows.shape[1])
    rest_m = torch.ones(outputs, dtype=torch.bool, device=form.indices.device).index_fill_(0, form.indices, False)
    whole_mD[form.indices] = form.rows
    whole_mD[rest_m] = form.coefficients @ form.rows
    return whole_mD


def _column_space(second_mr: Tensor) -> Tensor:
    """Return an orthonormal basis (m, t)."""
    sizes_r = torch.linalg.vector_norm(second_mr, dim=0)
    if float(sizes_r.max()) == 0.0:
        return second_mr[:, :0]
    scaled_mr = second_mr / torch.where(sizes_r > _DEPENDENT * sizes_r.max(), sizes_r, torch.inf)
    basis_mr: Tensor
    basis_mr, triangle_rr = torch.linalg.qr(scaled_mr)
    if float(triangle_rr.diagonal().abs().min()) > _DEPENDENT:
        return basis_mr
    left_mr: Tensor
    left_mr, values_r, _ = torch.linalg.svd(scaled_mr, full_matrices=False)
    return left_mr[:, : int((values_r > _DEPENDENT * values_r[0]).sum())].contiguous()


def _large_volume(basis_mt: Tensor) -> tuple[Tensor, Tensor]:
    """Pick rows (t,) of an orthonormal basis with locally maximal volume; also returns basis · basis[rows]⁻¹ (m, t)."""
    outputs, rank = basis_mt.shape
    device = basis_mt.device
    if rank == 0:
        return torch.zeros(0, dtype=torch.int64, device=device), basis_mt
    rows_t = _pivots(basis_mt)
    coefficients_mt = torch.linalg.solve(basis_mt[rows_t], basis_mt, left=False)
    for _ in range(4 * outputs):  # each swap multiplies the volume by more than 1.1: far fewer are needed
        highest_m, lowest_m = coefficients_mt.amax(dim=1), coefficients_mt.amin(dim=1)  # abs() would copy the matrix
        row = int(torch.maximum(highest_m, -lowest_m).argmax())
        column = int(coefficients_mt[row].abs().argmax())
        if abs(float(coefficients_mt[row, column])) <= _LARGEST:
            break
        pivot = coefficients_mt[row, column].clone()
        change_t = coefficients_mt[row].clone()
        change_t[column] -= 1.0
        coefficients_mt.addr_(coefficients_mt[:, column] / pivot, change_t, alpha=-1.0)
        rows_t[column] = row
    # Solved again from the basis: swaps accumulate rounding.
    return rows_t, torch.linalg.solve(basis_mt[rows_t], basis_mt, left=False)


def _pivots(basis_mt: Tensor) -> Tensor:
    """Return the rows (t,) that partial pivoting picks. The permutation matrix of `torch.linalg.lu` would be (m, m)."""
    swaps_t = torch.linalg.lu_factor(basis_mt).pivots.tolist()
    order_m = [*range(len(basis_mt))]
    for place, other in enumerate(swaps_t):
        order_m[place], order_m[other - 1] = order_m[other - 1], order_m[place]
    return torch.tensor(order_m[: len(swaps_t)], device=basis_mt.device)
