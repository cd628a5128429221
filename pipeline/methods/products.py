"""Products of sampled inputs as the forward pass computes them, and sums of them."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lamina.processor_lamina import product_dtype
from pipeline.kernels.half_precision import linear
from pipeline.kernels.moments import bfloat16_factors


def passed(inputs_TF: Tensor, weight_OF: Tensor) -> Tensor:
    """Return the outputs (T, O) of a linear, in the dtype of its inputs.

    The weight is rounded to that dtype. Both are multiplied in the one that the device multiplies fastest: on a CPU
    without instructions for half precision, products in it take several times as long.
    """
    stored = inputs_TF.dtype
    return linear(inputs_TF, weight_OF.to(stored).to(product_dtype(stored, inputs_TF.device)))


def summing(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which float32 sums of products of `dtype` numbers take the device's fastest instructions.

    On a CPU with instructions for bfloat16 these multiply bfloat16 numbers, whose products are exact. Numbers of other
    dtypes are multiplied as they are.
    """
    fast = device.type == "cpu" and dtype == torch.bfloat16 == product_dtype(dtype, device)
    return bfloat16_factors() if fast else nullcontext()
