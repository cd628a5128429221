"""The tensors of a compressed layer: the factors of its groups, and copies from the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pipeline.units.units import Write
from stores.formats import keeps
from stores.source import SourceCheckpoint
from workers.config import WorkerConfig
from workers.tensor_transfer import TensorTransfer, get_all


class WrittenTensors(Mapping[str, Tensor]):
    """Maps names to the tensors of a compressed layer, each fetched or read on access.

    An unchanged weight keeps the source's storage format.
    """

    def __init__(
        self,
        write: Write,
        setup: WorkerConfig,
        transfer: TensorTransfer,
        wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Look up the tensors. `wanted`: returns True for the names to include.

        Raises LostInputError if factors were lost with their node.
        """
        geometry, self._source, self._transfer = setup.geometry.layers[write.layer], setup.source, transfer
        self._factors: dict[str, int] = {}  # name -> place of its handle
        self._handles = write.factors
        kept: list[str] = []
        for place, factors in enumerate(get_all(transfer, write.factors)):
            for name in filter(wanted, factors):
                if name in self._source.tensors and _unchanged(self._source, name, factors[name]):
                    kept.append(name)
                else:
                    self._factors[name] = place
        claimed = tuple(f"{geometry.path(role)}." for role in write.roles)
        names = [name for name in self._source.tensors if name.startswith(geometry.prefix)]
        copied = [name for name in names if not name.startswith(claimed) and wanted(name)]
        self._weight_of = {part: name for name in (*kept, *copied) for part in self._parts(name)}

    def _parts(self, name: str) -> list[str]:
        record = self._source.tensors[name]
        return [part.name for part in record.stored] if keeps(record) else [name]

    def __len__(self) -> int:
        return len(self._factors.keys() | self._weight_of.keys())

    def __iter__(self) -> Iterator[str]:
        return iter({**self._factors, **self._weight_of})

    def __contains__(self, name: object) -> bool:
        return name in self._factors or name in self._weight_of

    def __getitem__(self, name: str) -> Tensor:
        if name in self._weight_of:
            return self._source.read_kept(self._weight_of[name], name)
        tensor: Tensor = self._transfer.get(self._handles[self._factors[name]])[name]
        return tensor


def _unchanged(source: SourceCheckpoint, name: str, tensor: Tensor) -> bool:
    """Return True for a weight that equals the source's weight, decoded from its storage format. The source's weight is
    read only if both have the same shape."""
    record = source.tensors[name]
    alike = keeps(record) and tuple(tensor.shape) == record.shape
    return alike and torch.equal(tensor.cpu(), source.read([name])[name])
