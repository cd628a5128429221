"""Attention over cached latents, with keys computed for a block of tokens at a time; checks of caches.

B batch, T tokens of this call, S cached tokens, H query heads, G key/value heads, d head_dim, w width of a value head.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from .attention_lamina import soft_capped

SMALLEST = torch.finfo(torch.float32).min  # not -inf: a block whose tokens are all masked gives a number


def attend_in_blocks(
    query_BHTd: Tensor,
    read: Callable[[slice], tuple[Tensor, Tensor]],
    num_slots: int,
    mask: Tensor | None,
    scaling: float,
    block: int,
    softcap: float | None = None,
) -> Tensor:
    """Compute softmax(query keyᵀ · scaling) value over all slots → (B, T, H, w), with an online softmax over blocks.

    Sums are float32.

    Args:
        read: returns keys (B, G, s, d) and values (B, G or 1, s, w) of a slice of s <= `block` slots. A single value
            head, such as latents, serves all query heads.
        mask: (B or 1, 1, T, S), True where a token attends, or numbers to add to the scores.
    """
    num_tokens, best, total, out = query_BHTd.shape[2], None, None, None
    for start in range(0, num_slots, block):
        slots = slice(start, min(start + block, num_slots))
        key_BGsd, value_BGsw = read(slots)
        query_BGqd = query_BHTd.unflatten(1, (key_BGsd.shape[1], -1)).flatten(2, 3)  # q = H/G query heads × T
        scores_BGqs = (query_BGqd @ key_BGsd.mT).float() * scaling
        if softcap is not None:
            scores_BGqs = soft_capped(scores_BGqs, softcap)
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
    """Return weights · value (B, G, q, w). A single value head is not copied G times."""
    if value_BGsw.shape[1] == weights_BGqs.shape[1]:
        return weights_BGqs @ value_BGsw
    mixed_BHw = weights_BGqs.flatten(1, 2) @ value_BGsw.squeeze(1)
    return cast(Tensor, mixed_BHw.unflatten(1, weights_BGqs.shape[1:3]))


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, SMALLEST)
    return (scores + mask).clamp(min=SMALLEST)


def check_groups(cache: Cache, layer_idx: int, key_BGTd: Tensor, value_BGTw: Tensor) -> None:
    """Raise ValueError for a quantised cache whose groups do not divide a token's numbers, which would fail later."""
    layers = getattr(cache, "layers", ())
    group = getattr(layers[layer_idx], "q_group_size", None) if layer_idx < len(layers) else None
    for name, x_BGTw in (("keys", key_BGTd), ("values", value_BGTw)):
        if group and (numbers := x_BGTw.shape[1] * x_BGTw.shape[3]) % group:
            raise ValueError(
                f"layer {layer_idx}: a quantised cache in groups of {group} cannot hold {name} of {numbers} "
                "numbers per token; choose a q_group_size that divides them, or compress with "
                "budget: {multiple: 64}, or use another cache"
            )


def check_room(cache: Cache, layer_idx: int, key_BGTd: Tensor, value_BGTw: Tensor) -> None:
    """Raise ValueError for a static cache allocated for heads of the source, as by `early_initialization`."""
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not isinstance(layer, StaticLayer) or layer.keys is None or layer.values is None:
        return
    for name, cached, x_BGTw in (("keys", layer.keys, key_BGTd), ("values", layer.values, value_BGTw)):
        room, needed = ((x.shape[1], x.shape[3]) for x in (cached, x_BGTw))
        if room != needed:
            raise ValueError(
                f"layer {layer_idx}: a static cache with room for {room[0]} heads of {room[1]} {name} cannot hold "
                f"{needed[0]} of {needed[1]}; leave out early_initialization, so that the first update allocates the "
                "size that the layer's forms need"
            )
