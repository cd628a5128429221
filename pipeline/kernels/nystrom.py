"""Selection of MLP channels by leverage, and the best refit of W_down on them (docs/methods.md#mlp).

N channels, D hidden size, k kept channels S, R = the removed ones, C = Σ h hᵀ their moment. Selection and refit work on
correlations: C and W_down scaled so that diag C = 1. That changes no minimum, and makes every jitter and floor relative
to each channel's own size.
"""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_rank, require_square
from pipeline.kernels.cholesky import blocks_of, empty_lower, factor_, inverse_diagonal, jittered_factor
from pipeline.kernels.spectra import eigh_descending, tail_sums

# Squared Cholesky pivots are 1 - R² of a channel given those before it. An inverse keeps 6 digits above LEAST_PIVOT.
LEAST_PIVOT = 1e-10
INVERSE_JITTERS = (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)  # large ones: of rare experts
_SOLVE_PIVOT = 1e-12
_SOLVE_JITTERS = (1e-12, 1e-11, 1e-10)
# In a moment of float32 products, eigenvalues below this share of the largest carry no information.
_EIGENVALUE_FLOOR = 1e-8
_CONDITION_STEPS = 12


class RefitReport(TypedDict):
    """Diagnostics of a refit.

    `jitter` was added to the correlations' unit diagonal; `condition` estimates their 2-norm condition (after a
    fallback, of the kept part); `fallback`: they are rank-deficient, and `dropped` eigenvalues were left out.
    """

    jitter: float
    condition: float
    fallback: bool
    dropped: int


class Selection(NamedTuple):
    """The kept `channels` (k,), ascending, and the `jitter` that the unit diagonal of a singular C needed."""

    channels: Tensor
    jitter: float


def ridge_leverage(moment_NN: Tensor, ridge: float = 1.0) -> tuple[Tensor, float]:
    """Scores (N,) = diag(C (C + λI)⁻¹) = 1 − λ diag((C + λI)⁻¹), in [0, 1], with λ = ridge · mean(diag C). float64.

    Also returns the jitter, relative to mean diag C, that a ridge too small for the inverse needed. One Cholesky
    factor; a dead channel scores 0, and so do all if C is zero. Raises ValueError on a shape that is not square, NaN,
    infinity, a ridge that is not positive, or if C is not positive semidefinite.
    """
    size = require_square("moment", moment_NN)
    if not 0.0 < ridge < float("inf"):
        raise ValueError(f"ridge must be positive, not {ridge}")
    require_finite("moment", moment_NN)
    mean = float(channel_diagonal(moment_NN).mean())
    if mean == 0.0:
        return torch.zeros(size, dtype=torch.float64, device=moment_NN.device), 0.0

    def _fill_damped_(into_NN: Tensor) -> None:
        for rows in blocks_of(size):
            into_NN[rows, : rows.stop] = moment_NN.detach()[rows, : rows.stop].to(torch.float64) / mean
        into_NN.diagonal().add_(ridge)

    # A jitter, which only a ridge too small for the inverse needs, adds to the ridge.
    damped_NN = empty_lower(size, moment_NN.device)
    jitter = jittered_factor(_fill_damped_, damped_NN, _SOLVE_PIVOT, INVERSE_JITTERS)
    return (1.0 - (ridge + jitter) * inverse_diagonal(damped_NN)).clamp_(0.0, 1.0), jitter


def select_leverage(moment_NN: Tensor, count: int, ridge: float = 1.0) -> Selection:
    """Select the `count` channels of highest ridge leverage scores; of equal scores the lower index is kept.

    Raises the ValueErrors of `ridge_leverage`, and unless 1 <= count <= N.
    """
    require_rank("count", count, require_square("moment", moment_NN))
    scores_N, jitter = ridge_leverage(moment_NN, ridge)
    order_N = torch.sort(scores_N, descending=True, stable=True).indices
    return Selection(order_N[:count].sort().values, jitter)


