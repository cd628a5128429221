"""Transfers tensors between workers. `put` returns a handle, which any worker can use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from manifests.errors import LostInputError
from pipeline.kernels.deferred import in_memory

if TYPE_CHECKING:
    from pipeline.units.units import Unit

Packed = dict[str, tuple[str, Any]]


class TensorTransfer(Protocol):
    """Stores named tensors for other workers."""

    def put(self, tensors: Mapping[str, Tensor]) -> Any:
        """Store a copy; return a small picklable handle. Deferred tensors are computed at the end of the unit."""
        ...

    def get(self, handle: Any) -> dict[str, Tensor]:
        """Return the tensors of a handle, on the CPU and read-only. Raise LostInputError if their node is gone."""
        ...

    def offload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Store a tensor outside of this process. The result loads it, read-only; the tensor lives as long as it."""
        ...


@dataclass(frozen=True)
class Handle:
    """Tensors in Ray's object store, and the key of the unit that produced them."""

    producer: str
    reference: Any


def attach_handles(unit: Unit, result: Any, references: Sequence[Any]) -> Any:
    """Return a unit's result with its indices into `references` replaced by handles."""
    if not references or result is None:
        return result
    return result.with_handles(lambda index: Handle(unit.key, references[index]))


def get_all(transfer: TensorTransfer, handles: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each handle. Raise LostInputError at the end, with the keys of all lost units."""
    lost: list[LostInputError] = []
    for handle in handles:
        try:
            yield transfer.get(handle)
        except LostInputError as error:
            lost.append(error)
    if lost:
        raise LostInputError(str(lost[0]), tuple(key for error in lost for key in error.producers))


def get_available(transfer: TensorTransfer, handles: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors of all handles that are not lost."""
    tensors: dict[str, Tensor] = {}
    for handle in handles:
        with suppress(LostInputError):
            tensors |= transfer.get(handle)
    return tensors


class LocalTransfer(TensorTransfer):
    """Transfers tensors within one process: a handle is the tensors themselves."""

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode(False):  # tensors from another process would not be inference tensors either
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def get(self, handle: dict[str, Tensor]) -> dict[str, Tensor]:
        return handle

    def offload(self, tensor: Tensor) -> Callable[[], Tensor]:
        return in_memory(tensor)


def pack_tensors(tensors: Mapping[str, Tensor]) -> Packed:
    """Convert tensors to numpy arrays, which Ray shares without copying; bfloat16 becomes int16."""
    packed: Packed = {}
    hosts = {name: _on_host(tensor.detach()) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    for name, host in hosts.items():
        array = host.view(torch.int16).numpy() if host.dtype == torch.bfloat16 else host.numpy()
        packed[name] = (str(host.dtype).removeprefix("torch."), array)
    return packed


def _on_host(tensor: Tensor) -> Tensor:
    """Copy to contiguous host memory. From a GPU the copy is asynchronous: the caller synchronizes."""
    if not tensor.is_cuda:
        return tensor.cpu().contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def unpack_tensors(packed: Packed) -> dict[str, Tensor]:
    """Return the tensors of `pack`. They may share read-only memory, so callers must not write to them."""
    with warnings.catch_warnings():
        # Ray's arrays are read-only, which torch cannot express.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return {name: torch.from_numpy(array).view(getattr(torch, dtype)) for name, (dtype, array) in packed.items()}
