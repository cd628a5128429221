"""The values' basis and the output projection after it, fitted together (docs/methods.md, value and output).

A head h reads y_h = E_g c_h, r numbers instead of d, and o becomes any D × H·r matrix: W' E instead of W, with E block
diagonal over the heads and one E_g for the heads of a KV group g. Alternation minimises ½ tr(G Δ C Δᵀ), Δ = W − W' E:
W' for E is a least-squares refit, E for W' a linear system over all heads. Unlike a decoder within each head, W'
recovers dropped directions from other heads that are correlated with them.

D hidden, H query heads, G groups of heads (KV heads), d head dimension, F = H·d, r directions kept, R = H·r.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.heads import diagonal_blocks, group_sums, project_heads, repeat_groups
from pipeline.kernels.sensitivity import Factored, factored
from pipeline.kernels.spectra import symmetrized

# The least damping, relative to the mean diagonal: directions without calibration data keep their basis and weight.
_DAMPING = 1e-7
_POWERS = 7  # powers of ten that are tried, up to a tenth of the mean diagonal
_STEPS = 24  # of conjugate gradients, starting at the last encoder
_SMALL = 1e-12


class ValueOutputProblem(NamedTuple):
    """The inputs of a fit of any rank, from W, G = s F Fᵀ and C.

    `weighted` Fᵀ W and `crossed` Fᵀ W C, both (D, F); `whole` tr(G W C Wᵀ); `moment` C + `damping` · I takes the place
    of C everywhere; the `scale` s is 0 if C is.
    """

    weighted: Tensor
    crossed: Tensor
    moment: Tensor
    damping: float
    scale: float
    whole: float


class ValueOutput(NamedTuple):
    """A fit at one rank.

    `encode` (G, r, d) has orthonormal rows; the Gram matrix of `outputs` (D, R) is the outputs' moment in the metric of
    the loss, up to the problem's scale; `factor` (R, R) is the Cholesky factor of E C Eᵀ; `loss` is ½ tr(G Δ C Δᵀ).
    """

    encode: Tensor
    outputs: Tensor
    factor: Tensor
    loss: float


def value_output_problem(weight_DF: Tensor, metric_DD: Tensor | Factored, moment_FF: Tensor) -> ValueOutputProblem:
    """Prepare fits of several ranks with 4 D³ operations and the factorisations of G and C, in float64.

    Args:
        weight_DF: W_o; head h reads columns h·d to (h+1)·d, heads of a group are neighbours.
        metric_DD: G, of the outputs, possibly `factored`; its normalisation scales the loss.
        moment_FF: C = E[c cᵀ] of W_o's inputs, all heads.

    Raises ValueError on shapes that do not fit, NaN or infinity, and if C is far from positive semidefinite.
    """
    require_square("moment", moment_FF)
    metric = metric_DD if isinstance(metric_DD, Factored) else factored(metric_DD)
    if tuple(weight_DF.shape) != (len(metric.factor), len(moment_FF)):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (weight_DF, metric.factor, moment_FF))
        raise ValueError(f"weight (D, H·d), metric (D, D) and moment (H·d, H·d) do not fit: {shapes}")
    require_finite("weight", weight_DF)
    require_finite("moment", moment_FF)
    weight_DF = weight_DF.detach().to(torch.float64)
    damped_FF, damping = _damped(moment_FF.detach().to(torch.float64))
    scale = metric.scale if float(moment_FF.diagonal().mean()) else 0.0
    weighted_DF = metric.factor.T @ weight_DF
    crossed_DF = weighted_DF @ damped_FF
    whole = scale * float((crossed_DF * weighted_DF).sum())
    return ValueOutputProblem(weighted_DF, crossed_DF, damped_FF, damping, scale, whole)


def fit_value_output(
    problem: ValueOutputProblem, encode_Grd: Tensor, turns: int = 8, least_gain: float = 1e-3
) -> ValueOutput:
    """Fit encoders and output projection by alternation from `encode_Grd`.

    Args:
        problem: from `value_output_problem`.
        encode_Grd: the first encoders, with rows of full rank.
        turns: the most turns of encoder and refit; each lowers the loss. The refit alone is turn 0.
        least_gain: stop after a turn that gains less than this share of the loss.

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
        candidate = _refitted(problem, _orthonormal(_encoder(problem, best)))
        gain = best.loss - candidate.loss
        best = candidate if gain > 0.0 else best
        if gain <= least_gain * best.loss:
            break
    return best._replace(loss=_undamped(problem, best))


def output_of(weight_DF: Tensor, problem: ValueOutputProblem, fit: ValueOutput) -> Tensor:
    """Return W' (D, H·r) = W C Eᵀ (E C Eᵀ)⁻¹, the best for the encoders in any metric."""
    crossed_FR = project_heads(problem.moment, _of_all_heads(problem, fit.encode).mT)
    return torch.cholesky_solve((weight_DF.to(torch.float64) @ crossed_FR).T, fit.factor).T.contiguous()


