"""The values' basis and the output projection behind it, fitted together (docs/methods.md, value and output).

A head h reads y_h = E_g c_h, r numbers instead of d, and o becomes any D × H·r matrix: W' E instead of W, with E block
diagonal over the heads and one E_g for the heads of a KV group g. Least ½ tr(G Δ C Δᵀ), Δ = W − W' E, by turns: W' for
E is a least-squares refit, E for W' a linear system over all heads at once. Unlike a decoder that stays within its
head, W' recovers from other heads whatever is correlated with what was dropped.

D hidden, H query heads, G groups of heads (KV heads), d head dimension, F = H·d, r directions kept, R = H·r.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.heads import diagonal_blocks, group_sums, project_heads, repeat_groups
from pipeline.kernels.sensitivity import Factored, factored

# Relative to the mean diagonal: what no calibration token has excited keeps the basis and the weight it had.
_DAMPING = 1e-7
_MORE_DAMPING = 7  # powers of ten, to a tenth of the mean diagonal
_STEPS = 24  # of conjugate gradients, from the last encoder on
_SMALL = 1e-12


class ValueOutputProblem(NamedTuple):
    """What a fit of any rank needs of W, G = s F Fᵀ and C: `seen` Fᵀ W and `felt` Fᵀ W C, both (D, F), and
    tr(G W C Wᵀ), `whole`, with `moment` C + `damping` · I for C; the `scale` s is 0 where C is."""

    seen: Tensor
    felt: Tensor
    moment: Tensor
    damping: float
    scale: float
    whole: float


class ValueOutput(NamedTuple):
    """`encode` (G, r, d), rows orthonormal; `felt` (D, R), whose Gram matrix is that of the outputs' moment as the loss
    feels it, but for the problem's scale; `factor` (R, R) of E C Eᵀ; `loss` ½ tr(G Δ C Δᵀ), after the last turn."""

    encode: Tensor
    felt: Tensor
    factor: Tensor
    loss: float


def value_output_problem(weight_DF: Tensor, metric_DD: Tensor | Factored, moment_FF: Tensor) -> ValueOutputProblem:
    """Prepares fits of several ranks, 4 D³ operations and a factor; inputs stay unchanged, everything in float64.

    Args:
        weight_DF: W_o; head h reads columns h·d to (h+1)·d, heads of a group are neighbours.
        metric_DD: G, of the outputs, or what it is `factored` to; per token or not, it scales the loss.
        moment_FF: C = E[c cᵀ] of what W_o reads, all heads.

    Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    require_square("moment", moment_FF)
    metric = metric_DD if isinstance(metric_DD, Factored) else factored(metric_DD)
    if tuple(weight_DF.shape) != (len(metric.factor), len(moment_FF)):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (weight_DF, metric.factor, moment_FF))
        raise ValueError(f"weight (D, H·d), metric (D, D) and moment (H·d, H·d) do not fit: {shapes}")
    require_finite("weight", weight_DF)
    require_finite("moment", moment_FF)
    weight_DF = weight_DF.detach().to(torch.float64)
    damped_FF = moment_FF.detach().to(torch.float64, copy=True)
    damping = _DAMPING * float(damped_FF.diagonal().mean())
    scale, damping = (metric.scale, damping) if damping else (0.0, 1.0)
    damped_FF.diagonal().add_(damping)
    seen_DF = metric.factor.T @ weight_DF
    felt_DF = seen_DF @ damped_FF
    return ValueOutputProblem(seen_DF, felt_DF, damped_FF, damping, scale, scale * float((felt_DF * seen_DF).sum()))


def fit_value_output(
    problem: ValueOutputProblem, encode_Grd: Tensor, turns: int = 8, least_gain: float = 1e-3
) -> ValueOutput:
    """Encoders and output projection of least loss that alternation from `encode_Grd` reaches.

    Args:
        problem: what is fitted.
        encode_Grd: where to start: rows of full rank.
        turns: at most so many of encoder and refit; each lowers the loss, the refit alone is turn 0.
        least_gain: a turn that gains less than this share of the loss is the last.

    With s = r / d a turn takes (s³/3 + 4 s²) D³ operations. Raises ValueError on shapes that do not fit, NaN or
    infinity.
    """
    groups, rank, width = encode_Grd.shape if encode_Grd.ndim == 3 else (0, 0, 0)
    features = len(problem.moment)
    if not (groups > 0 and 1 <= rank <= width and features % (groups * width) == 0):
        raise ValueError(f"encode (G, r, d) {tuple(encode_Grd.shape)} does not fit {features} features of all heads")
    require_finite("encode", encode_Grd)
    best = _refitted(problem, _orthonormal(encode_Grd.to(torch.float64)))
    for _ in range(turns):
        found = _refitted(problem, _orthonormal(_encoder(problem, best)))
        gain = best.loss - found.loss
        best = found if gain > 0.0 else best
        if gain <= least_gain * best.loss:
            break
    return best._replace(loss=_undamped(problem, best))


def output_of(weight_DF: Tensor, problem: ValueOutputProblem, found: ValueOutput) -> Tensor:
    """W' (D, H·r) = W C Eᵀ (E C Eᵀ)⁻¹, the best for the encoders whatever the metric."""
    crossed_FR = project_heads(problem.moment, _of_all_heads(problem, found.encode).mT)
    return torch.cholesky_solve((weight_DF.to(torch.float64) @ crossed_FR).T, found.factor).T.contiguous()


