"""The norms of layers: of the residual stream, of the outputs of blocks, and of query and key heads.

D hidden, d head_dim.
"""

import torch
from torch import Tensor, nn

from .layers_config_lamina import LayersConfig


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


def make_norm(config: LayersConfig) -> nn.Module:
    """Build a norm of D numbers, of layers or of the end of the stack: weight (D), and bias (D) if the block has it."""
    return _norm(config, config.hidden_size, bias=config.block["norm_bias"])


def make_head_norm(config: LayersConfig, layer_idx: int, role: str) -> nn.Module:
    """Build the norm `q_norm` or `k_norm` of a layer: of each head (d), or of the numbers of all heads together."""
    shape = config.layer_shape(layer_idx)
    heads = shape.num_attention_heads if role == "q_norm" else shape.num_key_value_heads
    width = heads * shape.head_dim if config.block["head_norms"] == "all" else shape.head_dim
    return LaminaRMSNorm(width, config.norm_eps, config.block["norm_offset"])


def _norm(config: LayersConfig, width: int, bias: bool) -> nn.Module:
    if config.block["norm"] == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps) if bias else LaminaLayerNorm(width, config.norm_eps)
    return LaminaRMSNorm(width, config.norm_eps, config.block["norm_offset"])
