# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""The decoder layer of a model in transformers: attention functions, caches, gradient checkpointing.

B batch, T tokens of this call, S cached tokens, D hidden, H query heads, G key/value heads, d head_dim, r a rank or the
width of a value head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_lamina import eager_attention_forward
from .decoder_layer_lamina import DecoderLayer, SelfAttention, padded
from .latent_attention_lamina import attend_in_blocks, check_groups, check_room
from .processor_lamina import HALF, product_dtype
from .rotary_lamina import Angles, rotate_once


class LaminaAttention(SelfAttention):
    """Self-attention by the function that the config names, over a cache if there is one.

    A layer with latent keys or values caches keys as one head, and values as another: latents, or all dense heads side
    by side.
    """

    block = 512  # cached tokens whose keys are computed from latents at a time

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        halves, cpu = HALF if self._latent else (), torch.device("cpu")
        self._slow_dtypes = frozenset(dtype for dtype in halves if product_dtype(dtype, cpu) != dtype)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        slot_embeddings: Angles | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map normed hidden states (B, T, D) to (the residual's summand (B, T, D), weights (B, H, T, S) or None).

        Args:
            position_embeddings: cos and sin (B, T, c) of this call's tokens.
            attention_mask: the mask of the layer's type.
            slot_embeddings: for latent keys, cos and sin (1, S, c) of all cached slots.
        """
        query, key, value = self._projected(hidden_states, position_embeddings)
        if self.value_dim < self.head_dim:
            value = value.contiguous()  # engines that widen values by .view refuse a slice of a fused projection
        wide = self._dtype_of_latents(query)
        if past_key_values is not None:
            key, value = self._update(past_key_values, key, value)
            if self._in_blocks(query, attention_mask):
                read = partial(self._read_block, hidden_states, key, value, slot_embeddings, wide)
                mixed = attend_in_blocks(
                    query.to(wide), read, key.shape[2], attention_mask, self.scaling, self.block, self.softcap
                )
                heads = self._head_outputs(hidden_states, mixed).to(hidden_states.dtype)
                return self._output(heads, hidden_states), None
        if wide != query.dtype:
            query, key, value = (x.to(wide) for x in (query, key, value))
            if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
                attention_mask = attention_mask.to(wide)
        key, value = self._read(hidden_states, key, value, slot_embeddings or position_embeddings)
        padding = self._padding(query.shape[2])
        query, key, value = padded(query, key, value, padding)

        # vLLM searches the source for this assignment and the call below.
        attention_interface: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        own = {"softcap": self.softcap, "s_aux": self.sinks}
        if own := {name: value for name, value in own.items() if value is not None}:
            kwargs |= own
            if self.config._attn_implementation == "sdpa":  # torch's kernels have neither
                attention_interface = eager_attention_forward
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if padding > 0:  # otherwise the heads may come side by side, as from vLLM
            attn_output = attn_output[..., : self.value_dim]
        if wide != hidden_states.dtype:
            attn_output = attn_output.to(hidden_states.dtype)
        return self._output(attn_output, hidden_states), attn_weights

    def _dtype_of_latents(self, query: Tensor) -> torch.dtype:
        """Return the dtype in which a layer with latents attends: float32 where a CPU multiplies half precision slower.

        Each step multiplies the latents of all cached tokens. Prefill and decoding follow the same rule.
        """
        plain = self.config._attn_implementation in ("sdpa", "eager")
        is_slow = plain and query.device.type == "cpu" and query.dtype in self._slow_dtypes
        return torch.float32 if is_slow else query.dtype

    def _read_block(
        self, x_BTD: Tensor, key: Tensor, value: Tensor, angles: Angles | None, dtype: torch.dtype, slots: slice
    ) -> tuple[Tensor, Tensor]:
        """Return keys (B, G, s, d) of some slots, and values (B, G, s, w) or latents of these (B, 1, s, r)."""
        key, value = key[:, :, slots].to(dtype), value[:, :, slots].to(dtype)
        if "k" in self._latent:
            key = self._heads("k", x_BTD, key.squeeze(1))
            plain = not self.interleaved and self._head_norms != "rotated"
            if angles is not None and plain:
                key = rotate_once(key, *_slots(angles, slots, dtype))
            else:
                key = self._rotated("k", key, None if angles is None else _slots(angles, slots, dtype))
        return key, value

    def _head_outputs(self, x_BTD: Tensor, mixed_BTHw: Tensor) -> Tensor:
        """Return the heads' outputs (B, T, H, w) from mixed values, or from mixed latents (B, T, H, r).

        Values are linear in their latents, and weights add up to 1: v maps one mixture for each query head instead of
        every cached token.
        """
        if "v" not in self._latent:
            return mixed_BTHw
        num_tokens, num_heads = mixed_BTHw.shape[1:3]
        values = self._heads("v", x_BTD, mixed_BTHw.flatten(1, 2))  # (B, G or 1, T·H, w), by every KV head
        groups = values.shape[1]
        values = values.unflatten(2, (num_tokens, groups, num_heads // groups))
        return cast(Tensor, values.diagonal(dim1=1, dim2=3).permute(0, 1, 4, 2, 3).flatten(2, 3))

    def _in_blocks(self, query: Tensor, mask: Any) -> bool:
        """Return True to read latents block by block: in decoding, where all keys at once cost time and memory.

        A prefill reads the latents once for many queries, a compiled graph would hold every block, and other
        implementations of attention were chosen for a reason.
        """
        decoding = query.shape[2] == 1 and not torch.is_grad_enabled()
        plain = self.config._attn_implementation == "sdpa" and (mask is None or isinstance(mask, Tensor))
        plain = plain and self.sinks is None
        return bool(self._latent) and decoding and plain and not torch.compiler.is_compiling()

    def _update(self, cache: Cache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all cached keys and values. Both have as many heads: static caches take the number from the keys."""
        check_groups(cache, self.layer_idx, key, value)
        if not self._latent:
            check_room(cache, self.layer_idx, key, value)
            return cache.update(key, value, self.layer_idx)
        widths = {"k": self.head_dim, "v": self.value_dim}
        key, value = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (key, value))
        check_room(cache, self.layer_idx, key, value)
        key, value = (
            x if role in self._latent else x.squeeze(1).unflatten(-1, (-1, widths[role])).transpose(1, 2)
            for role, x in zip(widths, cache.update(key, value, self.layer_idx), strict=True)
        )
        return key, value

    def _padding(self, num_queries: int) -> int:
        """Return how many zeros to append to each value head (if negative, to query and key heads) for the kernel.

        The cache gets none. Fused kernels need r = d; without them a prefill builds the T × S scores, which takes 4
        times as long, and memory. A single query has no such scores, and reading r instead of d numbers is faster.
        """
        kernel = self.config._attn_implementation or ""
        fused = "flash" in kernel or ("sdpa" in kernel and num_queries > 1)
        return self.head_dim - self.value_dim if fused else 0


def _slots(angles: Angles, slots: slice, dtype: torch.dtype) -> Angles:
    cos, sin = (x[:, slots].to(dtype) for x in angles)
    return cos, sin


class LaminaDecoderLayer(GradientCheckpointingLayer, DecoderLayer):
    """One decoder layer; state dict keys are those of the source's layer."""

    attention_class = LaminaAttention
