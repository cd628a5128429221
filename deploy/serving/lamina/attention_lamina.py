"""Attention of whole sequences, and attention with soft-capped scores or with sinks, which torch's kernels lack.

B batch, T queries, S keys, H query heads, G key/value heads, d head_dim, w width of a value head.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 512  # queries whose scores are computed at a time where torch has no kernel


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap), which lies between -cap and cap."""
    return torch.tanh(x / cap) * cap


def attend(
    query_BHTd: Tensor,
    key_BGTd: Tensor,
    value_BGTd: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of whole sequences → (B, T, H, d).

    With a window, `window` tokens attend at a time, and no mask is larger than window · 2 window. With a soft cap or
    with sinks, at most BLOCK tokens do.
    """
    if softcap is not None or sinks_H is not None:
        return _attend_in_parts(query_BHTd, key_BGTd, value_BGTd, scaling, window, softcap, sinks_H)
    num_tokens, groups = query_BHTd.shape[2], query_BHTd.shape[1] // key_BGTd.shape[1]
    whole = window is None or num_tokens <= window
    grouped = groups > 1 and whole and query_BHTd.shape[-1] <= 256  # else CUDA has no fused kernel for groups
    if groups > 1 and not grouped:
        key_BGTd, value_BGTd = (x.repeat_interleave(groups, dim=1) for x in (key_BGTd, value_BGTd))
    kernel = partial(nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=grouped)
    if window is None or whole:
        return kernel(query_BHTd, key_BGTd, value_BGTd, is_causal=num_tokens > 1).transpose(1, 2).contiguous()
    parts = []
    for start in range(0, num_tokens, window):
        first, stop = max(0, start - window + 1), min(start + window, num_tokens)
        queries, keys = (torch.arange(begin, stop, device=query_BHTd.device) for begin in (start, first))
        distance = queries[:, None] - keys
        near = (distance >= 0) & (distance < window)
        reach = slice(first, stop)
        key_BGsd, value_BGsd = key_BGTd[:, :, reach], value_BGTd[:, :, reach]
        parts.append(kernel(query_BHTd[:, :, start:stop], key_BGsd, value_BGsd, attn_mask=near))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _attend_in_parts(
    query_BHTd: Tensor,
    key_BGTd: Tensor,
    value_BGTd: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    num_tokens, parts = query_BHTd.shape[2], []
    for start in range(0, num_tokens, BLOCK):
        stop = min(start + BLOCK, num_tokens)
        first = 0 if window is None else max(0, start - window + 1)
        queries, keys = (torch.arange(begin, stop, device=query_BHTd.device) for begin in (start, first))
        distance = queries[:, None] - keys
        near = (distance >= 0) & (distance < (window or num_tokens))
        reach = slice(first, stop)
        part = query_BHTd[:, :, start:stop], key_BGTd[:, :, reach], value_BGTd[:, :, reach], near
        mixed, _ = attend_by_scores(*part, scaling, softcap, sinks_H)
        parts.append(mixed)
    return torch.cat(parts, dim=1)


def attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None,
    sinks_H: Tensor | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax attention; key (B, G, S, d), value (B, G, S, w) → ((B, T, H, w), weights (B, H, T, S)).

    `mask`: True where a token attends, or numbers to add to the scores. `sinks_H`: a score of each head that takes part
    in the softmax, and to which no value belongs.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = soft_capped(scores, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = nn.functional.dropout(weights if sinks_H is None else weights[..., :-1], p=dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attend_by_scores` from the arguments of transformers' attention functions, which call sinks `s_aux`.

    Without a mask, the queries are the first tokens of the cache, or a single one, as in transformers' own functions.
    """
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return attend_by_scores(query, key, value, attention_mask, scaling, softcap, s_aux, dropout)
