"""The processes that train together: one alone, or several that torch.distributed has joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# Of torch.distributed, by type of device. Parts of layers in host memory beside a GPU need one for the CPU, too.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The place of this process, from 0, and the number of processes."""

    rank: int = 0
    count: int = 1

    @classmethod
    def joined(cls) -> Processes:
        """Return the processes of torch's process group, or this process alone if there is no group."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def total(self, number: float) -> float:
        """Return the sum of the processes' numbers, in float64."""
        if self.count == 1:
            return number
        sum_1 = torch.tensor([number], dtype=torch.float64, device=_device())
        dist.all_reduce(sum_1)
        return float(sum_1)

    def any(self, flag: bool) -> bool:
        """Return True if the flag of any process is set."""
        return self.total(float(flag)) > 0.0

    def first(self, value: T) -> T:
        """Return the value of process 0."""
        values = [value]
        if self.count > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def share(self, windows: list[int], size: int) -> list[tuple[list[int], float]]:
        """Return this process's windows in batches of `size`, each with its weight.

        Every process gets equally many batches, since all must compute at the same time. A batch beyond its windows
        repeats one with the weight 0.
        """
        each = -(-len(windows) // self.count)
        own = windows[self.rank * each : (self.rank + 1) * each]
        batches = [own[start : start + size] for start in range(0, each, size)]
        return [(batch, 1.0) if batch else (windows[:1], 0.0) for batch in batches]


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor from the parts that processes hold. All processes call it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device() -> torch.device:
    return torch.device("cuda") if dist.get_backend() != "gloo" and torch.cuda.is_available() else torch.device("cpu")
