"""Products of half precision in the weight's dtype. lamina.processor_lamina chooses that dtype on a CPU."""

from torch import Tensor
from torch.nn import functional


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` in the weight's dtype; the result is in that of the values."""
    return functional.linear(values.to(weight.dtype), weight, bias).to(values.dtype)
