"""How tensors pass from worker to worker: put for a handle, got again by whoever has the handle."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

Packed = dict[str, tuple[str, Any]]


class Exchange(Protocol):
    """A place for named tensors that other workers can read."""

    def put(self, tensors: Mapping[str, Tensor]) -> Any:
        """Stores a copy; returns a small picklable handle."""
        ...

    def get(self, handle: Any) -> dict[str, Tensor]:
        """The tensors of a handle, on the CPU; not to be written to. Raises LostInputError: their holder is gone."""
        ...


class LocalExchange:
    """Within one process: handles are the tensors themselves."""

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Exchange`."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def get(self, handle: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Exchange`."""
        return handle


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """As numpy arrays, which Ray shares without copying; bfloat16 travels as int16."""
    packed: Packed = {}
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        array = host.view(torch.int16).numpy() if host.dtype == torch.bfloat16 else host.numpy()
        packed[name] = (str(host.dtype).removeprefix("torch."), array)
    return packed


def unpack(packed: Packed) -> dict[str, Tensor]:
    """The tensors of `pack`. They may share read-only memory: not to be written to."""
    with warnings.catch_warnings():
        # What Ray gives is read-only, which torch cannot express.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return {name: torch.from_numpy(array).view(getattr(torch, dtype)) for name, (dtype, array) in packed.items()}
