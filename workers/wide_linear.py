"""The linears of a layer, with weights in float32 where a CPU multiplies these faster than its own dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lamina.processor_lamina import product_dtype
from pipeline.kernels.half_precision import linear

Convert = Callable[[Tensor, torch.dtype], Tensor]


class WideLinear(nn.Linear):
    """Multiplies in the dtype of its weight, and gives that of its input."""

    def __init__(self, narrow: nn.Linear, dtype: torch.dtype, convert: Convert = Tensor.to) -> None:
        super().__init__(narrow.in_features, narrow.out_features, narrow.bias is not None, torch.device("meta"))
        for name, parameter in narrow.named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(convert(parameter.detach(), dtype), parameter.requires_grad))

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return linear(input, self.weight, self.bias)


def widen_linears_(
    module: nn.Module, dtype: torch.dtype, device: torch.device, convert: Convert = Tensor.to
) -> nn.Module:
    """The module, its linears of `dtype` as `WideLinear` where that is faster on the device."""
    wide = product_dtype(dtype, device)
    return module if wide == dtype else _widened(module, wide, convert)


def _widened(module: nn.Module, dtype: torch.dtype, convert: Convert) -> nn.Module:
    if isinstance(module, nn.Linear):
        return WideLinear(module, dtype, convert)
    for name, child in module.named_children():
        if (changed := _widened(child, dtype, convert)) is not child:
            setattr(module, name, changed)
    return module
