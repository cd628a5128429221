"""Random tensors for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randn(*shape: int) -> Tensor:
    """Return normal random numbers, float64, which depend on the shape alone."""
    return random(*shape, seed=sum(shape))
