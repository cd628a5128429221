"""Products of sampled inputs, as the forward pass computes them."""

from torch import Tensor

from lamina.processor_lamina import product_dtype
from pipeline.kernels.half_precision import linear


def passed(inputs_TF: Tensor, weight_OF: Tensor) -> Tensor:
    """Return the outputs (T, O) of a linear, in the dtype of its inputs.

    The weight is rounded to that dtype. Both are multiplied in the one that the device multiplies fastest: on a CPU
    without instructions for half precision, products in it take several times as long.
    """
    stored = inputs_TF.dtype
    return linear(inputs_TF, weight_OF.to(stored).to(product_dtype(stored, inputs_TF.device)))
