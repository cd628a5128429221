"""Sizes of matrices that are decomposed together: the smaller ones must not drown in the rounding of the larger."""

import math
from collections.abc import Sequence

from torch import Tensor

from pipeline.kernels.checks import require_finite

# float32 factors hold seven digits of the largest matrix of a stack; a smaller one is to keep at least four.
SPREAD = 1e3


def common_scales(weights: Sequence[Tensor]) -> list[float]:
    """A power of two for each weight, by which it is to be divided before the weights are stacked.

    All 1.0 unless the root mean squares of two weights that are not zero are more than SPREAD apart: then the divided
    ones have one size, half way (in the exponent) between the largest and the smallest. Raises ValueError on NaN or
    infinity.
    """
    sizes = []
    for weight in weights:
        peak = require_finite("weight", weight)
        mean = float((weight.detach().double() / peak).square().mean()) if peak > 0.0 else 0.0
        sizes.append(peak * math.sqrt(mean))
    live = [size for size in sizes if size > 0.0]
    if not live or max(live) <= SPREAD * min(live):
        return [1.0] * len(sizes)
    exponents = [math.frexp(size)[1] if size > 0.0 else None for size in sizes]
    known = [exponent for exponent in exponents if exponent is not None]
    middle = (max(known) + min(known)) // 2
    return [1.0 if exponent is None else 2.0 ** (exponent - middle) for exponent in exponents]


def scale_report(scales: Sequence[float]) -> dict[str, list[float]]:
    """For a layer's report: `scaled`, what the weights of a stack were divided by; nothing if they were not."""
    return {"scaled": list(scales)} if any(scale != 1.0 for scale in scales) else {}
