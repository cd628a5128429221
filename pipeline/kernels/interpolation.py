"""Numbers between those that were measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def interpolate(seen: Sequence[float], values: Tensor, places: Tensor) -> Tensor:
    """(p, …) at some places (p,): linear between those seen, ascending, of which (n, …) are the values; beyond them as
    at the nearest."""
    if len(seen) == 1:
        return values.expand(len(places), *values.shape[1:])
    at_n, places_p = (torch.as_tensor(x, dtype=torch.float64, device=values.device) for x in (seen, places))
    above_p = torch.searchsorted(at_n, places_p).clamp(1, len(at_n) - 1)
    share_p = ((places_p - at_n[above_p - 1]) / (at_n[above_p] - at_n[above_p - 1])).clamp(0.0, 1.0)
    share_p = share_p.reshape(-1, *(1 for _ in values.shape[1:]))
    return values[above_p - 1] + share_p * (values[above_p] - values[above_p - 1])
