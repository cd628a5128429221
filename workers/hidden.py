"""The hidden states of a worker's shards: on its device while they fit, then in host memory, then in the store.

Legend: M samples of a shard, S sequence, D hidden, B micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from manifests.records import ArrayRecord, StagedLayer
from pipeline.units.units import ReplayUnit
from stores.activations import ActivationStore
from stores.background import Background
from workers.copies import Copies, HiddenReader

ShardKey = tuple[Any, ...]  # lineage, layer, shard; with streamed experts, also the stage within the layer
Place = Literal["device", "host"]
ON_CPU = Copies(torch.device("cpu"))
WINDOWS = "windows-"  # prefix of the lineages of windows


class InMemory:
    """Samples (M, …) in memory."""

    def __init__(self, hidden_MSD: Tensor, at: Place = "host") -> None:
        self.hidden_MSD = hidden_MSD
        self.at = at

    def read(self, start: int, stop: int) -> Tensor:
        """Return samples start to stop."""
        return self.hidden_MSD[start:stop]


class HiddenWriter:
    """Writes a shard's outputs, micro-batch by micro-batch, to memory, to the store, or to both."""

    def __init__(
        self,
        shape_MSD: tuple[int, int, int],
        dtype: torch.dtype,
        writer: Any,
        memory: Place | None,
        spilled: bool,
        background: Background,
        copies: Copies,
    ) -> None:
        self.writer = writer
        self.copies = copies
        self.background = background  # writes to the store while the next micro-batch is computed
        self.memory = memory
        self.spilled = spilled  # stored because memory is full, without a ledger entry
        self.hidden_MSD = copies.empty(shape_MSD, dtype, memory == "device") if memory else None
        self.filled = 0

    def append(self, hidden_BSD: Tensor) -> None:
        """Write the next micro-batch."""
        if self.hidden_MSD is not None:
            self.copies.keep(self.hidden_MSD[self.filled : self.filled + len(hidden_BSD)], hidden_BSD)
        if self.writer is not None:
            self.background.submit(_append, self.writer, hidden_BSD)
        self.filled += len(hidden_BSD)

    def finish(self) -> ArrayRecord | None:
        """Wait for all writes. Return the record of the stored array, if one was stored."""
        self.copies.finish()
        self.background.finish()
        record: ArrayRecord | None = self.writer.commit() if self.writer is not None else None
        return record


def _append(writer: Any, hidden_BSD: Tensor) -> None:
    """Append in the background thread, which waits for the device."""
    writer.append(hidden_BSD.cpu())


