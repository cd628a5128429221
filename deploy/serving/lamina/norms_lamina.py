"""The norms of layers: of the residual stream, of the outputs of blocks, and of query and key heads.

D hidden, d head_dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class LaminaRMSNorm(nn.Module):
    """x / rms(x) · weight, the root mean square in float32; with an offset, x / rms(x) · (offset + weight) in it."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.variance_epsilon, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, width) to the same shape and dtype."""
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (self.offset + self.weight.float())).to(dtype) if self.offset else self.weight * x.to(dtype)


class LaminaLayerNorm(nn.Module):
    """(x - mean(x)) / std(x) · weight in float32 or better: a LayerNorm without bias, in the steps of Cohere's own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, width) to the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.to(wide.dtype) * wide).to(x.dtype)


def _rms_norm(width: int, eps: float, block: Mapping[str, Any]) -> nn.Module:
    return LaminaRMSNorm(width, eps, block["norm_offset"])


def _layer_norm(width: int, eps: float, block: Mapping[str, Any]) -> nn.Module:
    return nn.LayerNorm(width, eps=eps) if block["norm_bias"] else LaminaLayerNorm(width, eps)


# `norm` of a block -> (width, eps, block) -> the module: a weight of `width` numbers, and perhaps a bias of as many.
NORMS: dict[str, Callable[[int, float, Mapping[str, Any]], nn.Module]] = {"rms": _rms_norm, "layer": _layer_norm}


def make_norm(config: Any) -> nn.Module:
    """Build a norm of D numbers, of layers or of the end of the stack, for a LayersConfig."""
    return NORMS[config.block["norm"]](config.hidden_size, config.norm_eps, config.block)


def make_head_norm(config: Any, layer_idx: int, role: str) -> nn.Module:
    """Build the norm `q_norm` or `k_norm` of a layer: of each head (d), or of the numbers of all heads together."""
    width = config.layer_shape(layer_idx).norm_width(role, config.block)
    return _rms_norm(width, config.norm_eps, config.block)
