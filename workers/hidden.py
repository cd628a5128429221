"""Hidden states of a worker's shards: on its device while they fit, else in its host's memory, else in the store only.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from manifests.records import ArrayRecord, StagedLayer
from pipeline.units.units import Onward
from stores.activations import ActivationStore
from stores.background import Background
from workers.copies import Copies, HiddenReader

ShardKey = tuple[str, int, int]  # lineage, layer, shard
Place = Literal["device", "host"]
ON_CPU = Copies(torch.device("cpu"))
WINDOWS = "windows-"  # how lineages of what is scored begin


class InMemory:
    """Samples (M, …) that a process holds."""

    def __init__(self, hidden_MSD: Tensor, at: Place = "host") -> None:
        self.hidden_MSD = hidden_MSD
        self.at = at

    def read(self, start: int, stop: int) -> Tensor:
        """Samples start to stop."""
        return self.hidden_MSD[start:stop]


class HiddenWriter:
    """Takes a shard's outputs micro-batch by micro-batch, to memory, to the store, or to both."""

    def __init__(
        self,
        shape_MSD: tuple[int, int, int],
        dtype: torch.dtype,
        writer: Any,
        memory: Place | None,
        spilled: bool,
        beside: Background,
        copies: Copies,
    ) -> None:
        self.writer = writer
        self.copies = copies
        self.beside = beside  # where the store is written to, while the next micro-batch is computed
        self.memory = memory
        self.spilled = spilled  # written for want of memory only: nobody else will name it
        self.hidden_MSD = copies.empty(shape_MSD, dtype, memory == "device") if memory else None
        self.filled = 0

    def append(self, hidden_BSD: Tensor) -> None:
        """The next micro-batch."""
        if self.hidden_MSD is not None:
            self.copies.keep(self.hidden_MSD[self.filled : self.filled + len(hidden_BSD)], hidden_BSD)
        if self.writer is not None:
            self.beside.submit(_append, self.writer, hidden_BSD)
        self.filled += len(hidden_BSD)

    def finish(self) -> ArrayRecord | None:
        """Waits for the copies, makes the stored one durable; its record, if there is one."""
        self.copies.finish()
        self.beside.finish()
        record: ArrayRecord | None = self.writer.commit() if self.writer is not None else None
        return record


def _append(writer: Any, hidden_BSD: Tensor) -> None:
    """In a thread of its own, which waits for the device."""
    writer.append(hidden_BSD.cpu())


