"""Which MLP channels to keep, and the best refit of W_down on them (docs/methods.md#mlp).

N channels, D hidden size, k kept channels S, R = the removed ones, C = Σ h hᵀ their moment, n channels still standing,
m removals of one panel. Selection and refit work on correlations: C and W_down scaled so that diag C = 1. That
changes no minimum, and makes every jitter and floor relative to each channel's own size.
"""

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_rank, require_square
from pipeline.kernels.spectra import eigh_descending

# Squared Cholesky pivots are 1 - R² of a channel given those before it. An inverse keeps 6 digits above LEAST_PIVOT.
_LEAST_PIVOT = 1e-10
_INVERSE_JITTERS = (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
_SOLVE_PIVOT = 1e-12
_SOLVE_JITTERS = (1e-12, 1e-11, 1e-10)
# Eigenvalues below this share of the largest carry no information in a moment of float32 products.
_EIGENVALUE_FLOOR = 1e-8
_CONDITION_STEPS = 12
_INVERSE_COLUMNS = 1024


class RefitReport(TypedDict):
    """How a refit was solved.

    `jitter` was added to the correlations' unit diagonal; `condition` estimates their 2-norm condition (of the kept
    part after a fallback); `fallback` says that they are rank-deficient and `dropped` eigenvalues were left out.
    """

    jitter: float
    condition: float
    fallback: bool
    dropped: int


class Selection(NamedTuple):
    """The channels that stay, `kept` (k,), ascending; `jitter`: what the unit diagonal of a singular C needed."""

    kept: Tensor
    jitter: float


class Elimination(NamedTuple):
    """The channels removed (n,), in `order`; `jitter` as in Selection."""

    order: Tensor
    jitter: float


def ridge_leverage(moment_NN: Tensor, ridge: float = 1.0) -> tuple[Tensor, float]:
    """Scores (N,) = diag(C (C + λI)⁻¹) = 1 − λ diag((C + λI)⁻¹), in [0, 1], with λ = ridge · mean(diag C). float64.

    Besides, the jitter, relative to mean diag C, that a ridge too small for the inverse needed. One Cholesky factor; a
    dead channel scores 0, and so do all if C is zero. Raises ValueError on a shape that is not square, NaN, infinity,
    a ridge that is not positive, or if C is not positive semidefinite.
    """
    size = require_square("moment", moment_NN)
    if not 0.0 < ridge < float("inf"):
        raise ValueError(f"ridge must be positive, not {ridge}")
    require_finite("moment", moment_NN)
    mean = float(_diagonal(moment_NN).mean())
    if mean == 0.0:
        return torch.zeros(size, dtype=torch.float64, device=moment_NN.device), 0.0
    damped_NN = moment_NN.detach().to(torch.float64) / mean
    damped_NN.diagonal().add_(ridge)
    # A jitter (only where the ridge is too small for the inverse) is so much more ridge.
    factor_NN, jitter = _jittered_cholesky(damped_NN, _SOLVE_PIVOT, _INVERSE_JITTERS)
    return (1.0 - (ridge + jitter) * _inverse_diagonal(factor_NN)).clamp_(0.0, 1.0), jitter


def select_leverage(moment_NN: Tensor, count: int, ridge: float = 1.0) -> Selection:
    """The `count` channels of the highest ridge leverage scores; of equal scores the lower index stays.

    Raises ValueError as `ridge_leverage`, and unless 1 <= count <= N.
    """
    require_rank("count", count, require_square("moment", moment_NN))
    scores_N, jitter = ridge_leverage(moment_NN, ridge)
    order_N = torch.sort(scores_N, descending=True, stable=True).indices
    return Selection(order_N[:count].sort().values, jitter)


def select_eliminate(moment_NN: Tensor, weight_down_DN: Tensor, count: int, block: int | None = None) -> Selection:
    """The `count` channels that stay after greedy elimination (docs/methods.md#mlp, `selection: eliminate`).

    Removes, one after another, the channel whose removal adds least output error after the best refit of W_down:
    ‖b_j‖² / [C⁻¹]_jj with B the refitted W_down so far; of equal ones the lower index stays. Exact for every `block`:
    it is the number of removals after which C⁻¹ and BᵀB, otherwise updated only where they are read, are updated as a
    whole by one matrix product (as in a blocked pivoted Cholesky factorisation), and changes speed and rounding only.
    A singular C gets a relative jitter. Needs 3 N² float64 numbers besides its inputs. Raises ValueError on shapes
    that do not fit, NaN, infinity, count outside 1..N, or if C is not positive semidefinite.
    """
    size = _check_down(moment_NN, weight_down_DN)
    require_rank("count", count, size)
    found = eliminate(moment_NN, weight_down_DN, count, block)
    gone_N = torch.zeros(size, dtype=torch.bool, device=moment_NN.device).index_fill_(0, found.order, True)
    return Selection((~gone_N).nonzero()[:, 0], found.jitter)


def eliminate(moment_NN: Tensor, weight_down_DN: Tensor, count: int, block: int | None = None) -> Elimination:
    """All removals of `select_eliminate` down to `count` channels, in their order. Raises ValueError as it does."""
    size = _check_down(moment_NN, weight_down_DN)
    require_rank("count", count, size)
    block = (32 if size < 4096 else 128) if block is None else block
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    alive_n = torch.arange(size, device=moment_NN.device)
    order = [alive_n[:0]]
    if count == size:
        return Elimination(order[0], 0.0)
    inverse_nn, gram_nn, jitter = _elimination_state(moment_NN, weight_down_DN)
    gone_n = torch.zeros(size, dtype=torch.bool, device=moment_NN.device)
    removed = 0
    while removed < size - count:
        steps = min(block, size - count - removed)
        order.append(alive_n[_eliminate_panel_(inverse_nn, gram_nn, gone_n, steps)])
        removed += steps
        standing = size - removed
        # Copies cost n², panels n² x block: compacting by eighths is nearly free and keeps the products small.
        if standing > count and standing <= alive_n.numel() * 7 // 8:
            stay = (~gone_n).nonzero()[:, 0]
            alive_n, gone_n = alive_n[stay], gone_n[stay]
            inverse_nn = inverse_nn.index_select(0, stay).index_select(1, stay)
            gram_nn = gram_nn.index_select(0, stay).index_select(1, stay)
    return Elimination(torch.cat(order), jitter)


def nested_losses(moment_NN: Tensor, weight_DN: Tensor, metric_DD: Tensor, priority_N: Tensor) -> Tensor:
    """(N + 1,): ½ tr(G ΔW C ΔWᵀ) of the best refit of W on the first k channels of `priority_N`, for k = 0 … N.

    All at once: with C = L Lᵀ in the order of the priority, the refit on the first k leaves the columns of W L from k
    on. Of any selection: docs/methods.md#curves. A singular C gets a relative jitter. Raises ValueError on shapes that
    do not fit, NaN, infinity, on a priority that is no permutation, or if C is not positive semidefinite.
    """
    size = _check_down(moment_NN, weight_DN)
    if tuple(metric_DD.shape) != (weight_DN.shape[0],) * 2:
        raise ValueError(f"metric {tuple(metric_DD.shape)} and weight {tuple(weight_DN.shape)} do not fit")
    require_finite("metric", metric_DD)
    if not torch.equal(priority_N.sort().values, torch.arange(size, device=priority_N.device)):
        raise ValueError(f"priority: no permutation of 0..{size - 1}")
    scale_N = _channel_scale(moment_NN)
    correlations_NN = _correlations(moment_NN, scale_N, priority_N, priority_N)
    correlations_NN.diagonal().fill_(1.0)
    factor_NN, _ = _jittered_cholesky(correlations_NN, _LEAST_PIVOT, _INVERSE_JITTERS)
    live_N = torch.where(_diagonal(moment_NN) > 0, scale_N, 0.0)
    left_DN = (weight_DN.detach().to(torch.float64) * live_N)[:, priority_N] @ factor_NN
    losses_N = 0.5 * (left_DN * (metric_DD.detach().to(torch.float64) @ left_DN)).sum(dim=0).clamp_min_(0.0)
    return torch.cat((losses_N.flip(0).cumsum(0).flip(0), losses_N.new_zeros(1)))


def nystrom_refit(weight_down_DN: Tensor, moment_NN: Tensor, indices_k: Tensor) -> tuple[Tensor, RefitReport]:
    """W̃_down = W_down C[:,S] C[S,S]⁻¹ (D, k) in float64: least output error on the channels `indices_k`, and a report.

    Solved as W_S + W_R C[R,S] C[S,S]⁻¹ by a Cholesky factor with a relative jitter if need be; a rank-deficient C[S,S]
    (fewer tokens than k) by its eigenvectors, the eigenvalues below 1e-8 of the largest dropped, so that what the
    calibration never saw keeps W_S. With all N channels kept W_down itself is returned. Raises ValueError on shapes
    that do not fit, NaN, infinity, or indices that are not strictly ascending within 0..N-1.
    """
    size = _check_down(moment_NN, weight_down_DN)
    _check_indices(indices_k, size)
    weight_DN = weight_down_DN.detach().to(torch.float64)
    kept_Dk = weight_DN.index_select(1, indices_k)
    if indices_k.numel() == size:
        return kept_Dk, RefitReport(jitter=0.0, condition=1.0, fallback=False, dropped=0)
    scale_N = _channel_scale(moment_NN)
    removed_R = _complement(indices_k, size)
    pull_DR = weight_DN.index_select(1, removed_R) * scale_N[removed_R]
    pull_Dk = pull_DR @ _correlations(moment_NN, scale_N, removed_R, indices_k)
    correlations_kk = _correlations(moment_NN, scale_N, indices_k, indices_k)
    correlations_kk.diagonal().fill_(1.0)
    correction_Dk, report = _solve(correlations_kk, pull_Dk)
    return kept_Dk + correction_Dk / scale_N[indices_k], report


def output_error(weight_DN: Tensor, refit_Dk: Tensor, indices_k: Tensor, moment_NN: Tensor) -> float:
    """Relative squared output error ‖W − W̃P‖²_C / ‖W‖²_C of channels `indices_k`, with ‖E‖²_C = tr(E C Eᵀ).

    0.0 if nothing is lost, also where the dense output is zero. Raises ValueError on shapes that do not fit, NaN or
    infinity, and on bad indices.
    """
    size = _check_down(moment_NN, weight_DN)
    _check_indices(indices_k, size)
    if tuple(refit_Dk.shape) != (weight_DN.shape[0], indices_k.numel()):
        raise ValueError(
            f"refit of shape {tuple(refit_Dk.shape)} does not fit {indices_k.numel()} kept columns of "
            f"a weight of shape {tuple(weight_DN.shape)}"
        )
    require_finite("refit", refit_Dk)
    moment_NN = moment_NN.detach().to(torch.float64)
    weight_DN = weight_DN.detach().to(torch.float64)
    residual_DN = weight_DN.index_add(1, indices_k, refit_Dk.detach().to(torch.float64), alpha=-1)
    lost = float((residual_DN @ moment_NN).mul_(residual_DN).sum())
    if lost <= 0.0:
        return 0.0
    whole = float((weight_DN @ moment_NN).mul_(weight_DN).sum())
    return lost / whole if whole > 0.0 else float("inf")


def _elimination_state(moment_NN: Tensor, weight_down_DN: Tensor) -> tuple[Tensor, Tensor, float]:
    """C⁻¹, BᵀB for B = W_down, in correlation scale; the jitter of C⁻¹. A dead channel gets b = 0: it goes first."""
    everything_N = torch.arange(moment_NN.shape[0], device=moment_NN.device)
    scale_N = _channel_scale(moment_NN)
    correlations_NN = _correlations(moment_NN, scale_N, everything_N, everything_N)
    correlations_NN.diagonal().fill_(1.0)
    factor_NN, jitter = _jittered_cholesky(correlations_NN, _LEAST_PIVOT, _INVERSE_JITTERS)
    inverse_NN = torch.cholesky_inverse(factor_NN)
    del correlations_NN, factor_NN
    weight_DN = weight_down_DN.detach().to(torch.float64)
    # Only ratios of scores count: both scales may be normalised, which keeps the squares within range.
    weight_DN = weight_DN / (weight_DN.abs().max() or 1.0)
    live_N = torch.where(_diagonal(moment_NN) > 0, scale_N, 0.0)
    weight_DN = weight_DN * (live_N / (live_N.max() or 1.0))
    return inverse_NN, weight_DN.T @ weight_DN, jitter


def _eliminate_panel_(inverse_nn: Tensor, gram_nn: Tensor, gone_n: Tensor, steps: int) -> Tensor:
    """Removes `steps` channels: marks them in `gone_n`, brings C⁻¹ and BᵀB up to date, and returns which, in order.

    Removing j with k = C⁻¹[:, j] / C⁻¹[j, j]: C⁻¹ -= C⁻¹[j, j] k kᵀ and B -= b_j kᵀ, hence BᵀB -= p kᵀ + k pᵀ with
    p = Bᵀb_j − ½‖b_j‖² k. The panel holds the k and p; only row j of either matrix is ever needed before its end. No
    step waits for the device: the index j stays a tensor.
    """
    size = gone_n.numel()
    precision_n = inverse_nn.diagonal().masked_fill(gone_n, 1.0)
    energy_n = gram_nn.diagonal().masked_fill(gone_n, float("inf"))
    ratios_mn, pulls_mn = (inverse_nn.new_empty(steps, size) for _ in range(2))
    pivots_m = inverse_nn.new_empty(steps)
    places = []
    for step in range(steps):
        # The last of the minima goes, so that of equal channels the lower index stays.
        j = size - 1 - (energy_n / precision_n).flip(0).argmin().view(1)
        places.append(j)
        ratios, pulls, pivots = ratios_mn[:step], pulls_mn[:step], pivots_m[:step]
        ratios_j, pulls_j = ratios.index_select(1, j)[:, 0], pulls.index_select(1, j)[:, 0]
        row_n = torch.addmv(inverse_nn.index_select(0, j)[0], ratios.T, ratios_j * pivots, alpha=-1)
        pivot = row_n.index_select(0, j).clamp_min(0.5)
        ratio_n = (row_n / pivot).index_fill_(0, j, 1.0)
        inner_n = torch.addmv(gram_nn.index_select(0, j)[0], ratios.T, pulls_j, alpha=-1)
        inner_n = torch.addmv(inner_n, pulls.T, ratios_j, alpha=-1)
        pull_n = inner_n - 0.5 * inner_n.index_select(0, j) * ratio_n
        # In exact arithmetic 1 / (1 − R²) >= 1 (with a jitter hardly less), and norms are not negative.
        precision_n = torch.addcmul(precision_n, ratio_n, ratio_n * pivot, value=-1).clamp_min_(0.5)
        energy_n = torch.addcmul(energy_n, pull_n, ratio_n, value=-2).clamp_min_(0.0).index_fill_(0, j, float("inf"))
        gone_n.index_fill_(0, j, True)
        ratios_mn[step], pulls_mn[step], pivots_m[step] = ratio_n, pull_n, pivot[0]
    inverse_nn.addmm_(ratios_mn.T * pivots_m, ratios_mn, alpha=-1)
    gram_nn.addmm_(torch.cat((pulls_mn, ratios_mn)).T, torch.cat((ratios_mn, pulls_mn)), alpha=-1)
    return torch.cat(places)


def _solve(correlations_kk: Tensor, pull_Dk: Tensor) -> tuple[Tensor, RefitReport]:
    """pull C⁻¹ for unit-diagonal C, by a Cholesky factor or, if rank-deficient, the leading eigenvectors."""
    for jitter in (0.0, *_SOLVE_JITTERS):
        factor_kk = _cholesky(correlations_kk, jitter)
        # A pivot that the jitter alone holds up is a direction without information.
        if factor_kk is not None and _least_pivot(factor_kk) >= max(_SOLVE_PIVOT, 8 * jitter):
            condition = _condition(correlations_kk, factor_kk)
            solution_Dk = torch.cholesky_solve(pull_Dk.T, factor_kk).T
            return solution_Dk, RefitReport(jitter=jitter, condition=condition, fallback=False, dropped=0)
    values_k, vectors_kk = eigh_descending(correlations_kk)
    kept = int((values_k > _EIGENVALUE_FLOOR * values_k[0]).sum())
    solution_Dk = ((pull_Dk @ vectors_kk[:, :kept]) / values_k[:kept]) @ vectors_kk[:, :kept].T
    condition = float(values_k[0] / values_k[kept - 1])
    dropped = values_k.numel() - kept
    return solution_Dk, RefitReport(jitter=0.0, condition=condition, fallback=True, dropped=dropped)


def _condition(matrix_kk: Tensor, factor_kk: Tensor) -> float:
    """λ_max / λ_min by a few steps of power and inverse iteration: from below, within a small factor."""
    size = matrix_kk.shape[0]
    # Fixed, and not orthogonal to anything in particular.
    start_k1 = 1.0 + 0.5 * torch.cos(torch.arange(size, dtype=torch.float64, device=matrix_kk.device)[:, None] ** 2)
    high_k1 = low_k1 = start_k1 / torch.linalg.vector_norm(start_k1)
    high = low = torch.ones((), dtype=torch.float64)
    for _ in range(_CONDITION_STEPS):
        high_k1 = matrix_kk @ high_k1
        high = torch.linalg.vector_norm(high_k1)
        high_k1 = high_k1 / high
        low_k1 = torch.cholesky_solve(low_k1, factor_kk)
        low = torch.linalg.vector_norm(low_k1)
        low_k1 = low_k1 / low
    return max(1.0, float(high) * float(low))


def _cholesky(matrix: Tensor, jitter: float) -> Tensor | None:
    if jitter:
        matrix = matrix.clone()
        matrix.diagonal().add_(jitter)
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()) else None


