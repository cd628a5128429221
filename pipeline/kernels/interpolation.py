"""Linear interpolation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def interpolate(nodes: Sequence[float], values: Tensor, places: Tensor) -> Tensor:
    """Interpolate `values` (n, …) at ascending `nodes` (n,) linearly; return (p, …) at `places` (p,).

    Beyond the nodes the nearest value counts.
    """
    if len(nodes) == 1:
        return values.expand(len(places), *values.shape[1:])
    at_n, places_p = (torch.as_tensor(x, dtype=torch.float64, device=values.device) for x in (nodes, places))
    above_p = torch.searchsorted(at_n, places_p).clamp(1, len(at_n) - 1)
    share_p = ((places_p - at_n[above_p - 1]) / (at_n[above_p] - at_n[above_p - 1])).clamp(0.0, 1.0)
    share_p = share_p.reshape(-1, *(1 for _ in values.shape[1:]))
    return values[above_p - 1] + share_p * (values[above_p] - values[above_p - 1])
