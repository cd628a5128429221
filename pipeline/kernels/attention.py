"""Attention whose backward pass gives the same bits each time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def deterministic_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that restricts torch's attention to kernels with a deterministic backward pass.

    On a CPU the fused kernel is one, because a single thread computes each head; a GPU's adds in any order.
    """
    fused = [SDPBackend.FLASH_ATTENTION] if device.type == "cpu" else []
    return sdpa_kernel([*fused, SDPBackend.MATH])
