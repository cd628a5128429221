"""Hidden states of a worker's shards: in memory up to a limit, beyond it in the activation store only.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stores.activations import ActivationStore

Place = tuple[str, int, int]  # lineage, layer, shard


class Slices(Protocol):
    """Hidden states that can be read a micro-batch at a time."""

    def read(self, start: int, stop: int) -> Tensor:
        """Samples start to stop, (B, S, D)."""
        ...


class _InMemory:
    def __init__(self, hidden_MSD: Tensor) -> None:
        self.hidden_MSD = hidden_MSD

    def read(self, start: int, stop: int) -> Tensor:
        return self.hidden_MSD[start:stop]


class Collector:
    """Takes a shard's outputs micro-batch by micro-batch, to memory, to the store, or to both."""

    def __init__(
        self, shape_MSD: tuple[int, int, int], dtype: torch.dtype, writer: Any, in_memory: bool, spilled: bool
    ) -> None:
        self.writer = writer
        self.spilled = spilled  # written for want of memory only: nobody else will name it
        self.hidden_MSD = torch.empty(shape_MSD, dtype=dtype) if in_memory else None
        self.filled = 0

    def append(self, hidden_BSD: Tensor) -> None:
        """The next micro-batch."""
        host_BSD = hidden_BSD.cpu()
        if self.hidden_MSD is not None:
            self.hidden_MSD[self.filled : self.filled + len(host_BSD)] = host_BSD
        if self.writer is not None:
            self.writer.append(host_BSD)
        self.filled += len(host_BSD)

    def finish(self) -> Mapping[str, Any] | None:
        """Makes the stored copy durable; its record, if there is one."""
        record: Mapping[str, Any] | None = self.writer.commit() if self.writer is not None else None
        return record


class HiddenStates:
    """What a worker holds of each shard: one layer's hidden states at a time."""

    def __init__(self, store: ActivationStore, limit_bytes: int) -> None:
        self.store = store
        self.limit_bytes = limit_bytes
        self.held: dict[Place, Slices] = {}
        self.spilled: dict[Place, Mapping[str, Any]] = {}

    def get(self, place: Place) -> Slices | None:
        """What is held, if anything."""
        return self.held.get(place)

    def load(self, place: Place, record: Mapping[str, Any]) -> Slices:
        """Committed hidden states, read from the store when asked for."""
        self.held[place] = self.store.open(record)
        return self.held[place]

    def collector(
        self, place: Place, shape_MSD: tuple[int, int, int], dtype: torch.dtype, store: bool, batch: int
    ) -> Collector:
        """Where the outputs of a layer go. Beyond the memory limit they are written to the store in any case."""
        nbytes = shape_MSD[0] * shape_MSD[1] * shape_MSD[2] * dtype.itemsize
        fits = self._bytes_in_memory() + nbytes <= self.limit_bytes
        lineage, layer, shard = place
        writer = self.store.writer(lineage, layer, shard, shape_MSD, dtype, batch) if store or not fits else None
        return Collector(shape_MSD, dtype, writer, in_memory=fits, spilled=not store and not fits)

    def keep(self, place: Place, collector: Collector) -> Mapping[str, Any] | None:
        """Holds what was collected instead of anything older of the shard. Returns the record if it was stored."""
        record = collector.finish()
        lineage, _, shard = place
        self._release([other for other in self.held if other[2] == shard or other[0] != lineage])
        if collector.hidden_MSD is not None:
            self.held[place] = _InMemory(collector.hidden_MSD)
        else:
            assert record is not None
            self.held[place] = self.store.open(record)
            if collector.spilled:
                self.spilled[place] = record
        return record

    def release_before(self, lineage: str, layer: int) -> None:
        """Lets go of what is older than a committed layer: shards that another worker has taken over."""
        self._release([place for place in self.held if place[0] == lineage and place[1] < layer])

    def _release(self, places: list[Place]) -> None:
        for place in places:
            del self.held[place]
            if place in self.spilled:
                self.store.drop(self.spilled.pop(place))

    def forget(self, path: str) -> bool:
        """Lets go of everything, as some of it is corrupt. Returns whether `path` was known to nobody else."""
        own = any(record["path"] == path for record in self.spilled.values())
        self.held.clear()
        self.spilled.clear()
        return own

    def _bytes_in_memory(self) -> int:
        return sum(slices.hidden_MSD.nbytes for slices in self.held.values() if isinstance(slices, _InMemory))
