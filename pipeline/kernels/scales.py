"""Scales for matrices that are decomposed together, so that small ones are not lost in the rounding of large ones."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite

# float32 factors hold seven digits of the largest matrix of a stack. Smaller matrices should keep at least four.
SPREAD = 1e3
BLOCK_ROWS = 2048  # rows of a weight converted to float64 at a time


def common_scales(weights: Sequence[Tensor]) -> list[float]:
    """Return a power of two for each weight, the divisor to apply before the weights are stacked.

    All are 1.0 unless the root mean squares of two nonzero weights differ by more than a factor SPREAD: then the
    quotients have one size, half way (in the exponent) between the largest and the smallest. Raises ValueError on NaN
    or infinity.
    """
    sizes = []
    for weight in weights:
        peak = require_finite("weight", weight)
        sizes.append(peak * math.sqrt(_mean_square(weight.detach(), peak)) if peak > 0.0 else 0.0)
    live = [size for size in sizes if size > 0.0]
    if not live or max(live) <= SPREAD * min(live):
        return [1.0] * len(sizes)
    exponents = [math.frexp(size)[1] if size > 0.0 else None for size in sizes]
    nonzero = [exponent for exponent in exponents if exponent is not None]
    middle = (max(nonzero) + min(nonzero)) // 2
    return [1.0 if exponent is None else 2.0 ** (exponent - middle) for exponent in exponents]


def equalize(weights: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
    """Divide the weights by their common scales. Return quotients and scales. Equal scales leave the weights unchanged.

    The quotients are float32, or float64 for a float64 weight: exact, as a scale is a power of two. Raises ValueError
    on NaN or infinity.
    """
    scales = common_scales(weights)
    if max(scales) == min(scales):
        return list(weights), scales
    pairs = zip(weights, scales, strict=True)
    return [
        weight.detach().to(torch.promote_types(weight.dtype, torch.float32)) / scale for weight, scale in pairs
    ], scales


def _mean_square(weight: Tensor, peak: float) -> float:
    """Return the mean square of weight / peak in float64, a block of rows at a time."""
    blocks = weight.split(BLOCK_ROWS)
    return sum(float((block.double() / peak).square().sum()) for block in blocks) / weight.numel()


def scale_report(scales: Sequence[float]) -> dict[str, list[float]]:
    """Return the entry `scaled` of a layer's report, the divisors of a stack's weights; empty if all are 1."""
    return {"scaled": list(scales)} if any(scale != 1.0 for scale in scales) else {}