def _of_all_heads(problem: ValueOutputProblem, encode_Grd: Tensor) -> Tensor:
    return repeat_groups(encode_Grd, len(problem.moment) // encode_Grd.shape[2])


def _refitted(problem: ValueOutputProblem, encode_Grd: Tensor) -> ValueOutput:
    """Refit the output projection; the loss is half the difference between the whole and the refit's outputs."""
    encode_Hrd = _of_all_heads(problem, encode_Grd)
    crossed_FR = project_heads(problem.moment, encode_Hrd.mT)
    reduced_RR = project_heads(crossed_FR.T.contiguous(), encode_Hrd.mT)
    factor_RR: Tensor = torch.linalg.cholesky(symmetrized(reduced_RR))
    read_DR = project_heads(problem.crossed, encode_Hrd.mT)
    outputs_DR = torch.linalg.solve_triangular(factor_RR.mT, read_DR, upper=True, left=False)
    explained = problem.scale * float(outputs_DR.square().sum())
    return ValueOutput(encode_Grd, outputs_DR, factor_RR, 0.5 * max(problem.whole - explained, 0.0))


def _damped(moment_FF: Tensor) -> tuple[Tensor, float]:
    """Return the moment with the least damping that makes it positive definite, and this damping.

    A moment of float32 products may have eigenvalues below zero. A fit would find encoders along them, whose loss would
    be below zero without bound.
    """
    least = _DAMPING * float(moment_FF.diagonal().mean()) or 1.0
    for power in range(_POWERS):
        damped_FF = moment_FF.clone()
        damped_FF.diagonal().add_(least * 10**power)
        if not int(torch.linalg.cholesky_ex(damped_FF).info):
            return damped_FF, least * 10**power
    raise ValueError("the moment of the output projection's inputs is not positive semidefinite")


def _undamped(problem: ValueOutputProblem, fit: ValueOutput) -> float:
    """Return the loss without the damping's part."""
    change_DF = problem.weighted - project_heads(_weighted(fit), _of_all_heads(problem, fit.encode))
    return max(0.0, fit.loss - 0.5 * problem.scale * problem.damping * float(change_DF.square().sum()))


def _weighted(fit: ValueOutput) -> Tensor:
    """Fᵀ W' (D, R)."""
    weighted_DR: Tensor = torch.linalg.solve_triangular(fit.factor, fit.outputs, upper=False, left=False)
    return weighted_DR


def _encoder(problem: ValueOutputProblem, fit: ValueOutput) -> Tensor:
    """Fit the encoders to the output projection by preconditioned conjugate gradients from the last encoders.

    Solves Σ_{h,k} K_hk E C_kh = Σ_h (W'ᵀ G W C)_hh over the heads h of each group and all heads k, K = W'ᵀ G W', both
    sides without the scale of G.
    """
    groups, _, width = fit.encode.shape
    damped_FF, heads = problem.moment, len(problem.moment) // width
    weighted_DR = _weighted(fit)
    gram_RR = weighted_DR.T @ weighted_DR
    crossed_Hrd = torch.bmm(
        weighted_DR.unflatten(1, (heads, -1)).permute(1, 2, 0),
        problem.crossed.unflatten(1, (heads, -1)).transpose(0, 1),
    )
    target_Grd = group_sums(crossed_Hrd, groups)
    rows_Grr = diagonal_blocks(gram_RR, heads, groups)
    columns_Gdd = diagonal_blocks(damped_FF, heads, groups)
    inverse_Grr, inverse_Gdd = _damped_inverse(rows_Grr), _damped_inverse(columns_Gdd)

    def _apply(encode_Grd: Tensor) -> Tensor:
        spread_RF = project_heads(gram_RR, repeat_groups(encode_Grd, heads))
        return group_sums(_blocks_of_product(spread_RF, damped_FF, heads), groups)

    solution = fit.encode.clone()
    residual = target_Grd - _apply(solution)
    least = _SMALL * float(target_Grd.square().sum())
    direction = scaled = inverse_Grr @ residual @ inverse_Gdd
    energy = float((residual * scaled).sum())
    for _ in range(_STEPS):
        if float(residual.square().sum()) <= least or energy <= 0.0:
            break
        image = _apply(direction)
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
    """Orthonormalise the rows; a refit gives the same loss for the same row spaces."""
    rows_Grd: Tensor = torch.linalg.qr(encode_Grd.mT).Q.mT.contiguous()
    return rows_Grd


def _blocks_of_product(left_RF: Tensor, right_FF: Tensor, heads: int) -> Tensor:
    """Compute only the heads' diagonal blocks (H, r, d) of left · right."""
    return torch.bmm(left_RF.unflatten(0, (heads, -1)), right_FF.unflatten(1, (heads, -1)).transpose(0, 1))


def _damped_inverse(matrix_Gnn: Tensor) -> Tensor:
    """Inverse of symmetric matrices, their eigenvalues clipped from below."""
    values_Gn, vectors_Gnn = torch.linalg.eigh(symmetrized(matrix_Gnn))
    floor_G1 = (values_Gn[:, -1:] * _SMALL).clamp_min(torch.finfo(torch.float64).tiny)
    inverse_Gnn: Tensor = (vectors_Gnn / torch.maximum(values_Gn, floor_G1).unsqueeze(-2)) @ vectors_Gnn.mT
    return inverse_Gnn