def _least_pivot(factor: Tensor) -> float:
    return float(factor.diagonal().min()) ** 2


def _jittered_cholesky(matrix: Tensor, least_pivot: float, jitters: tuple[float, ...]) -> tuple[Tensor, float]:
    factor = _cholesky(matrix, 0.0)
    if factor is not None and _least_pivot(factor) >= least_pivot:
        return factor, 0.0
    for jitter in jitters:
        factor = _cholesky(matrix, jitter)
        if factor is not None:
            return factor, jitter
    raise ValueError(
        f"moment of shape {tuple(matrix.shape)} is not positive semidefinite: no Cholesky factor with a relative "
        f"jitter up to {jitters[-1]:g}"
    )


def _inverse_diagonal(factor_NN: Tensor) -> Tensor:
    """diag((L Lᵀ)⁻¹): squared column norms of L⁻¹, a few columns at a time."""
    size = factor_NN.shape[0]
    diagonal_N = factor_NN.new_empty(size)
    for start in range(0, size, _INVERSE_COLUMNS):
        width = min(_INVERSE_COLUMNS, size - start)
        # The columns of L⁻¹ are zero above the diagonal.
        unit = torch.eye(size - start, width, dtype=factor_NN.dtype, device=factor_NN.device)
        columns = torch.linalg.solve_triangular(factor_NN[start:, start:], unit, upper=False)
        diagonal_N[start : start + width] = columns.square_().sum(dim=0)
    return diagonal_N


def _diagonal(moment_NN: Tensor) -> Tensor:
    diagonal_N = moment_NN.detach().diagonal().to(torch.float64)
    if bool((diagonal_N < 0).any()):
        raise ValueError(f"moment: its diagonal holds {float(diagonal_N.min()):g}, so it is no sum of squares")
    return diagonal_N


def _channel_scale(moment_NN: Tensor) -> Tensor:
    """Root mean square per channel but for a constant; 1 for a dead one, whose row of C is zero."""
    scale_N = _diagonal(moment_NN).sqrt()
    return scale_N.masked_fill_(scale_N == 0, 1.0)


def _correlations(moment_NN: Tensor, scale_N: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    part = moment_NN.detach().index_select(0, rows).index_select(1, columns).to(torch.float64)
    return part.div_(scale_N[rows, None]).div_(scale_N[columns])


def _complement(indices_k: Tensor, size: int) -> Tensor:
    rest_N = torch.ones(size, dtype=torch.bool, device=indices_k.device)
    return rest_N.index_fill_(0, indices_k, False).nonzero()[:, 0]


def _check_down(moment_NN: Tensor, weight_DN: Tensor) -> int:
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
