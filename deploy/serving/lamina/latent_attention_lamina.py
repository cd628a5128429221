"""Attention over a cache whose keys are made when they are read, so many cached tokens at a time.

B batch, T tokens of this call, S cached tokens, H query heads, G key/value heads, d head_dim, w width of a value head.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).min  # not -inf: a block with every token masked stays a number


def attend_in_blocks(
    query_BHTd: Tensor,
    read: Callable[[slice], tuple[Tensor, Tensor]],
    num_slots: int,
    mask: Tensor | None,
    scaling: float,
    block: int,
) -> Tensor:
    """softmax(query keyᵀ · scaling) value over all slots → (B, T, H, w), the softmax carried from block to block.

    `read` gives keys (B, G, s, d) and values (B, G or 1, s, w) of a slice of s <= `block` slots; no more of them exist
    at a time. One value head is of all query heads: latents are mixed as they are. `mask` (B or 1, 1, T, S): True, or 0
    to be added, where a token attends. Sums are float32.
    """
    num_tokens, best, total, out = query_BHTd.shape[2], None, None, None
    for start in range(0, num_slots, block):
        slots = slice(start, min(start + block, num_slots))
        key_BGsd, value_BGsw = read(slots)
        query_BGqd = query_BHTd.unflatten(1, (key_BGsd.shape[1], -1)).flatten(2, 3)  # q = H/G query heads × T
        scores_BGqs = (query_BGqd @ key_BGsd.mT).float() * scaling
        if mask is not None:
            part_BGTs = mask[..., slots].unsqueeze(2).expand(-1, -1, query_BGqd.shape[2] // num_tokens, -1, -1)
            scores_BGqs = _masked(scores_BGqs, part_BGTs.flatten(2, 3))
        highest = scores_BGqs.amax(-1, keepdim=True)
        new_best = highest if best is None else torch.maximum(best, highest)
        weights_BGqs = (scores_BGqs - new_best).exp()
        sums, mixed = weights_BGqs.sum(-1, keepdim=True), _mixed(weights_BGqs.to(value_BGsw.dtype), value_BGsw).float()
        if best is None or total is None or out is None:
            total, out = sums, mixed
        else:
            fade = (best - new_best).exp()
            total, out = total * fade + sums, out * fade + mixed
        best = new_best
    assert total is not None
    assert out is not None
    out_BHTw: Tensor = (out / total).to(query_BHTd.dtype).unflatten(2, (-1, num_tokens)).flatten(1, 2)
    return out_BHTw.transpose(1, 2)


def _mixed(weights_BGqs: Tensor, value_BGsw: Tensor) -> Tensor:
    """weights value → (B, G, q, w); one value head is read once for all, not copied G times."""
    if value_BGsw.shape[1] == weights_BGqs.shape[1]:
        return weights_BGqs @ value_BGsw
    mixed_BHw = weights_BGqs.flatten(1, 2) @ value_BGsw.squeeze(1)
    return cast(Tensor, mixed_BHw.unflatten(1, weights_BGqs.shape[1:3]))


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, SMALLEST)
    return (scores + mask).clamp(min=SMALLEST)
