"""The cost of weight changes in the model's loss, and the cheapest changes (docs/methods.md#curves).

With g the gradient of the loss at an output and x the input, a change Δ of the weight between them costs about
½ E[(gᵀ Δ x)²] ≈ ½ tr(G Δ C Δᵀ) nats per token, G = E[g gᵀ] and C = E[x xᵀ]. Moments here are means per token.

m outputs, D inputs, F = H·d features of all heads, d head dimension, r rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.cholesky import jittered_factor
from pipeline.kernels.heads import project_heads, repeat_groups
from pipeline.kernels.nystrom import INVERSE_JITTERS, LEAST_PIVOT, channel_scale, fill_correlations
from pipeline.kernels.spectra import (
    FLOOR,
    eigenvalues_descending,
    eigh_descending,
    fix_signs,
    symmetrized,
    tail_sums,
)


class Directions(NamedTuple):
    """Directions of a space by their weight in the loss: dropping all beyond r costs ½ Σ_{i>r} values.

    `decode` (n, n) @ `encode` (n, n) is the identity; the first r columns and rows give the best projection of rank r.
    """

    values: Tensor
    encode: Tensor
    decode: Tensor


class Factored(NamedTuple):
    """A moment M = `scale` · F Fᵀ, where F Fᵀ has mean diagonal 1; `factor` F (n, n) is lower triangular."""

    factor: Tensor
    scale: float


def factored(moment_nn: Tensor) -> Factored:
    """Factor a moment once, to share the factor between `Directions`. float64.

    A Cholesky factor serves as well as a root here. A singular moment gets a jitter relative to each diagonal element,
    and no diagonal element counts less than 1e-10 of the largest. For zeros F is the identity, and `scale` 0. Raises
    ValueError on a shape that is not square, NaN or infinity, or if M is not positive semidefinite.
    """
    require_square("moment", moment_nn)
    require_finite("moment", moment_nn)
    unit_nn, scale = _unit(moment_nn)
    scale_n = channel_scale(unit_nn)
    factor_nn = torch.empty_like(unit_nn)
    jittered_factor(
        lambda into_nn: fill_correlations(into_nn, unit_nn, scale_n), factor_nn, LEAST_PIVOT, INVERSE_JITTERS
    )
    diagonal_n = unit_nn.diagonal()
    if not bool(diagonal_n.any()):
        return Factored(factor_nn.tril_(), 0.0)
    return Factored(factor_nn.tril_().mul_(diagonal_n.clamp_min(FLOOR * diagonal_n.max()).sqrt()[:, None]), scale)


def input_directions(moment_DD: Tensor | Factored, pull_DD: Tensor) -> Directions:
    """Directions of an input that the weights W read: W' = W · decode[:, :r] · encode[:r] is the best of rank r.

    With C = F Fᵀ the input moment and V the eigenvectors of Fᵀ J F, decode = F V and encode = Vᵀ F⁻¹; J = Wᵀ G W, or
    as E[j jᵀ] of j = Wᵀ g, is the gradient pulled back to the input. Minimises ‖G^{1/2} (W − W') C^{1/2}‖ without a
    root of either. `moment_DD` is C, possibly `factored`. float64. Raises ValueError on shapes that do not fit, NaN or
    infinity.
    """
    moment = _factored("input moment", moment_DD, "pull", pull_DD)
    return weighted_directions(moment, _weighted(moment, pull_DD))


def weighted_directions(moment: Factored, weighted_DD: Tensor) -> Directions:
    """`input_directions` from Fᵀ J F. Raises ValueError on NaN or infinity."""
    values_D, vectors_DD = eigh_descending(weighted_DD)
    encode_DD = _solve(vectors_DD, moment.factor)
    return Directions(values_D * moment.scale, encode_DD, moment.factor @ vectors_DD)


def output_directions(weight_mF: Tensor, moment_FF: Tensor, metric_mm: Tensor | Factored) -> Directions:
    """Directions of a weight's output: W' = decode[:, :r] · (encode[:r] W) is the best of rank r.

    With G = F Fᵀ and U the eigenvectors of Fᵀ W C Wᵀ F, decode = F⁻ᵀ U and encode = Uᵀ Fᵀ. `metric_mm` is G, possibly
    `factored`. float64. Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    spread_mm = pushforward(weight_mF, moment_FF)
    metric = _factored("metric", metric_mm, "outputs", spread_mm)
    values_m, vectors_mm = eigh_descending(_weighted(metric, spread_mm))
    return Directions(values_m * metric.scale, (metric.factor @ vectors_mm).T, _solve(vectors_mm, metric.factor).T)


def thin_directions(moment: Factored, factor_nk: Tensor) -> Directions:
    """Return the k directions of `weighted_directions` of Y Yᵀ that can count, from the factor Y (n, k), k < n.

    The eigenproblem is that of YᵀY; the vectors are made orthonormal. `decode` is (n, k), `encode` (k, n). Raises
    ValueError on NaN or infinity.
    """
    values_k, vectors_nk = _thin(factor_nk)
    return Directions(values_k * moment.scale, _solve(vectors_nk, moment.factor), moment.factor @ vectors_nk)


def thin_output_directions(weight_mF: Tensor, moment_FF: Tensor, metric: Factored) -> Directions:
    """Return the F directions of `output_directions` that can count, for fewer inputs than outputs.

    `decode` is (m, F), `encode` (F, m). Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    inputs = factored(moment_FF)
    if weight_mF.ndim != 2 or weight_mF.shape != (len(metric.factor), len(inputs.factor)):
        raise ValueError(f"weight {tuple(weight_mF.shape)} and moment {tuple(moment_FF.shape)} do not fit")
    require_finite("weight", weight_mF)
    values_F, vectors_mF = _thin(metric.factor.T @ weight_mF.detach().to(torch.float64) @ inputs.factor)
    encode_Fm = (metric.factor @ vectors_mF).T
    return Directions(values_F * metric.scale * inputs.scale, encode_Fm, _solve(vectors_mF, metric.factor).T)


def least_losses(moment_nn: Tensor | Factored, other_nn: Tensor) -> Tensor:
    """Cost (n + 1,) of the best change to rank r, in nats per token, for r = 0 … n: ½ Σ_{i>r} of the eigenvalues.

    The eigenvalues are the `values` of `input_directions` (from an input's moment and its pull) or `output_directions`
    (from the metric and the outputs' moment), computed without directions. Raises ValueError as they do.
    """
    moment = _factored("moment", moment_nn, "other", other_nn)
    return weighted_losses(_weighted(moment, other_nn), moment.scale)


def weighted_losses(weighted_nn: Tensor, scale: float) -> Tensor:
    """`least_losses` from Fᵀ X F, the other moment X weighted by the first, `scale` · F Fᵀ."""
    return tail_losses(scale * eigenvalues_descending(weighted_nn))


def gram_losses(factor_nk: Tensor, scale: float) -> Tensor:
    """`weighted_losses` of the moment Y Yᵀ of a factor Y (n, k)."""
    outputs, features = factor_nk.shape
    gram = factor_nk.T @ factor_nk if features < outputs else factor_nk @ factor_nk.T
    values = scale * eigenvalues_descending(gram)
    return tail_losses(torch.cat((values, values.new_zeros(outputs - len(values)))))


def tail_losses(values_n: Tensor) -> Tensor:
    """(n + 1,): ½ Σ_{i>r} of eigenvalues, for r = 0 … n."""
    return 0.5 * tail_sums(values_n)


def losses_by_rank(directions: Directions, moment_nn: Tensor, metric_nn: Tensor) -> Tensor:
    """(n + 1,): ½ tr(M Q C Qᵀ), Q = I − decode[:, :r] encode[:r], in nats per token, for r = 0 … n.

    C is the moment of an input or output, M the moment of the gradient there.
    """
    return projection_losses(metric_nn, moment_nn, directions.encode[None], directions.decode[None])


def pullback(weight_mF: Tensor, metric: Tensor) -> Tensor:
    """Wᵀ G W (F, F) in float64: a metric of outputs, (m, m) or its diagonal (m,), as a metric of inputs.

    Raises ValueError on shapes that do not fit.
    """
    if weight_mF.ndim != 2 or metric.shape[-1] != weight_mF.shape[0]:
        raise ValueError(f"weight {tuple(weight_mF.shape)} and metric {tuple(metric.shape)} do not fit")
    weight_mF, metric = weight_mF.detach().to(torch.float64), metric.detach().to(torch.float64)
    read_mF = metric[:, None] * weight_mF if metric.ndim == 1 else metric @ weight_mF
    return symmetrized(weight_mF.T @ read_mF)


def pushforward(weight_mF: Tensor, moment_FF: Tensor) -> Tensor:
    """W C Wᵀ (m, m) in float64: the moment of the outputs. Raises ValueError on shapes that do not fit."""
    if weight_mF.ndim != 2 or tuple(moment_FF.shape) != (weight_mF.shape[1],) * 2:
        raise ValueError(f"weight {tuple(weight_mF.shape)} and moment {tuple(moment_FF.shape)} do not fit")
    weight_mF, moment_FF = weight_mF.detach().to(torch.float64), moment_FF.detach().to(torch.float64)
    return symmetrized(weight_mF @ moment_FF @ weight_mF.T)


def projection_losses(metric_FF: Tensor, moment_FF: Tensor, encode_Gdd: Tensor, decode_Gdd: Tensor) -> Tensor:
    """(d + 1,): ½ tr(M Q C Qᵀ) if every head keeps r of its d directions, for r = 0 … d.

    Q is block diagonal over the heads: I − decode_g[:, :r] encode_g[:r] for each head of group g (heads of a group are
    neighbours; decode_g encode_g = I). Correlations between heads count. M = W_oᵀ G W_o and C = E[c cᵀ] over all heads:
    with H > G this is not the tail of the groups' own eigenvalues, which count every pair of heads of a group.
    Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    features = _same_order("metric", metric_FF, "moment", moment_FF)
    groups, width = encode_Gdd.shape[0], require_square("encode", encode_Gdd)
    if encode_Gdd.ndim != 3 or decode_Gdd.shape != encode_Gdd.shape or features % (groups * width):
        shapes = f"{tuple(encode_Gdd.shape)}, {tuple(decode_Gdd.shape)} and {tuple(metric_FF.shape)}"
        raise ValueError(f"encode (G, d, d), decode (G, d, d) and metric (H·d, H·d) do not fit: {shapes}")
    heads = features // width
    decode_Hdd, encode_Hdd = (repeat_groups(part_Gdd.to(torch.float64), heads) for part_Gdd in (decode_Gdd, encode_Gdd))
    metric_FF, moment_FF = metric_FF.detach().to(torch.float64), moment_FF.detach().to(torch.float64)
    of_metric_FF = project_heads(project_heads(metric_FF, decode_Hdd).T.contiguous(), decode_Hdd)
    of_moment_FF = project_heads(project_heads(moment_FF, encode_Hdd.mT).T.contiguous(), encode_Hdd.mT)
    pairs_dd = (of_metric_FF * of_moment_FF).reshape(heads, width, heads, width).sum(dim=(0, 2))
    # Σ over a, b >= r for every r: the diagonal of cumulative sums from the far corner; on the CPU as in `tail_sums`.
    corner_dd = pairs_dd.cpu().flip(0, 1).cumsum(0).cumsum(1).flip(0, 1)
    losses = 0.5 * torch.cat((corner_dd.diagonal(), corner_dd.new_zeros(1))).clamp_min(0.0)
    return losses.to(metric_FF.device)


def change_loss(change_mF: Tensor, moment_FF: Tensor, metric: Tensor) -> float:
    """½ tr(G Δ C Δᵀ) of one change Δ, G (m, m) or its diagonal (m,). Raises ValueError on shapes that do not fit."""
    if tuple(moment_FF.shape) != (change_mF.shape[1],) * 2:
        raise ValueError(f"change {tuple(change_mF.shape)} and moment {tuple(moment_FF.shape)} do not fit")
    return 0.5 * float((pullback(change_mF, metric) * moment_FF.to(torch.float64)).sum())


def _factored(first: str, moment_nn: Tensor | Factored, second: str, other_nn: Tensor) -> Factored:
    moment = moment_nn if isinstance(moment_nn, Factored) else factored(moment_nn)
    _same_order(first, moment.factor, second, other_nn)
    return moment


def _weighted(moment: Factored, other_nn: Tensor) -> Tensor:
    """Fᵀ X F."""
    return moment.factor.T @ other_nn.detach().to(torch.float64) @ moment.factor


def _solve(vectors_nn: Tensor, factor_nn: Tensor) -> Tensor:
    """Vᵀ F⁻¹."""
    solved_nn: Tensor = torch.linalg.solve_triangular(factor_nn, vectors_nn.T, upper=False, left=False)
    return solved_nn


def _thin(factor_nk: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (k,), descending, and orthonormal eigenvectors (n, k) of Y Yᵀ."""
    values_k, inner_kk = eigh_descending(factor_nk.T @ factor_nk)
    # In columns of small eigenvalue rounding leaves parts of the others, which would count twice.
    vectors_nk: Tensor = torch.linalg.qr(factor_nk @ inner_kk).Q
    return values_k, fix_signs(vectors_nk)


def _unit(matrix: Tensor) -> tuple[Tensor, float]:
    """Scale a matrix to mean diagonal 1, so that factors keep the weights' scale. Return also the divisor."""
    matrix = matrix.detach().to(torch.float64)
    mean = float(matrix.diagonal().mean())
    return (matrix / mean, mean) if mean > 0.0 else (matrix, 1.0)


def _same_order(first: str, one: Tensor, second: str, other: Tensor) -> int:
    size = require_square(first, one)
    if one.ndim != 2 or one.shape != other.shape:
        raise ValueError(f"{first} {tuple(one.shape)} and {second} {tuple(other.shape)} do not fit")
    require_finite(first, one)
    require_finite(second, other)
    return size