def _of_all_heads(problem: ValueOutputProblem, encode_Grd: Tensor) -> Tensor:
    return repeat_groups(encode_Grd, len(problem.moment) // encode_Grd.shape[2])


def _refitted(problem: ValueOutputProblem, encode_Grd: Tensor) -> ValueOutput:
    """The loss is what the outputs of the refit leave of the whole."""
    encode_Hrd = _of_all_heads(problem, encode_Grd)
    crossed_FR = project_heads(problem.moment, encode_Hrd.mT)
    reduced_RR = project_heads(crossed_FR.T.contiguous(), encode_Hrd.mT)
    factor_RR = _factor(0.5 * (reduced_RR + reduced_RR.T), problem.damping)
    read_DR = project_heads(problem.felt, encode_Hrd.mT)
    felt_DR = torch.linalg.solve_triangular(factor_RR.mT, read_DR, upper=True, left=False)
    kept = problem.scale * float(felt_DR.square().sum())
    return ValueOutput(encode_Grd, felt_DR, factor_RR, 0.5 * max(problem.whole - kept, 0.0))


def _factor(reduced_RR: Tensor, damping: float) -> Tensor:
    """With as little more damping as it takes: a moment of products in float32 may have eigenvalues below zero."""
    for power in range(_MORE_DAMPING):
        lower_RR, failed = torch.linalg.cholesky_ex(reduced_RR)
        if not int(failed):
            factor_RR: Tensor = lower_RR
            return factor_RR
        reduced_RR.diagonal().add_(9 * damping * 10**power)  # ten times as much in all
    raise ValueError("the moment of what the output projection reads is not positive semidefinite")


def _undamped(problem: ValueOutputProblem, found: ValueOutput) -> float:
    change_DF = problem.seen - project_heads(_seen(found), _of_all_heads(problem, found.encode))
    return max(0.0, found.loss - 0.5 * problem.scale * problem.damping * float(change_DF.square().sum()))


def _seen(found: ValueOutput) -> Tensor:
    """Fᵀ W' (D, R)."""
    seen_DR: Tensor = torch.linalg.solve_triangular(found.factor, found.felt, upper=False, left=False)
    return seen_DR


def _encoder(problem: ValueOutputProblem, found: ValueOutput) -> Tensor:
    """The encoders of least loss for the output projection, by preconditioned conjugate gradients from the last ones.

    Solves Σ_{h,k} K_hk E C_kh = Σ_h (W'ᵀ G W C)_hh over the heads h of each group and all heads k, K = W'ᵀ G W', both
    sides but for the scale of G.
    """
    groups, _, width = found.encode.shape
    damped_FF, heads = problem.moment, len(problem.moment) // width
    seen_DR = _seen(found)
    gram_RR = seen_DR.T @ seen_DR
    crossed_Hrd = torch.bmm(
        seen_DR.unflatten(1, (heads, -1)).permute(1, 2, 0), problem.felt.unflatten(1, (heads, -1)).transpose(0, 1)
    )
    target_Grd = group_sums(crossed_Hrd, groups)
    rows_Grr = diagonal_blocks(gram_RR, heads, groups)
    columns_Gdd = diagonal_blocks(damped_FF, heads, groups)
    inverse_Grr, inverse_Gdd = _damped_inverse(rows_Grr), _damped_inverse(columns_Gdd)

    def apply(encode_Grd: Tensor) -> Tensor:
        spread_RF = project_heads(gram_RR, repeat_groups(encode_Grd, heads))
        return group_sums(_blocks_of_product(spread_RF, damped_FF, heads), groups)

    solution = found.encode.clone()
    residual = target_Grd - apply(solution)
    least = _SMALL * float(target_Grd.square().sum())
    direction = scaled = inverse_Grr @ residual @ inverse_Gdd
    energy = float((residual * scaled).sum())
    for _ in range(_STEPS):
        if float(residual.square().sum()) <= least or energy <= 0.0:
            break
        image = apply(direction)
        curvature = float((direction * image).sum())
        if curvature <= 0.0:
            break
        solution = solution + (energy / curvature) * direction
        residual = residual - (energy / curvature) * image
        scaled = inverse_Grr @ residual @ inverse_Gdd
        energy, last = float((residual * scaled).sum()), energy
        direction = scaled + (energy / last) * direction
    return solution


def _orthonormal(encode_Grd: Tensor) -> Tensor:
    """The same row spaces with orthonormal rows, which changes nothing that a refit cannot undo."""
    rows_Grd: Tensor = torch.linalg.qr(encode_Grd.mT).Q.mT.contiguous()
    return rows_Grd


def _blocks_of_product(left_RF: Tensor, right_FF: Tensor, heads: int) -> Tensor:
    """(H, r, d): the blocks of left · right that lie on the heads' diagonal, and no others."""
    return torch.bmm(left_RF.unflatten(0, (heads, -1)), right_FF.unflatten(1, (heads, -1)).transpose(0, 1))


def _damped_inverse(matrix_Gnn: Tensor) -> Tensor:
    """Inverse of symmetric matrices, their eigenvalues clipped from below."""
    values_Gn, vectors_Gnn = torch.linalg.eigh(0.5 * (matrix_Gnn + matrix_Gnn.mT))
    floor_G1 = (values_Gn[:, -1:] * _SMALL).clamp_min(torch.finfo(torch.float64).tiny)
    inverse_Gnn: Tensor = (vectors_Gnn / torch.maximum(values_Gn, floor_G1).unsqueeze(-2)) @ vectors_Gnn.mT
    return inverse_Gnn