class HiddenStates:
    """What a worker holds of each shard: one layer's hidden states at a time."""

    def __init__(
        self, store: ActivationStore, limit_bytes: int, copies: Copies = ON_CPU, device_bytes: int = 0
    ) -> None:
        """`limit_bytes`: of the host's memory; `device_bytes`: of the device's, which comes first."""
        self.store = store
        self.copies = copies
        self.limits: dict[Place, int] = {"device": device_bytes, "host": limit_bytes}
        self.held: dict[ShardKey, HiddenReader] = {}
        self.spilled: dict[ShardKey, ArrayRecord] = {}
        self.beside = Background()

    def get(self, shard_key: ShardKey) -> HiddenReader | None:
        """What is held, if anything."""
        return self.held.get(shard_key)

    def inputs(
        self,
        lineage: str,
        unit: Onward,
        embed: Callable[[], HiddenReader],
        replay: Callable[[int, StagedLayer | None, HiddenReader], HiddenReader],
    ) -> HiddenReader:
        """What goes into a unit's layer: held, committed, or made from the last that are.

        The way back ends at `unit.base`, whose inputs are in the store, or are the embeddings (`embed`) if it is 0.
        `replay`: a layer's number, its weights and inputs -> its outputs, which are held then.
        """
        self.release_before(lineage, unit.base)
        nearest = unit.layer
        while (held := self.get((lineage, nearest, unit.shard))) is None and nearest > unit.base:
            nearest -= 1
        if held is None and unit.base_record is not None:
            held = self.load((lineage, unit.base, unit.shard), unit.base_record)
        if held is None and unit.base != 0:
            raise AssertionError(f"{unit.key}: no committed hidden states for layer {unit.base}")
        reader = embed() if held is None else held
        for layer in range(nearest, unit.layer):
            reader = replay(layer, unit.replay[layer - unit.base], reader)
        return reader

    def load(self, shard_key: ShardKey, record: ArrayRecord) -> HiddenReader:
        """Committed hidden states, read from the store when asked for."""
        self.held[shard_key] = self.store.open(record)
        return self.held[shard_key]

    def hidden_writer(
        self, shard_key: ShardKey, shape_MSD: tuple[int, int, int], dtype: torch.dtype, store: bool, batch: int
    ) -> HiddenWriter:
        """Where the outputs of a layer go. Beyond both limits they are written to the store in any case."""
        nbytes = shape_MSD[0] * shape_MSD[1] * shape_MSD[2] * dtype.itemsize
        memory = next((at for at, limit in self.limits.items() if self._bytes_in(at) + nbytes <= limit), None)
        lineage, layer, shard = shard_key
        writer = self.store.writer(lineage, layer, shard, shape_MSD, dtype, batch) if store or not memory else None
        spilled = not store and not memory
        return HiddenWriter(shape_MSD, dtype, writer, memory, spilled, self.beside, self.copies)

    def keep(self, shard_key: ShardKey, hidden_writer: HiddenWriter) -> ArrayRecord | None:
        """Holds what was collected instead of anything older of the shard, and instead of another model's samples: of
        windows several models' are under way, beside samples. Returns the record if it was stored."""
        record = hidden_writer.finish()
        lineage, _, shard = shard_key
        self.release_shard(lineage, shard)
        if not lineage.startswith(WINDOWS):
            self._release([other for other in self.held if other[0] != lineage and not other[0].startswith(WINDOWS)])
        if hidden_writer.hidden_MSD is not None:
            self.held[shard_key] = InMemory(hidden_writer.hidden_MSD, hidden_writer.memory or "host")
        else:
            assert record is not None
            self.held[shard_key] = self.store.open(record)
            if hidden_writer.spilled:
                self.spilled[shard_key] = record
        return record

    def keep_reader(self, shard_key: ShardKey, hidden_writer: HiddenWriter) -> HiddenReader:
        """As `keep`. Returns what is held."""
        self.keep(shard_key, hidden_writer)
        return self.held[shard_key]

    def release_shard(self, lineage: str, shard: int) -> None:
        """Lets go of a shard that has reached its end."""
        self._release([shard_key for shard_key in self.held if shard_key[::2] == (lineage, shard)])

    def release_before(self, lineage: str, layer: int) -> None:
        """Lets go of what is older than a committed layer: shards that another worker has taken over."""
        self._release([shard_key for shard_key in self.held if shard_key[0] == lineage and shard_key[1] < layer])

    def release_beyond(self, lineage: str, layer: int) -> None:
        """The same for what travels backwards: lets go of what is older than the committed gradients of a layer."""
        self._release([shard_key for shard_key in self.held if shard_key[0] == lineage and shard_key[1] > layer])

    def _release(self, places: list[ShardKey]) -> None:
        for shard_key in places:
            del self.held[shard_key]
            if shard_key in self.spilled:
                self.store.drop(self.spilled.pop(shard_key))

    def forget(self, path: str) -> bool:
        """Lets go of everything, as some of it is corrupt. Returns whether `path` was known to nobody else."""
        own = any(record.path == path for record in self.spilled.values())
        self._release(list(self.held))
        return own

    def _bytes_in(self, at: Place) -> int:
        memory = [slices for slices in self.held.values() if isinstance(slices, InMemory)]
        return sum(slices.hidden_MSD.nbytes for slices in memory if slices.at == at)
