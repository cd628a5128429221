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
from pipeline.kernels.heads import by_heads, diagonal_blocks, group_sums, of_heads

# Relative to the mean diagonal: what no calibration token has excited keeps the basis and the weight it had.
_DAMPING = 1e-7
_STEPS = 24  # of conjugate gradients, from the last encoder on
_SMALL = 1e-12


class ValueOutput(NamedTuple):
    """`encode` (G, r, d), rows orthonormal; `output` (D, H·r); `loss` ½ tr(G Δ C Δᵀ), after the last turn."""

    encode: Tensor
    output: Tensor
    loss: float


def fit_value_output(
    weight_DF: Tensor,
    metric_DD: Tensor,
    moment_FF: Tensor,
    encode_Grd: Tensor,
    turns: int = 8,
    least_gain: float = 1e-3,
) -> ValueOutput:
    """Encoders and output projection of least loss that alternation from `encode_Grd` reaches. Inputs stay unchanged.

    Args:
        weight_DF: W_o; head h reads columns h·d to (h+1)·d, heads of a group are neighbours.
        metric_DD: G, of the outputs; per token or not, it scales the loss.
        moment_FF: C = E[c cᵀ] of what W_o reads, all heads.
        encode_Grd: where to start: rows of full rank.
        turns: at most so many of encoder and refit; each lowers the loss, the refit alone is turn 0.
        least_gain: a turn that gains less than this share of the loss is the last.

    Everything in float64. Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    heads, weight_DF, metric_DD, moment_FF = _checked(weight_DF, metric_DD, moment_FF, encode_Grd)
    damped_FF = moment_FF.clone()
    damped_FF.diagonal().add_(_DAMPING * float(moment_FF.diagonal().mean()) or 1.0)
    whole = _trace(metric_DD @ (weight_DF @ damped_FF), weight_DF)
    best = _refitted(weight_DF, metric_DD, damped_FF, _orthonormal(encode_Grd.to(torch.float64)), heads, whole)
    for _ in range(turns):
        encode_Grd = _encoder(weight_DF, metric_DD, damped_FF, best, heads)
        found = _refitted(weight_DF, metric_DD, damped_FF, _orthonormal(encode_Grd), heads, whole)
        gain = best.loss - found.loss
        best = found if gain > 0.0 else best
        if gain <= least_gain * best.loss:
            break
    return best


def _refitted(
    weight_DF: Tensor, metric_DD: Tensor, damped_FF: Tensor, encode_Grd: Tensor, heads: int, whole: float
) -> ValueOutput:
    """W' = W C Eᵀ (E C Eᵀ)⁻¹, the best for E whatever the metric; the loss is what its outputs leave of the whole."""
    encode_Hrd = of_heads(encode_Grd, heads)
    crossed_FR = by_heads(damped_FF, encode_Hrd.mT)
    reduced_RR = by_heads(crossed_FR.T.contiguous(), encode_Hrd.mT)
    read_DR = weight_DF @ crossed_FR
    output_DR = torch.cholesky_solve(read_DR.T, torch.linalg.cholesky(0.5 * (reduced_RR + reduced_RR.T))).T.contiguous()
    kept = _trace(metric_DD @ output_DR, read_DR)
    return ValueOutput(encode_Grd, output_DR, 0.5 * max(whole - kept, 0.0))


def _encoder(weight_DF: Tensor, metric_DD: Tensor, damped_FF: Tensor, found: ValueOutput, heads: int) -> Tensor:
    """The encoders of least loss for the output projection, by preconditioned conjugate gradients from the last ones.

    Solves Σ_{h,k} K_hk E C_kh = Σ_h (W'ᵀ G W C)_hh over the heads h of each group and all heads k, K = W'ᵀ G W'.
    """
    groups = found.encode.shape[0]
    read_DR = metric_DD @ found.output
    gram_RR = found.output.T @ read_DR
    target_Grd = group_sums(_blocks_of_product(read_DR.T @ weight_DF, damped_FF, heads), groups)
    rows_Grr = diagonal_blocks(gram_RR, heads, groups)
    columns_Gdd = diagonal_blocks(damped_FF, heads, groups)
    inverse_Grr, inverse_Gdd = _damped_inverse(rows_Grr), _damped_inverse(columns_Gdd)

    def apply(encode_Grd: Tensor) -> Tensor:
        spread_RF = by_heads(gram_RR, of_heads(encode_Grd, heads))
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


def _checked(
    weight_DF: Tensor, metric_DD: Tensor, moment_FF: Tensor, encode_Grd: Tensor
) -> tuple[int, Tensor, Tensor, Tensor]:
    features = require_square("moment", moment_FF)
    hidden = require_square("metric", metric_DD)
    groups, rank, width = encode_Grd.shape if encode_Grd.ndim == 3 else (0, 0, 0)
    fits = groups > 0 and 1 <= rank <= width and features % (groups * width) == 0
    if tuple(weight_DF.shape) != (hidden, features) or not fits:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (weight_DF, metric_DD, moment_FF, encode_Grd))
        raise ValueError(f"weight (D, H·d), metric (D, D), moment (H·d, H·d), encode (G, r, d) do not fit: {shapes}")
    for name, tensor in {"weight": weight_DF, "metric": metric_DD, "moment": moment_FF, "encode": encode_Grd}.items():
        require_finite(name, tensor)
    weight_DF, metric_DD, moment_FF = (t.detach().to(torch.float64) for t in (weight_DF, metric_DD, moment_FF))
    return features // width, weight_DF, metric_DD, moment_FF


def _trace(left: Tensor, right: Tensor) -> float:
    return float((left * right).sum())


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
