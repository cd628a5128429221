"""Linear layers whose weights are in float32, for a CPU that multiplies float32 faster than half precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.processor_lamina import product_dtype
from pipeline.kernels.half_precision import linear


class WideLinear(nn.Linear):
    """Multiplies in the dtype of its weight and returns the dtype of its input."""

    def __init__(self, narrow: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(narrow.in_features, narrow.out_features, narrow.bias is not None, torch.device("meta"))
        for name, parameter in narrow.named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        return linear(input, self.weight, self.bias)


def widen_linears_(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Replace linear layers of `dtype` by `WideLinear` if that is faster on the device. Return the module."""
    wide = product_dtype(dtype, device)
    return module if wide == dtype else _widened(module, wide)


def widen_again_(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Convert tensors that were loaded after `widen_linears_`, and switch off their gradients."""
    wide = product_dtype(dtype, device)
    for part in module.modules():
        if isinstance(part, WideLinear):
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().to(wide)))
    module.requires_grad_(False)


def _widened(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Linear):
        return WideLinear(module, dtype)
    for name, child in module.named_children():
        if (changed := _widened(child, dtype)) is not child:
            setattr(module, name, changed)
    return module