def nested_outputs(moment_NN: Tensor, weight_DN: Tensor, priority_N: Tensor) -> Tensor:
    """Return W L (D, N), with C = L Lᵀ in order of priority: each channel's contribution beyond the channels before it.

    With columns p, the best refit of W on the first k channels, in any metric, has outputs of moment Σ_{i<k} p pᵀ and
    an error of Σ_{i>=k} p pᵀ. A singular C gets a relative jitter. N³/3 + D N² multiplications and additions.
    Raises ValueError on shapes that do not fit, NaN, infinity, on a priority that is not a permutation, or if C is not
    positive semidefinite.
    """
    size = check_down(moment_NN, weight_DN)
    if not torch.equal(priority_N.sort().values, torch.arange(size, device=priority_N.device)):
        raise ValueError(f"priority: not a permutation of 0..{size - 1}")
    scale_N = channel_scale(moment_NN)
    factor_NN = empty_lower(size, moment_NN.device)
    jittered_factor(
        lambda into_NN: fill_correlations(into_NN, moment_NN, scale_N, priority_N),
        factor_NN,
        LEAST_PIVOT,
        INVERSE_JITTERS,
    )
    live_N = torch.where(channel_diagonal(moment_NN) > 0, scale_N, 0.0)
    ordered_DN = (weight_DN.detach().to(torch.float64) * live_N)[:, priority_N]
    outputs_DN = torch.empty_like(ordered_DN)
    for columns in blocks_of(size):
        below_nb = factor_NN[columns.start :, columns].tril()
        outputs_DN[:, columns] = ordered_DN[:, columns.start :] @ below_nb
    return outputs_DN


def nested_losses(weighted_DN: Tensor) -> Tensor:
    """(N + 1,): ½ tr(G ΔW C ΔWᵀ) of the best refit of W on the first k channels, for k = 0 … N. docs/methods.md#curves.

    Takes the `nested_outputs` of Fᵀ W, G = F Fᵀ.
    """
    return tail_sums(0.5 * weighted_DN.square().sum(dim=0))


def nystrom_refit(weight_down_DN: Tensor, moment_NN: Tensor, indices_k: Tensor) -> tuple[Tensor, RefitReport]:
    """Return W̃_down = W_down C[:,S] C[S,S]⁻¹ (D, k) in float64, of least output error on `indices_k`, and a report.

    Solved as W_S + W_R C[R,S] C[S,S]⁻¹ by a Cholesky factor, with a relative jitter if need be. A rank-deficient C[S,S]
    (fewer tokens than k) is solved by its eigenvectors; eigenvalues below 1e-8 of the largest are dropped, so that
    directions without calibration data keep W_S. With all N channels W_down itself is returned. Raises ValueError on
    shapes that do not fit, NaN, infinity, or indices that are not strictly ascending within 0..N-1.
    """
    refit_Dk, report, _ = _refit(weight_down_DN, moment_NN, indices_k)
    return refit_Dk, report


def refit_with_error(weight_down_DN: Tensor, moment_NN: Tensor, indices_k: Tensor) -> tuple[Tensor, RefitReport, float]:
    """Return the refit and report of `nystrom_refit`, and its relative squared output error.

    The error ‖W − W̃P‖²_C / ‖W‖²_C, where P takes the kept channels and ‖E‖²_C = tr(E C Eᵀ), costs D R² multiplications
    instead of D N², R being the number of removed channels. It is 0.0 without an error, also if W C Wᵀ is zero. With
    the pull P = W_R C[R,S] and the correction X = P (C[S,S] + jI)⁻¹ of the correlations, the error is tr(W_R C[R,R]
    W_Rᵀ) − ⟨P, X⟩ − j‖X‖². Raises the ValueErrors of `nystrom_refit`.
    """
    refit_Dk, report, regained = _refit(weight_down_DN, moment_NN, indices_k)
    removed_R = complement(indices_k, len(moment_NN))
    if len(removed_R) == 0:
        return refit_Dk, report, 0.0
    moment_RR = moment_NN.detach().index_select(0, removed_R).index_select(1, removed_R)
    lost = output_energy(weight_down_DN.index_select(1, removed_R), moment_RR) - regained
    return refit_Dk, report, _share(lost, weight_down_DN, moment_NN)


def _refit(weight_down_DN: Tensor, moment_NN: Tensor, indices_k: Tensor) -> tuple[Tensor, RefitReport, float]:
    """Return the refit, its report, and the part of the output error that the correction removes."""
    size = check_down(moment_NN, weight_down_DN)
    _check_indices(indices_k, size)
    if indices_k.numel() == size:
        report = RefitReport(jitter=0.0, condition=1.0, fallback=False, dropped=0)
        return _columns(weight_down_DN, indices_k), report, 0.0
    scale_N = channel_scale(moment_NN)
    removed_R = complement(indices_k, size)
    pull_DR = _columns(weight_down_DN, removed_R).mul_(scale_N[removed_R])
    pull_Dk = _pulled(pull_DR, moment_NN, scale_N, removed_R, indices_k)
    correction_Dk, report = _solve(moment_NN, scale_N, indices_k, pull_Dk)
    jittered = report["jitter"] * float(correction_Dk.square().sum()) if report["jitter"] else 0.0
    regained = float(pull_Dk.mul_(correction_Dk).sum()) + jittered  # the last use of the pull
    # In the weight's memory layout, not the solver's: a product's last bits depend on it.
    return _columns(weight_down_DN, indices_k).add_(correction_Dk.div_(scale_N[indices_k])), report, regained


