"""Attention with vLLM's kernels, and the widths of heads in vLLM's cache."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from lamina.configuration_lamina import LaminaConfig
from lamina.decoder_layer_lamina import Memo
from lamina.layers_lamina import LaminaAttention


class CachedHeads:
    """The widths of key and value heads in vLLM's cache, and the backend that supports them (None: vLLM's choice).

    The widths are equal, unless the values of all layers are narrower than keys and the platform is CUDA, whose
    backends `FLASH_ATTN_DIFFKV` and `TRITON_ATTN_DIFFKV` support this. Heads without a kernel are widened.
    """

    def __init__(self, config: LaminaConfig, requested: Any = None, kernel_sizes: tuple[int, ...] = ()) -> None:
        self.backend: Any = None
        width = config.served_value_width()
        self.key = self.value = _widened(max(width, config.head_dim), kernel_sizes)  # wider: absorbed latents
        if width < config.head_dim and current_platform.is_cuda():
            self.backend = _unequal_backend(requested, config.head_dim, width)
        if self.backend is not None:
            self.key, self.value = config.head_dim, width
            self.backend.set_head_size_v(width)

    def saved(self) -> float:
        """Return the saved share of the dense cache."""
        return 1 - (self.key + self.value) / (2 * self.key)


def _widened(width: int, kernel_sizes: tuple[int, ...]) -> int:
    """Return the next width for which the backend has a kernel, or `width` if the backend lists none."""
    return next((size for size in sorted(kernel_sizes) if size >= width), width)


def _unequal_backend(requested: Any, key: int, value: int) -> Any:
    """Return a backend for unequal heads: the requested one, else FlashAttention's if the device has it, else Triton's.

    Return None if another backend was requested, which needs values as wide as keys.
    """
    if requested is not None:
        return requested.get_class() if requested.name.endswith("_DIFFKV") else None
    flash: Any = AttentionBackendEnum.FLASH_ATTN_DIFFKV.get_class()
    if flash.is_supported_on_current_device(head_size=key, head_size_v=value, has_sinks=False):
        return flash
    return AttentionBackendEnum.TRITON_ATTN_DIFFKV.get_class()


class VllmAttention(LaminaAttention):
    """The projections of LaminaAttention with vLLM's cache and kernels. Heads are computed from latents."""

    attn: Attention
    rotary: nn.Module | None

    def connect(self, heads: CachedHeads, parts: int, cache: CacheConfig | None, quant: Any, prefix: str) -> None:
        """Create vLLM's attention for this device's heads."""
        shape, self.cached = self.config.layer_shape(self.layer_idx), heads
        options = {} if heads.backend is None else {"attn_backend": heads.backend, "head_size_v": heads.value}
        self.attn = Attention(
            shape.num_attention_heads // parts,
            heads.key,
            self.scaling,
            num_kv_heads=shape.num_key_value_heads // parts,
            cache_config=cache,
            quant_config=quant,
            per_layer_sliding_window=self.sliding_window,
            prefix=f"{prefix}.attn",
            **options,
        )

    def forward(self, positions_T: Tensor, hidden_TD: Tensor) -> Tensor:  # type: ignore[override]
        """Map normed hidden states (T, D) of tokens at these positions to the block's output (T, D)."""
        x_1TD = hidden_TD.unsqueeze(0)
        memo: Memo = {}
        query = self._heads("q", x_1TD, self._source_output("q", x_1TD, memo))
        key, value = (self._stored(role, x_1TD, memo) for role in ("k", "v"))
        key, value = self._read(x_1TD, key, value, None)
        query_Tn, key_Tn = _rows(query), _rows(key)
        if self.rotary is not None:
            query_Tn, key_Tn = self.rotary(positions_T, query_Tn, key_Tn)
        query_Tn, key_Tn = (_widen(x, self.head_dim, self.cached.key) for x in (query_Tn, key_Tn))
        mixed_Tn = self.attn(query_Tn, key_Tn, _widen(_rows(value), self.value_dim, self.cached.value))
        heads_TX = mixed_Tn.unflatten(-1, (-1, self.cached.value))[..., : self.value_dim].flatten(-2)
        return self._output(heads_TX.unsqueeze(0), x_1TD).squeeze(0)


def _rows(heads_1nTw: Tensor) -> Tensor:
    """Reshape (1, n, T, w) to (T, n·w)."""
    return heads_1nTw.squeeze(0).transpose(0, 1).flatten(1)


def _widen(x_Tn: Tensor, width: int, wider: int) -> Tensor:
    """Append zeros to heads up to another width."""
    if width == wider:
        return x_Tn.contiguous()
    return torch.nn.functional.pad(x_Tn.unflatten(-1, (-1, width)), (0, wider - width)).flatten(-2)
