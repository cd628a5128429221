"""Sums and drawn labels of the backward pass (docs/methods.md#gradient-moments).

S tokens of one sample, F features, H heads, G groups of heads, d = F / H, R = S · H / G rows of a group, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite
from pipeline.kernels.moments import batched_product

_CHUNK = 512
NUMBERS_AT_ONCE = 1 << 21  # of logits, of which copies are made


def sample_square_norms(values_SF: Tensor, heads: int = 1, groups: int = 1) -> Tensor:
    """‖A‖²_F (G,) float64 of the second moments A = Σ_t g gᵀ of a sample's values (S, F), summed over a group's heads.

    The R × R product of the rows has the same norm; the smaller matrix is computed, in float32. Raises ValueError on
    shapes that do not fit and on NaN or infinity.
    """
    shape = tuple(values_SF.shape)
    if values_SF.ndim != 2 or groups < 1 or heads % groups or shape[1] % heads:
        raise ValueError(f"values (S, F) {shape} cannot be cut into {heads} heads of {groups} groups")
    peak = require_finite("values", values_SF)
    if peak == 0.0:
        return torch.zeros(groups, dtype=torch.float64, device=values_SF.device)
    values_SGhd = values_SF.detach().reshape(shape[0], groups, heads // groups, -1)
    rows_GRd = (values_SGhd.permute(1, 0, 2, 3).reshape(groups, -1, shape[1] // heads) / peak).to(torch.float32)
    if rows_GRd.shape[1] < rows_GRd.shape[2]:
        rows_GRd = rows_GRd.mT
    products = batched_product(rows_GRd.mT, rows_GRd, torch.float32).to(torch.float64)
    return products.square_().flatten(1).sum(dim=1) * peak**4


def draw_labels(logits_TV: Tensor, uniform_T: Tensor) -> Tensor:
    """Draw a label for each row from softmax(logits): the first v whose cumulative probability exceeds u in [0, 1).

    Sums of 512 entries, and then the entries of one, are cumulated on the CPU in float64, so that a device draws the
    same labels each time (cumulative sums on CUDA vary). Return (T,) int64 on the device of the logits. Raises
    ValueError on NaN or infinity.
    """
    require_finite("logits", logits_TV)
    return torch.cat([_drawn(*rows) for rows in cut_logits(logits_TV, uniform_T)])


def cut_logits(logits_TV: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield rows of logits, and of tensors that belong to the same tokens, a few at a time.

    With a large vocabulary logits are the largest tensors of a job, and copies of a few rows take little memory beside
    them. A CPU computes the figures of a row alike among any others. A GPU might not: its rows stay together.
    """
    tokens, vocab = logits_TV.shape
    count = max(1, tokens if logits_TV.is_cuda else NUMBERS_AT_ONCE // vocab)
    return zip(*(tensor.split(count) for tensor in (logits_TV, *more)), strict=True)


def _drawn(logits_TV: Tensor, uniform_T: Tensor) -> Tensor:
    tokens, vocab = logits_TV.shape
    weights_TV = torch.exp(logits_TV.detach().float() - logits_TV.detach().float().amax(dim=1, keepdim=True))
    padded_TV = torch.nn.functional.pad(weights_TV, (0, -vocab % _CHUNK))
    chunks_TCc = padded_TV.view(tokens, -1, _CHUNK)
    ends_TC = chunks_TCc.sum(dim=2, dtype=torch.float64).cpu().cumsum(dim=1)
    target_T = uniform_T.cpu().to(torch.float64) * ends_TC[:, -1]
    chunk_T = torch.searchsorted(ends_TC, target_T[:, None], right=True)[:, 0].clamp_max(ends_TC.shape[1] - 1)
    rows_T = torch.arange(tokens)
    before_T = torch.where(chunk_T > 0, ends_TC[rows_T, chunk_T - 1], 0.0)
    chosen_Tc = chunks_TCc[rows_T.to(logits_TV.device), chunk_T.to(logits_TV.device)].cpu().to(torch.float64)
    within_T = torch.searchsorted(chosen_Tc.cumsum(dim=1), (target_T - before_T)[:, None], right=True)[:, 0]
    last_T = _last_positive(chosen_Tc)  # rounding may put the target beyond the last entry
    return (chunk_T * _CHUNK + torch.minimum(within_T, last_T)).to(logits_TV.device)


def _last_positive(weights_Tc: Tensor) -> Tensor:
    positions_c = torch.arange(weights_Tc.shape[1])
    return torch.where(weights_Tc > 0, positions_c, 0).amax(dim=1)
