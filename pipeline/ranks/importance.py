"""Layer ratios by importance: IPRS (docs/methods.md#importance; Algorithm 1 of FLAT-LLM)."""

import math
from collections.abc import Sequence

# A layer without importance keeps this share, so that every ratio is positive.
_LEAST_SHARE = 1e-9


def angular_importance(mean_cosines: Sequence[float]) -> list[float]:
    """Return t_l = arccos(c_l) / π in [0, 1], from each layer's mean cosine between input and output (eq. 9).

    Cosines are clamped to [-1, 1]. Raises ValueError on NaN or infinity.
    """
    _require_finite("mean cosine", mean_cosines)
    return [math.acos(max(-1.0, min(1.0, cosine))) / math.pi for cosine in mean_cosines]


def preserve_importance(importance: Sequence[float], mean_ratio: float) -> list[float]:
    """Return w_l in (0, 1] with Σ w_l = L · `mean_ratio`, proportional to `importance` where below 1 (Algorithm 1).

    Ratios above 1 are clipped, and the excess is shared among the others in proportion, until none is above 1. If all
    importance is zero, ratios are equal. Raises ValueError unless 0 < mean_ratio <= 1, and on importance that is empty,
    negative, NaN or infinite.
    """
    if not 0.0 < mean_ratio <= 1.0:
        raise ValueError(f"mean ratio must be within (0, 1], not {mean_ratio}")
    _require_finite("importance", importance)
    if not importance or min(importance) < 0.0:
        raise ValueError(f"importance must be given and not negative: {list(importance)}")
    layers, largest = len(importance), max(importance)
    if mean_ratio == 1.0 or largest == 0.0:
        return [mean_ratio] * layers
    shares = [max(value / largest, _LEAST_SHARE) for value in importance]
    ratios = [1.0] * layers
    active, budget = list(range(layers)), layers * mean_ratio
    while active:
        whole = math.fsum(shares[layer] for layer in active)
        proportional = {layer: shares[layer] / whole * budget for layer in active}
        clipped = [layer for layer in active if proportional[layer] > 1.0]
        if not clipped:
            for layer in active:
                ratios[layer] = proportional[layer]
            break
        active = [layer for layer in active if proportional[layer] <= 1.0]
        # The rest is positive, except for rounding errors.
        budget = max(budget - len(clipped), _LEAST_SHARE * len(active))
    return ratios


def _require_finite(name: str, values: Sequence[float]) -> None:
    for layer, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{name} of layer {layer} is {value}")
