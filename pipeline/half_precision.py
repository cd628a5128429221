"""Products of half precision on a CPU that multiplies float32 faster: their numbers are exact in float32, the sums are
float32's in both, and the result is rounded to half precision in both."""

import torch
from torch import Tensor
from torch.nn import functional

from manifests.processor import multiplies_fast

HALF = (torch.float16, torch.bfloat16)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which products of numbers of `dtype` are computed: in their own, or in float32."""
    if device.type != "cpu" or dtype not in HALF or multiplies_fast(str(dtype).removeprefix("torch.")):
        return dtype
    return torch.float32


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` in the weight's dtype; the result is in that of the values."""
    return functional.linear(values.to(weight.dtype), weight, bias).to(values.dtype)