def _columns(weight_DN: Tensor, indices_k: Tensor) -> Tensor:
    """Copy some columns in float64."""
    return weight_DN.detach().index_select(1, indices_k).to(torch.float64)


def _share(lost: float, weight_DN: Tensor, moment_NN: Tensor) -> float:
    if lost <= 0.0:
        return 0.0
    whole = output_energy(weight_DN, moment_NN)
    return lost / whole if whole > 0.0 else float("inf")


def output_energy(weight_DN: Tensor, moment_NN: Tensor) -> float:
    """tr(W C Wᵀ) in float64, from C's triangle above the diagonal: D N² multiplications and additions."""
    total = 0.0
    for rows in blocks_of(len(moment_NN)):
        left_Db = weight_DN.detach()[:, rows].to(torch.float64)
        product_Dn = left_Db @ moment_NN.detach()[rows, rows.start :].to(torch.float64)
        product_Dn.mul_(weight_DN.detach()[:, rows.start :])
        total += float(triangle_sum(product_Dn, rows.stop - rows.start))
    return total


def triangle_sum(rows_bn: Tensor, width: int) -> Tensor:
    """The contribution of rows of an upper triangle to the sum over both; their first `width` columns are a diagonal
    block."""
    return rows_bn[:, :width].sum() + 2.0 * rows_bn[:, width:].sum()


def _solve(moment_NN: Tensor, scale_N: Tensor, indices_k: Tensor, pull_Dk: Tensor) -> tuple[Tensor, RefitReport]:
    """pull C⁻¹ for C's correlations, by a Cholesky factor or, if rank-deficient, the leading eigenvectors."""
    matrix_kk = empty_lower(len(indices_k), moment_NN.device)
    bound = float("inf")
    for jitter in (0.0, *_SOLVE_JITTERS):
        if jitter <= -bound:
            continue
        fill_correlations(matrix_kk, moment_NN, scale_N, indices_k)
        matrix_kk.diagonal().add_(jitter)
        # A pivot that only the jitter keeps positive is a direction without information.
        failed = factor_(matrix_kk, max(_SOLVE_PIVOT, 8 * jitter))
        if failed is None:
            condition = estimate_condition(
                lambda vector_k1: correlation_product(moment_NN, scale_N, indices_k, vector_k1),
                lambda vector_k1: _solve_factor(vector_k1.mT, matrix_kk).mT,
                indices_k,
            )
            report = RefitReport(jitter=jitter, condition=condition, fallback=False, dropped=0)
            return _solve_factor(pull_Dk, matrix_kk), report
        bound = min(bound, failed - jitter)
    fill_correlations(matrix_kk, moment_NN, scale_N, indices_k)
    values_k, vectors_kk = eigh_descending(matrix_kk.tril() + matrix_kk.tril(-1).mT)
    num_kept = int((values_k > _EIGENVALUE_FLOOR * values_k[0]).sum())
    solution_Dk = ((pull_Dk @ vectors_kk[:, :num_kept]) / values_k[:num_kept]) @ vectors_kk[:, :num_kept].T
    condition = float(values_k[0] / values_k[num_kept - 1])
    dropped = values_k.numel() - num_kept
    return solution_Dk, RefitReport(jitter=0.0, condition=condition, fallback=True, dropped=dropped)


def _solve_factor(pull_Dk: Tensor, factor_kk: Tensor) -> Tensor:
    """pull (L Lᵀ)⁻¹, reading the lower triangle alone."""
    half_Dk = torch.linalg.solve_triangular(factor_kk.mT, pull_Dk, upper=True, left=False)
    solved_Dk: Tensor = torch.linalg.solve_triangular(factor_kk, half_Dk, upper=False, left=False, out=half_Dk)
    return solved_Dk


def estimate_condition(
    multiply: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], indices_k: Tensor
) -> float:
    """Estimate λ_max / λ_min by a few steps of power and inverse iteration: from below, within a small factor."""
    places_k1 = torch.arange(len(indices_k), dtype=torch.float64, device=indices_k.device)[:, None]
    # A fixed vector, unlikely to be orthogonal to the extreme eigenvectors.
    start_k1 = 1.0 + 0.5 * torch.cos(places_k1**2)
    high_k1 = low_k1 = start_k1 / torch.linalg.vector_norm(start_k1)
    high = low = torch.ones((), dtype=torch.float64)
    for _ in range(_CONDITION_STEPS):
        high_k1, low_k1 = multiply(high_k1), solve(low_k1)
        high, low = torch.linalg.vector_norm(high_k1), torch.linalg.vector_norm(low_k1)
        high_k1, low_k1 = high_k1 / high, low_k1 / low
    return max(1.0, float(high) * float(low))


