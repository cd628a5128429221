"""Memory of a CPU that one layer after another is converted into, as fresh pages take longer than writing to them."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 64  # bytes, as torch's own


class LayerMemory:
    """As much as the largest of the layers so far took, from the second on; on other devices none."""

    def __init__(self) -> None:
        self.room = torch.empty(0, dtype=torch.uint8)
        self.wanted = 0  # bytes of the layer at hand

    def begin(self) -> None:
        """Another layer: what was converted for the last may be overwritten from now on."""
        if self.wanted > len(self.room):
            self.room = torch.empty(self.wanted, dtype=torch.uint8)
        self.wanted = 0

    def release(self) -> None:
        """Lets go of it."""
        self.room, self.wanted = self.room.new_empty(0), 0

    def converted(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in this dtype, on its device; itself where it is so already."""
        if tensor.dtype == dtype or tensor.device.type != "cpu":
            return tensor.to(dtype)
        start, size = self.wanted, tensor.numel() * dtype.itemsize
        self.wanted += -(-size // ALIGNED) * ALIGNED
        if self.wanted > len(self.room):
            return tensor.to(dtype)
        return self.room[start : start + size].view(dtype).view(tensor.shape).copy_(tensor)
