"""Progressive ranks by cumulative condition numbers (docs/methods.md#lorc; eq. 12 and 13 of LoRC)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressiveShares:
    """The cache share r_l / (G·d) of each layer, r_min and r_max of eq. 13 as shares, and the layers left dense."""

    shares: tuple[float, ...]
    least: float
    most: float
    skipped: tuple[int, ...]


def cumulative_log_conditions(log_conditions: Sequence[Sequence[float]]) -> list[float]:
    """Return log κ̃_l = Σ_{j >= l} Σ log κ over W_k and W_v of layer j (eq. 12, in logs, as the product overflows).

    Raises ValueError on a log that is negative, NaN or infinite.
    """
    total, cumulative = 0.0, []
    for layer in range(len(log_conditions) - 1, -1, -1):
        if not all(0.0 <= value < math.inf for value in log_conditions[layer]):
            raise ValueError(f"log condition numbers of layer {layer} are {list(log_conditions[layer])}")
        total += math.fsum(log_conditions[layer])
        cumulative.append(total)
    return cumulative[::-1]


def progressive_shares(
    cumulative: Sequence[float], cache_keep: float, skip_above: float | None = None, floor: float = 0.05
) -> ProgressiveShares:
    """Apply eq. 13 to each layer, with r_min solved so that the mean share is `cache_keep`; shallow layers keep more.

    `cumulative` are natural logs. Layers whose log10 κ̃ exceeds `skip_above` keep share 1 and count in the mean. Eq. 13
    with r_max = G·d cannot reach means below about one half. If r_min would fall below `floor` · r_max, r_max is
    lowered instead, with r_min / r_max = `floor`. Equal κ̃ give equal shares. Raises ValueError unless
    0 < cache_keep <= 1 and 0 < floor <= 1, on logs that are not finite, and if skipped layers alone exceed the mean.
    """
    if not 0.0 < cache_keep <= 1.0:
        raise ValueError(f"cache_keep must be within (0, 1], not {cache_keep}")
    if not 0.0 < floor <= 1.0:
        raise ValueError(f"floor must be within (0, 1], not {floor}")
    if not cumulative or not all(math.isfinite(value) for value in cumulative):
        raise ValueError(f"finite cumulative log condition numbers are needed: {list(cumulative)}")
    depth = _depth(cumulative)
    limit = math.inf if skip_above is None else skip_above * math.log(10.0)
    skipped = tuple(layer for layer, value in enumerate(cumulative) if value > limit)
    rest = [layer for layer in range(len(cumulative)) if layer not in set(skipped)]
    # The sum of the shares of the compressed layers, out of len(rest).
    allowed = len(cumulative) * cache_keep - len(skipped)
    if cache_keep < 1.0 and allowed <= 0.0:
        least = len(skipped) / len(cumulative)
        raise ValueError(
            f"cache_keep {cache_keep} is out of reach: {len(skipped)} layers above skip_above {skip_above} "
            f"already keep a share of {least:.3f}; raise either"
        )
    most, ratio = _solve([depth[layer] for layer in rest], allowed, floor)
    shares = [1.0] * len(cumulative)
    for layer in rest:
        shares[layer] = most * (1.0 - depth[layer] * (1.0 - ratio))
    return ProgressiveShares(tuple(shares), most * ratio, most, skipped)


def _depth(cumulative: Sequence[float]) -> list[float]:
    """Return (max log κ̃ − log κ̃_l) / (max − min): 0 for the layer with the largest κ̃, 1 for the smallest."""
    high, low = max(cumulative), min(cumulative)
    return [(high - value) / (high - low) if high > low else 0.0 for value in cumulative]


def _solve(depth: Sequence[float], allowed: float, floor: float) -> tuple[float, float]:
    """Solve Σ r_max (1 − depth (1 − r_min / r_max)) = allowed for r_max, as a share, and r_min / r_max."""
    missing, whole = len(depth) - allowed, math.fsum(depth)
    if missing <= 0.0:
        return 1.0, 1.0
    if missing <= whole * (1.0 - floor):
        return 1.0, 1.0 - missing / whole
    ratio = floor if whole > 0.0 else 1.0
    return allowed / math.fsum(1.0 - value * (1.0 - ratio) for value in depth), ratio