class HiddenStates:
    """The hidden states of a worker's shards, of one layer at a time."""

    def __init__(
        self, store: ActivationStore, limit_bytes: int, copies: Copies = ON_CPU, device_bytes: int = 0
    ) -> None:
        """`limit_bytes`: host memory. `device_bytes`: device memory, which is used first."""
        self.store = store
        self.copies = copies
        self.limits: dict[Place, int] = {"device": device_bytes, "host": limit_bytes}
        self.held: dict[ShardKey, HiddenReader] = {}
        self.spilled: dict[ShardKey, ArrayRecord] = {}
        self.background = Background()

    def get(self, shard_key: ShardKey) -> HiddenReader | None:
        """Return the hidden states of a shard at a layer, or None."""
        return self.held.get(shard_key)

    def inputs(
        self,
        lineage: str,
        unit: ReplayUnit,
        embed: Callable[[], HiddenReader],
        replay: Callable[[int, StagedLayer | None, HiddenReader], HiddenReader],
    ) -> HiddenReader:
        """Return the inputs of a unit's layer: held, stored, or recomputed from an earlier layer.

        The earliest layer is `unit.base`, whose inputs are in the store or, for layer 0, come from `embed`.
        `replay`: runs a layer, given its number, its weights and its inputs, and returns its outputs.
        """
        self.release_before(lineage, unit.base)
        nearest = unit.layer
        while (reader := self.get((lineage, nearest, unit.shard))) is None and nearest > unit.base:
            nearest -= 1
        if reader is None and unit.base_record is not None:
            reader = self.load((lineage, unit.base, unit.shard), unit.base_record)
        if reader is None and unit.base != 0:
            raise AssertionError(f"{unit.key}: no committed hidden states for layer {unit.base}")
        reader = embed() if reader is None else reader
        for layer in range(nearest, unit.layer):
            reader = replay(layer, unit.replay[layer - unit.base], reader)
        return reader

    def load(self, shard_key: ShardKey, record: ArrayRecord) -> HiddenReader:
        """Hold committed hidden states; they are read from the store on demand."""
        self.held[shard_key] = self.store.open(record)
        return self.held[shard_key]

    def hidden_writer(
        self, shard_key: ShardKey, shape_MSD: tuple[int, int, int], dtype: torch.dtype, store: bool, batch: int
    ) -> HiddenWriter:
        """Return a writer of a layer's outputs. If memory is full, it writes to the store even without `store`."""
        nbytes = shape_MSD[0] * shape_MSD[1] * shape_MSD[2] * dtype.itemsize
        memory = next((at for at, limit in self.limits.items() if self._bytes_in(at) + nbytes <= limit), None)
        lineage, layer, shard = shard_key[:3]
        writer = self.store.writer(lineage, layer, shard, shape_MSD, dtype, batch) if store or not memory else None
        spilled = not store and not memory
        return HiddenWriter(shape_MSD, dtype, writer, memory, spilled, self.background, self.copies)

    def keep(self, shard_key: ShardKey, hidden_writer: HiddenWriter) -> ArrayRecord | None:
        """Replace the shard's older hidden states by the written outputs. Return their record if they were stored.

        States at a stage within a layer are held in addition to the layer's inputs, and released with them. Samples of
        other lineages are also released. Windows of several models can be held beside samples.
        """
        record = hidden_writer.finish()
        lineage, layer, shard = shard_key[:3]
        if shard_key[3:]:
            self._release(
                [other for other in self.held if (other[0], other[2]) == (lineage, shard) and other[1] != layer]
            )
            self.release(shard_key)
        else:
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

    def keep_parts(
        self,
        shard_key: ShardKey,
        shape_MSD: tuple[int, int, int],
        dtype: torch.dtype,
        parts: Iterable[Tensor],
        batch: int,
        *,
        store: bool = False,
    ) -> ArrayRecord | None:
        """Write a shard's outputs, which come micro-batch by micro-batch, and keep them as `keep` does.

        Arguments as in `hidden_writer`. Samples that end earlier than the shard's longest are padded with zeros.
        """
        writer = self.hidden_writer(shard_key, shape_MSD, dtype, store, batch)
        for part_BSD in parts:
            missing = shape_MSD[1] - part_BSD.shape[1]
            writer.append(functional.pad(part_BSD, (0, 0, 0, missing)) if missing else part_BSD)
        return self.keep(shard_key, writer)

    def release(self, shard_key: ShardKey) -> None:
        """Release the hidden states under this key, if any."""
        self._release([shard_key] if shard_key in self.held else [])

    def release_shard(self, lineage: str, shard: int) -> None:
        """Release a shard."""
        self._release([shard_key for shard_key in self.held if (shard_key[0], shard_key[2]) == (lineage, shard)])

    def release_others(self, shard_key: ShardKey) -> None:
        """Release all hidden states of the key's shard besides those under the key."""
        lineage, _, shard = shard_key[:3]
        kept = self.held.pop(shard_key)
        self.release_shard(lineage, shard)
        self.held[shard_key] = kept

    def release_before(self, lineage: str, layer: int) -> None:
        """Release the shards that another worker has taken over: hidden states before a committed layer."""
        self._release([shard_key for shard_key in self.held if shard_key[0] == lineage and shard_key[1] < layer])

    def release_beyond(self, lineage: str, layer: int) -> None:
        """Release the shards that another worker has taken over: gradients above a committed layer."""
        self._release([shard_key for shard_key in self.held if shard_key[0] == lineage and shard_key[1] > layer])

    def _release(self, shard_keys: list[ShardKey]) -> None:
        for shard_key in shard_keys:
            del self.held[shard_key]
            if shard_key in self.spilled:
                self.store.drop(self.spilled.pop(shard_key))

    def forget(self, path: str) -> bool:
        """Release everything after corruption at `path`. Return True if only this worker knew `path`."""
        own = any(record.path == path for record in self.spilled.values())
        self._release(list(self.held))
        return own

    def _bytes_in(self, at: Place) -> int:
        memory = [slices for slices in self.held.values() if isinstance(slices, InMemory)]
        return sum(slices.hidden_MSD.nbytes for slices in memory if slices.at == at)
