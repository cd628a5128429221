"""What the backward pass sums, and the labels it starts from (docs/methods.md#gradient-moments).

S tokens of one sample, F features, n rows of a moment, H heads, G groups of heads, d = F / H, R = S · H / G rows of a
group, V vocabulary.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite
from pipeline.kernels.moments import add_head_moment_

_CHUNK = 512


def add_sample_moment_(total: Tensor, square_norms_G: Tensor, values_SF: Tensor, heads: int = 1) -> None:
    """Adds the second moment A = Σ_t g gᵀ of one sample to the float64 `total`, and ‖A‖²_F to `square_norms_G`.

    `total` is (G, d, d), each group the sum over its heads, or (G, d) for the sums of squares alone. With fewer rows
    than columns ‖A‖_F is that of the R × R product of the rows, and A is never formed apart from the total. Raises
    ValueError on shapes that do not fit and on NaN or infinity.
    """
    groups, width = total.shape[0], total.shape[-1]
    shape = tuple(values_SF.shape)
    if values_SF.ndim != 2 or groups < 1 or heads % groups or shape[1] != heads * width or total.ndim not in (2, 3):
        raise ValueError(f"values (S, F) {shape} of {heads} heads do not fit a total of shape {tuple(total.shape)}")
    peak = require_finite("values", values_SF)
    if peak == 0.0:
        return
    values_SGhd = values_SF.detach().reshape(shape[0], groups, heads // groups, width)
    if total.ndim == 2:
        squares_Gd = values_SGhd.to(torch.float64).square().sum(dim=(0, 2))
        total += squares_Gd
        square_norms_G += squares_Gd.square().sum(dim=1)
    elif shape[0] * (heads // groups) < width:
        add_head_moment_(total, values_SF, heads, groups)
        rows_GRd = (values_SGhd.permute(1, 0, 2, 3).reshape(groups, -1, width) / peak).to(torch.float32)
        products_GRR = (rows_GRd @ rows_GRd.transpose(1, 2)).to(torch.float64)
        square_norms_G += products_GRR.square().sum(dim=(1, 2)) * peak**4
    else:
        sample_Gdd = torch.zeros_like(total)
        add_head_moment_(sample_Gdd, values_SF, heads, groups)
        total += sample_Gdd
        square_norms_G += sample_Gdd.square().sum(dim=(1, 2))


def ordered_sum(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums, by name, of at least one part, in the order given, which is what their last bits depend on.

    New memory. Raises ValueError when there is no part, for a sum of nothing has no shape.
    """
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, values in part.items():
            totals[name] = totals[name].add_(values) if name in totals else values.clone()
    if not totals:
        raise ValueError("a sum of nothing has no shape")
    return totals


def folded(moment: Tensor) -> Tensor:
    """(G, ⌈n/2⌉, n + 1): the upper triangles of symmetric (G, n, n), the lower half of their rows turned round to fill
    what the upper half leaves. Of sums of squares (G, n) themselves.
    """
    if moment.ndim == 2:
        return moment
    half = (moment.shape[-1] + 1) // 2
    both = torch.nn.functional.pad(moment[:, :half].triu(), (1, 0))
    turned = moment[:, half:].flip(1, 2).tril()
    both[:, : turned.shape[1], :-1] += turned
    return both


def unfolded(parts: Tensor) -> Tensor:
    """The moment that was `folded`, symmetric to the last bit."""
    if parts.ndim == 2:
        return parts
    size = parts.shape[-1] - 1
    half = (size + 1) // 2
    upper = torch.cat((parts[:, :, 1:].triu(), parts[:, : size - half, :-1].tril().flip(1, 2)), dim=1)
    return upper + upper.triu(1).mT


def draw_labels(logits_TV: Tensor, uniform_T: Tensor) -> Tensor:
    """A label of each row, drawn from softmax(logits): the first v where the cumulated probability exceeds u in [0, 1).

    Cumulated on the CPU in float64, over sums of 512 entries and then within one of these, so that a device gives the
    same labels each time (a cumulative sum on CUDA does not). Returns (T,) int64 on the device of the logits. Raises
    ValueError on NaN or infinity.
    """
    require_finite("logits", logits_TV)
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
    last_T = _last_positive(chosen_Tc)  # rounding of the sums may leave the target beyond the last entry
    return (chunk_T * _CHUNK + torch.minimum(within_T, last_T)).to(logits_TV.device)


def _last_positive(weights_Tc: Tensor) -> Tensor:
    positions_c = torch.arange(weights_Tc.shape[1])
    return torch.where(weights_Tc > 0, positions_c, 0).amax(dim=1)
