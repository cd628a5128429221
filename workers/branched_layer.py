"""Decoder layers on samples that branch: sequences that begin alike, and do not see each other where they differ.

Legend: B samples, S tokens of a sample, D hidden, H query heads, G key/value heads, d head_dim, w width of a value
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention_lamina import attend_by_scores
from lamina.decoder_layer_lamina import DecoderLayer, SelfAttention, padded
from lamina.rotary_lamina import Angles


@dataclass(frozen=True)
class Places:
    """The places of tokens in samples that branch.

    `ends` (B, S): one past the last token that continues the sequence of each token.
    """

    ends: Tensor

    @cached_property
    def seen(self) -> Tensor:
        """True where a token attends (B, S, S): to itself, and to earlier ones whose sequence it continues."""
        tokens_S = torch.arange(self.ends.shape[1], device=self.ends.device)
        return (tokens_S[:, None] < self.ends[:, None]) & (tokens_S <= tokens_S[:, None])

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token (B, S) in its own sequence."""
        return self.seen.sum(dim=2) - 1

    def mask(self, window: int | None) -> Tensor:
        """Return the mask (B, S, S), True where a token attends. `window`: tokens that attend at a time."""
        if window is None:
            return self.seen
        distance_BSS = self.positions[:, :, None] - self.positions[:, None]
        return self.seen & (distance_BSS < window)


class BranchedAttention(SelfAttention):
    """Attention that also accepts a mask (B, S, S)."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map normed hidden states (B, S, D) to the block's output, and None."""
        if attention_mask is None:
            return super().forward(hidden_states, position_embeddings, None, past_key_values, **kwargs)
        query, key, value = self._projected(hidden_states, position_embeddings)
        key, value = self._read(hidden_states, key, value, position_embeddings)
        query, key, value = padded(query, key, value, self.head_dim - self.value_dim)
        heads = self._attend(query, key, value, attention_mask.unsqueeze(1))
        return self._output(heads[..., : self.value_dim], hidden_states), None

    def _attend(self, query_BHSd: Tensor, key_BGSd: Tensor, value_BGSw: Tensor, mask_B1SS: Tensor) -> Tensor:
        """Return the heads' outputs (B, S, H, w)."""
        if self.softcap is not None or self.sinks is not None:
            inputs = query_BHSd, key_BGSd, value_BGSw, mask_B1SS
            return attend_by_scores(*inputs, self.scaling, self.softcap, self.sinks)[0]
        groups = self.num_key_value_groups
        key_BHSd, value_BHSw = (x.repeat_interleave(groups, dim=1) for x in (key_BGSd, value_BGSw))
        kernel = nn.functional.scaled_dot_product_attention
        mixed_BHSw = kernel(query_BHSd, key_BHSd, value_BHSw, attn_mask=mask_B1SS, scale=self.scaling)
        return mixed_BHSw.transpose(1, 2).contiguous()


class BranchedLayer(DecoderLayer):
    """A decoder layer of whole samples, which may branch if its attention is of this project's own class."""

    attention_class = BranchedAttention

    @property
    def window(self) -> int | None:
        """The number of tokens that attend at a time; None: all."""
        for module in self.modules():
            if isinstance(module, BranchedAttention):
                return module.sliding_window
        return None
