"""What a change of a weight costs the model's loss, and the changes that cost least (docs/methods.md#curves).

With g the gradient of the loss at an output and x the input, a change Δ of the weight between them costs about
½ E[(gᵀ Δ x)²] ≈ ½ tr(G Δ C Δᵀ) nats per token, G = E[g gᵀ] and C = E[x xᵀ]. Moments here are means per token.

m outputs, D inputs, F = H·d features of all heads, d head dimension, r rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.heads import by_heads, of_heads
from pipeline.kernels.spectra import FLOOR, eigh_descending, symmetric_root


class Directions(NamedTuple):
    """Directions of a space by what they weigh on the loss: the change that drops all beyond r costs ½ Σ_{i>r} values.

    `decode` (n, n) @ `encode` (n, n) is the identity; the first r columns and rows give the best projection of rank r.
    """

    values: Tensor
    encode: Tensor
    decode: Tensor


class Roots(NamedTuple):
    """`root` M^{1/2} and `inverse` M^{-1/2} of a moment of mean diagonal 1, and the divisor `scale` that made it so."""

    root: Tensor
    inverse: Tensor
    scale: float


def roots_of(moment_nn: Tensor, floor: float = FLOOR) -> Roots:
    """For several directions in one metric, or of one input. float64.

    Eigenvalues are clipped from below at `floor` x the largest. Raises ValueError on a shape that is not square, NaN or
    infinity.
    """
    require_square("moment", moment_nn)
    require_finite("moment", moment_nn)
    unit_nn, scale = _unit(moment_nn)
    root_nn, inverse_nn, _ = symmetric_root(unit_nn, floor)
    return Roots(root_nn, inverse_nn, scale)


def input_directions(moment_DD: Tensor | Roots, pull_DD: Tensor, floor: float = FLOOR) -> Directions:
    """Of a stack of weights W that read one input: W' = W · decode[:, :r] · encode[:r] is the best of rank r.

    With S = C^{1/2} of the input moment C and V the eigenvectors of S J S, decode = S V and encode = Vᵀ S⁻¹;
    J = Wᵀ G W, or as E[j jᵀ] of j = Wᵀ g, is the gradient pulled back to the input. Least error in the metric
    ‖G^{1/2} (W − W') C^{1/2}‖, with no root of G. C, or its `roots_of`. float64. Raises ValueError on shapes that do
    not fit, NaN or infinity.
    """
    roots = moment_DD if isinstance(moment_DD, Roots) else roots_of(moment_DD, floor)
    _same_order("input moment", roots.root, "pull", pull_DD)
    values_D, vectors_DD = eigh_descending(roots.root @ pull_DD.detach().to(torch.float64) @ roots.root)
    return Directions(values_D * roots.scale, vectors_DD.T @ roots.inverse, roots.root @ vectors_DD)


def output_directions(
    weight_mF: Tensor, moment_FF: Tensor, metric_mm: Tensor | Roots, floor: float = FLOOR
) -> Directions:
    """Of one weight by its output: W' = decode[:, :r] · (encode[:r] W) is the best of rank r.

    With R = G^{1/2} and U the eigenvectors of R W C Wᵀ R, decode = R⁻¹ U and encode = Uᵀ R. G, or its `roots_of`.
    float64. Raises ValueError on shapes that do not fit, NaN or infinity.
    """
    return spread_directions(pushed(weight_mF, moment_FF), metric_mm, floor)


def spread_directions(spread_mm: Tensor, metric_mm: Tensor | Roots, floor: float = FLOOR) -> Directions:
    """`output_directions`, from the moment W C Wᵀ of the outputs (`pushed`). Raises ValueError as it does."""
    roots = metric_mm if isinstance(metric_mm, Roots) else roots_of(metric_mm, floor)
    _same_order("metric", roots.root, "outputs", spread_mm)
    values_m, vectors_mm = eigh_descending(roots.root @ spread_mm @ roots.root)
    return Directions(values_m * roots.scale, vectors_mm.T @ roots.root, roots.inverse @ vectors_mm)


def losses_by_rank(found: Directions, moment_nn: Tensor, metric_nn: Tensor) -> Tensor:
    """(n + 1,): ½ tr(M Q C Qᵀ), Q = I − decode[:, :r] encode[:r], in nats per token, for r = 0 … n.

    Of an input: C its moment, M the gradient pulled back to it. Of an output: C its moment, M the gradient there.
    """
    return projection_losses(metric_nn, moment_nn, found.encode[None], found.decode[None])


def pulled(weight_mF: Tensor, metric: Tensor) -> Tensor:
    """Wᵀ G W (F, F) in float64: a metric of outputs, (m, m) or its diagonal (m,), as one of inputs.

    Raises ValueError on shapes that do not fit.
    """
    if weight_mF.ndim != 2 or metric.shape[-1] != weight_mF.shape[0]:
        raise ValueError(f"weight {tuple(weight_mF.shape)} and metric {tuple(metric.shape)} do not fit")
    weight_mF, metric = weight_mF.detach().to(torch.float64), metric.detach().to(torch.float64)
    read_mF = metric[:, None] * weight_mF if metric.ndim == 1 else metric @ weight_mF
    return _symmetric(weight_mF.T @ read_mF)


def pushed(weight_mF: Tensor, moment_FF: Tensor) -> Tensor:
    """W C Wᵀ (m, m) in float64: the moment of the outputs. Raises ValueError on shapes that do not fit."""
    if weight_mF.ndim != 2 or tuple(moment_FF.shape) != (weight_mF.shape[1],) * 2:
        raise ValueError(f"weight {tuple(weight_mF.shape)} and moment {tuple(moment_FF.shape)} do not fit")
    weight_mF, moment_FF = weight_mF.detach().to(torch.float64), moment_FF.detach().to(torch.float64)
    return _symmetric(weight_mF @ moment_FF @ weight_mF.T)


def projection_losses(metric_FF: Tensor, moment_FF: Tensor, encode_Gdd: Tensor, decode_Gdd: Tensor) -> Tensor:
    """(d + 1,): ½ tr(M Q C Qᵀ) when every head keeps r of its d directions, for r = 0 … d.

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
    decode_Hdd, encode_Hdd = (of_heads(part_Gdd.to(torch.float64), heads) for part_Gdd in (decode_Gdd, encode_Gdd))
    metric_FF, moment_FF = metric_FF.detach().to(torch.float64), moment_FF.detach().to(torch.float64)
    of_metric_FF = by_heads(by_heads(metric_FF, decode_Hdd).T.contiguous(), decode_Hdd)
    of_moment_FF = by_heads(by_heads(moment_FF, encode_Hdd.mT).T.contiguous(), encode_Hdd.mT)
    pairs_dd = (of_metric_FF * of_moment_FF).reshape(heads, width, heads, width).sum(dim=(0, 2))
    # Σ over a, b >= r, for every r: the diagonal of the sums from the far corner.
    corner_dd = pairs_dd.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1)
    return 0.5 * torch.cat((corner_dd.diagonal(), corner_dd.new_zeros(1))).clamp_min(0.0)


