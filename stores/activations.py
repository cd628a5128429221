"""Hidden states between layers, and the calibration tokens: written micro-batch by micro-batch, read by slices.

    <phase>/layer-00003/shard-00001/<generation>      tokens/<generation>

Shape suffixes: B samples of a shard, S sequence length, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from manifests.records import ArrayRecord
from stores.arrays import ArrayReader, ArrayStore, ArrayWriter, chunk_shape
from stores.storage import Place


class ActivationStore:
    """The arrays of one place (activations.zarr). What is written counts once its record is in the ledger."""

    def __init__(self, place: Place) -> None:
        self._arrays = ArrayStore(place)

    def write(self, phase: str, layer: int, shard: int, hidden: torch.Tensor, micro_batch: int = 1) -> ArrayRecord:
        """Stores the hidden states (B, S, D), any floating dtype, that enter `layer`; durable on return.

        Chunks hold `micro_batch` samples. Returns the record for the ledger entry. Raises StorageError.
        """
        samples, sequence, features = hidden.shape
        with self.writer(phase, layer, shard, (samples, sequence, features), hidden.dtype, micro_batch) as writer:
            for start in range(0, samples, micro_batch):
                writer.append(hidden[start : start + micro_batch])
            return writer.commit()

    def writer(
        self, phase: str, layer: int, shard: int, shape: tuple[int, int, int], dtype: torch.dtype, micro_batch: int = 1
    ) -> ActivationWriter:
        """To write a shard of `shape` (B, S, D) piece by piece. Use in a `with` block; uncommitted, it is removed."""
        prefix = f"{phase}/layer-{layer:05d}/shard-{shard:05d}"
        return ActivationWriter(self._arrays.create(prefix, shape, dtype, (micro_batch, *shape[1:])), micro_batch)

    def write_tokens(self, ids: torch.Tensor) -> ArrayRecord:
        """Stores token ids (B, S), int32 or int64; durable on return. Raises StorageError."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2:
            raise ValueError(f"token ids: {ids.dtype} {tuple(ids.shape)}, expected int32 or int64 (samples, sequence)")
        with self._arrays.create("tokens", ids.shape, ids.dtype, chunk_shape(ids.shape)) as writer:
            writer.write_((slice(ids.shape[0]), slice(ids.shape[1])), ids)
            return writer.commit()

    def open(self, record: ArrayRecord) -> ActivationReader:
        """A committed shard or the tokens. Raises CorruptError when it is not what was committed."""
        return ActivationReader(self._arrays.open(record))

    def drop(self, *records: ArrayRecord) -> None:
        """Removes some; retract or replace their ledger entries first. Raises StorageError."""
        self._arrays.drop(*records)

    def sweep(self, live: Iterable[ArrayRecord]) -> int:
        """Removes what no record in `live` names; only while nobody writes. Returns how many generations."""
        return self._arrays.sweep(live)


class ActivationWriter:
    """A shard being written. Pieces come in order; each but the last holds a multiple of `micro_batch` samples."""

    def __init__(self, array: ArrayWriter, micro_batch: int) -> None:
        self._array = array
        self._micro_batch = micro_batch
        self._done = 0

    def append(self, hidden_BSD: torch.Tensor) -> None:
        """Writes the next samples, from any device. Raises StorageError."""
        samples, *rest = self._array.shape
        stop = self._done + hidden_BSD.shape[0]
        if tuple(hidden_BSD.shape[1:]) != tuple(rest) or stop > samples:
            raise ValueError(f"piece {list(hidden_BSD.shape)} at sample {self._done} of {samples}")
        if self._done % self._micro_batch:
            raise ValueError(f"the last piece ended at {self._done}, inside a micro-batch of {self._micro_batch}")
        self._array.write_((slice(self._done, stop), *(slice(size) for size in rest)), hidden_BSD)
        self._done = stop

    def commit(self) -> ArrayRecord:
        """Makes the shard durable and returns its record. Raises ValueError (samples missing), StorageError."""
        if self._done != self._array.shape[0]:
            raise ValueError(f"{self._done} of {self._array.shape[0]} samples were written")
        return self._array.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._array.__exit__(kind, error, trace)


class ActivationReader:
    """A committed shard: (B, S, D) hidden states, or (B, S) tokens."""

    def __init__(self, array: ArrayReader) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Samples start to stop, on the CPU. Raises CorruptError (missing or damaged chunks), StorageError."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"samples {start} to {stop} of {self.shape[0]}")
        return self._array.read((slice(start, stop), *(slice(size) for size in self.shape[1:])))