def channel_diagonal(moment_NN: Tensor) -> Tensor:
    """diag C (N,). Raises ValueError if it is negative somewhere."""
    diagonal_N = moment_NN.detach().diagonal().to(torch.float64)
    if bool((diagonal_N < 0).any()):
        raise ValueError(f"moment: its diagonal holds {float(diagonal_N.min()):g}, so it is not a sum of squares")
    return diagonal_N


def channel_scale(moment_NN: Tensor) -> Tensor:
    """Root mean square per channel, up to a constant; 1 for a dead channel, whose row of C is zero."""
    scale_N = channel_diagonal(moment_NN).sqrt()
    return scale_N.masked_fill_(scale_N == 0, 1.0)


def fill_correlations(into_kk: Tensor, moment_NN: Tensor, scale_N: Tensor, indices_k: Tensor | None = None) -> None:
    """Write the lower triangle of C's correlations, of the channels `indices_k` or all, with a unit diagonal."""
    scale_k = scale_N if indices_k is None else scale_N[indices_k]
    for rows in blocks_of(len(into_kk)):
        columns = slice(0, rows.stop)
        if indices_k is None:
            part_bk = moment_NN.detach()[rows, columns]
        else:
            part_bk = moment_NN.detach().index_select(0, indices_k[rows]).index_select(1, indices_k[columns])
        into_kk[rows, columns] = part_bk.to(torch.float64) / scale_k[rows, None] / scale_k[columns]
    into_kk.diagonal().fill_(1.0)


def correlation_product(moment_NN: Tensor, scale_N: Tensor, indices_k: Tensor, vector_k1: Tensor) -> Tensor:
    """The correlations of the channels `indices_k` times a vector."""
    scale_k1 = scale_N[indices_k, None]
    vector_N1 = scale_N.new_zeros(len(scale_N), 1).index_copy_(0, indices_k, vector_k1 / scale_k1)
    dead_k1 = moment_NN.diagonal()[indices_k, None] == 0
    product_N1 = torch.cat([moment_NN[rows].to(torch.float64) @ vector_N1 for rows in blocks_of(len(moment_NN))])
    return product_N1[indices_k] / scale_k1 + vector_k1 * dead_k1


def _pulled(pull_DR: Tensor, moment_NN: Tensor, scale_N: Tensor, removed_R: Tensor, indices_k: Tensor) -> Tensor:
    """pull C[R, S] of the correlations, a block of rows at a time."""
    total_Dk = pull_DR.new_zeros(pull_DR.shape[0], len(indices_k))
    for rows in blocks_of(len(removed_R)):
        chosen = removed_R[rows]
        part_bk = moment_NN.detach().index_select(0, chosen).index_select(1, indices_k).to(torch.float64)
        total_Dk += pull_DR[:, rows] @ part_bk.div_(scale_N[chosen, None]).div_(scale_N[indices_k])
    return total_Dk


def complement(indices_k: Tensor, size: int) -> Tensor:
    """The indices of 0..size-1 that are not in `indices_k`, ascending."""
    rest_N = torch.ones(size, dtype=torch.bool, device=indices_k.device)
    return rest_N.index_fill_(0, indices_k, False).nonzero()[:, 0]


def check_down(moment_NN: Tensor, weight_DN: Tensor) -> int:
    """Return N. Raises ValueError unless the shapes fit and all numbers are finite."""
    size = require_square("moment", moment_NN)
    if weight_DN.ndim != 2 or weight_DN.shape[1] != size or moment_NN.ndim != 2:
        shapes = f"{tuple(weight_DN.shape)} and {tuple(moment_NN.shape)}"
        raise ValueError(f"weight (D, N) and moment (N, N) do not fit: {shapes}")
    require_finite("moment", moment_NN)
    require_finite("weight", weight_DN)
    return size


def _check_indices(indices_k: Tensor, size: int) -> None:
    good = indices_k.ndim == 1 and indices_k.dtype == torch.int64 and 1 <= indices_k.numel() <= size
    if not good or int(indices_k[0]) < 0 or int(indices_k[-1]) >= size or bool((indices_k.diff() <= 0).any()):
        raise ValueError(
            f"indices must be a strictly ascending int64 vector within 0..{size - 1}, not {indices_k.dtype} of shape "
            f"{tuple(indices_k.shape)}"
        )