def change_loss(change_mF: Tensor, moment_FF: Tensor, metric: Tensor) -> float:
    """½ tr(G Δ C Δᵀ) of one change Δ, G (m, m) or its diagonal (m,). Raises ValueError on shapes that do not fit."""
    if tuple(moment_FF.shape) != (change_mF.shape[1],) * 2:
        raise ValueError(f"change {tuple(change_mF.shape)} and moment {tuple(moment_FF.shape)} do not fit")
    return 0.5 * float((pulled(change_mF, metric) * moment_FF.to(torch.float64)).sum())


def _unit(matrix: Tensor) -> tuple[Tensor, float]:
    """A matrix brought to mean diagonal 1, so that factors keep the scale of the weights, and its divisor."""
    matrix = matrix.detach().to(torch.float64)
    mean = float(matrix.diagonal().mean())
    return (matrix / mean, mean) if mean > 0.0 else (matrix, 1.0)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T).mul_(0.5)


def _same_order(first: str, left: Tensor, second: str, right: Tensor) -> int:
    size = require_square(first, left)
    if left.ndim != 2 or left.shape != right.shape:
        raise ValueError(f"{first} {tuple(left.shape)} and {second} {tuple(right.shape)} do not fit")
    require_finite(first, left)
    require_finite(second, right)
    return size
