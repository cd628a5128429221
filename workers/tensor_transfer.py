"""How tensors pass from worker to worker: put for a handle, got again by whoever has the handle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from manifests.errors import LostInputError
from pipeline.units.units import TensorUnit, Unit

Packed = dict[str, tuple[str, Any]]


class TensorTransfer(Protocol):
    """A place for named tensors that other workers can read."""

    def put(self, tensors: Mapping[str, Tensor]) -> Any:
        """Stores a copy; returns a small picklable handle."""
        ...

    def get(self, handle: Any) -> dict[str, Tensor]:
        """The tensors of a handle, on the CPU; not to be written to. Raises LostInputError: their holder is gone."""
        ...


@dataclass(frozen=True)
class Handle:
    """Tensors that a unit left behind in Ray's object store, and the key of that unit."""

    producer: str
    reference: Any


def handle_count(unit: Unit) -> int:
    """How many handles the result of a unit holds."""
    return unit.handles if isinstance(unit, TensorUnit) else 0


def attach_handles(unit: Unit, result: Any, references: Sequence[Any]) -> Any:
    """A unit's result with a `Handle` for each place in `references`, what the unit left in the object store."""
    if not references or result is None:
        return result
    return result.with_handles(lambda place: Handle(unit.key, references[place]))


def get_all(transfer: TensorTransfer, handles: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each handle, one at a time. Raises LostInputError at the end, naming all that are lost."""
    lost: list[LostInputError] = []
    for handle in handles:
        try:
            yield transfer.get(handle)
        except LostInputError as error:
            lost.append(error)
    if lost:
        raise LostInputError(str(lost[0]), tuple(key for error in lost for key in error.producers))


def get_left(transfer: TensorTransfer, handles: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors of all handles, but those that were lost."""
    found: dict[str, Tensor] = {}
    for handle in handles:
        with suppress(LostInputError):
            found |= transfer.get(handle)
    return found


class LocalTransfer(TensorTransfer):
    """Within one process: handles are the tensors themselves."""

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode(False):  # what comes from another process is no inference tensor either
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def get(self, handle: dict[str, Tensor]) -> dict[str, Tensor]:
        return handle


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """As numpy arrays, which Ray shares without copying; bfloat16 travels as int16."""
    packed: Packed = {}
    hosts = {name: _on_host(tensor.detach()) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    for name, host in hosts.items():
        array = host.view(torch.int16).numpy() if host.dtype == torch.bfloat16 else host.numpy()
        packed[name] = (str(host.dtype).removeprefix("torch."), array)
    return packed


def _on_host(tensor: Tensor) -> Tensor:
    """In one piece; from a GPU by way of pinned memory, which is several times as fast, and yet to be waited for."""
    if not tensor.is_cuda:
        return tensor.cpu().contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def unpack(packed: Packed) -> dict[str, Tensor]:
    """The tensors of `pack`. They may share read-only memory: not to be written to."""
    with warnings.catch_warnings():
        # What Ray gives is read-only, which torch cannot express.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return {name: torch.from_numpy(array).view(getattr(torch, dtype)) for name, (dtype, array) in packed.items()}
