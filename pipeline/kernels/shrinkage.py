"""Moments of gradients from few tokens (docs/methods.md#gradient-moments).

G groups, F features, S sequences, A_s the sum of g gᵀ over the tokens of sequence s, A = Σ_s A_s.
"""

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square


def shrink(sum_GFF: Tensor, square_norms_G: Tensor, sequences: int, tokens: int) -> Tensor:
    """Return the mean per token, shrunk towards its diagonal by `shrink_share`. float64.

    A diagonal moment, (G, F), is only divided. Raises the ValueErrors of `shrink_share`, and unless 1 <= tokens.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, not {tokens}")
    if sum_GFF.ndim == 2:
        require_finite("sum", sum_GFF)
        return sum_GFF.detach().to(torch.float64) / tokens
    share_G11 = shrink_share(sum_GFF, square_norms_G, sequences)[:, None, None]
    mean_GFF = sum_GFF.detach().to(torch.float64) / tokens
    diagonal_GF = mean_GFF.diagonal(dim1=1, dim2=2).clone()
    shrunk_GFF = mean_GFF * (1.0 - share_G11)
    shrunk_GFF.diagonal(dim1=1, dim2=2).copy_(diagonal_GF)
    return shrunk_GFF


def shrink_share(sum_GFF: Tensor, square_norms_G: Tensor, sequences: int) -> Tensor:
    """α (G,) = Σ_s‖A_s − A/S‖² / (S (S − 1)) / ‖A/S − diag A/S‖², clipped to [0, 1]: an estimate of the noise.

    `square_norms_G` holds Σ_s‖A_s‖²_F, summed over sequences of one length. A single sequence gives no estimate: α = 1.
    A diagonal moment has nothing to shrink: α = 0. Raises ValueError on shapes that do not fit, NaN or infinity, and
    unless 1 <= sequences.
    """
    require_square("sum", sum_GFF)
    if sum_GFF.ndim != 3 or tuple(square_norms_G.shape) != (sum_GFF.shape[0],):
        shapes = f"{tuple(sum_GFF.shape)} and {tuple(square_norms_G.shape)}"
        raise ValueError(f"sum (G, F, F) and square norms (G,) do not fit: {shapes}")
    if sequences < 1:
        raise ValueError(f"sequences must be at least 1, not {sequences}")
    peak = require_finite("sum", sum_GFF)
    require_finite("square norms", square_norms_G)
    if peak == 0.0:
        return torch.zeros_like(square_norms_G, dtype=torch.float64)
    unit_GFF = sum_GFF.detach().to(torch.float64) / peak  # squares of the largest magnitudes overflow float64
    whole_G = unit_GFF.square().sum(dim=(1, 2))
    outside_G = whole_G - unit_GFF.diagonal(dim1=1, dim2=2).square().sum(dim=1)
    norms_G = square_norms_G.detach().to(torch.float64) / peak / peak
    if sequences == 1:
        return (outside_G > 0).to(torch.float64)
    spread_G = (norms_G - whole_G / sequences).clamp_min(0.0) * sequences / (sequences - 1)
    return torch.where(outside_G > 0, spread_G / outside_G, 0.0).clamp(0.0, 1.0)
