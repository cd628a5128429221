"""Zarr 3 arrays that are written once under a fresh generation and read only against the record of their commit.

docs/formats.md#arrays. What is kept out: a missing chunk, which Zarr reads as zeros; a flipped bit (Crc32c in the codec
chain); a chunk of another array or time (the record lists each chunk's checksum, in C order, and the digest of the
metadata).

    <directory>/<prefix>/<generation>/zarr.json, c.0.0, c.0.1, ...
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import zarr
from zarr.codecs import Crc32cCodec

from manifests.errors import CorruptError, InputError, StorageError
from manifests.records import ARRAY_DTYPES, ArrayRecord
from stores.storage import Place, Storage, open_storage
from stores.zarr_store import ZarrStore

ARRAY_VERSION = 1
CHECKSUM_BYTES = 4
METADATA_FILE = "zarr.json"
GROUP_METADATA = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
GENERATION = re.compile(r"[0-9a-f]{32}")
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ARRAY_DTYPES}
ZARR_NAMES = {name: name for name in DTYPES} | {"bfloat16": "uint16"}  # Zarr has no bfloat16: its bits are stored

Selection = tuple[slice, ...]
Coordinates = tuple[int, ...]


class ArrayStore:
    """Arrays of one place. Writers of different arrays never meet; an array has one writer."""

    def __init__(self, place: Place) -> None:
        self.storage = open_storage(place)

    def create(
        self, prefix: str, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[int], upper_tiles: bool = False
    ) -> ArrayWriter:
        """A new generation of `prefix` to write into. `upper_tiles`: chunks below the diagonal of the last two axes
        are never written. Raises ValueError (shape, dtype) and StorageError."""
        dtype_name = str(dtype).removeprefix("torch.")
        if dtype_name not in DTYPES:
            raise ValueError(f"dtype {dtype} cannot be stored; known are {', '.join(DTYPES)}")
        if math.prod(shape) == 0 or len(chunks) != len(shape):
            raise ValueError(f"shape {tuple(shape)}, chunks {tuple(chunks)}: an empty axis or not one chunk each")
        if not all(PART.fullmatch(part) and not GENERATION.fullmatch(part) for part in prefix.split("/")):
            raise ValueError(f"prefix {prefix!r}: expected parts of letters, digits, _ . and - with / between them")
        path = f"{prefix}/{uuid.uuid4().hex}"
        self._make_groups(prefix)
        grid = tuple(min(int(edge), int(size)) for edge, size in zip(chunks, shape, strict=True))
        return ArrayWriter(self.storage.below(path), path, tuple(map(int, shape)), grid, dtype_name, upper_tiles)

    def open(self, record: ArrayRecord) -> ArrayReader:
        """A committed array. Raises CorruptError (not there, or not what was committed) and InputError (version)."""
        if record.version != ARRAY_VERSION:
            raise InputError(f"array {record.path}: version {record.version}, this Lamina knows {ARRAY_VERSION}")
        return ArrayReader(self.storage.below(record.path), record)

    def drop(self, record: ArrayRecord) -> None:
        """Removes an array, if it is there; retract or replace its ledger entry first. Raises StorageError."""
        self.storage.delete_folder(record.path)

    def sweep(self, live: Iterable[ArrayRecord]) -> int:
        """Removes every generation that no record in `live` names, and temporary files; returns how many generations.

        Only for the one process that holds the run's lock, while no worker writes. Raises StorageError.
        """
        kept = {record.path for record in live}
        doomed = [path for path in self._generations("") if path not in kept]
        for path in doomed:
            self.storage.delete_folder(path)
        self.storage.sweep()
        return len(doomed)

    def _generations(self, folder: str) -> Iterable[str]:
        for child in self.storage.folders(folder):
            path = f"{folder}/{child}" if folder else child
            if GENERATION.fullmatch(child):
                yield path
            else:
                yield from self._generations(path)

    def _make_groups(self, prefix: str) -> None:
        """Group metadata on the way down, so that any Zarr reader can walk the store."""
        parts = prefix.split("/")
        for depth in range(len(parts), -1, -1):
            name = "/".join([*parts[:depth], METADATA_FILE])
            try:
                self.storage.size(name)
            except FileNotFoundError:
                self.storage.replace(name, GROUP_METADATA)


class ArrayWriter:
    """An array being written, invisible until its record is in the ledger. Leaving the block uncommitted removes it."""

    def __init__(
        self, storage: Storage, path: str, shape: Coordinates, chunks: Coordinates, dtype: str, upper_tiles: bool
    ) -> None:
        self.storage = storage
        self.path = path
        self.shape = shape
        self.chunks = chunks
        self.dtype = dtype
        self.upper_tiles = upper_tiles
        self._committed = False
        self._array = zarr.create_array(
            store=ZarrStore(storage),
            shape=shape,
            dtype=ZARR_NAMES[dtype],
            chunks=chunks,
            filters=None,
            compressors=Crc32cCodec(),
            fill_value=0,
            attributes={"lamina_dtype": dtype, "upper_tiles": upper_tiles},
            chunk_key_encoding={"name": "default", "separator": "."},  # all chunks in one directory: one fsync
            config={"write_empty_chunks": True},  # chunks are counted: one of zeros must be there, too
        )

    def write_(self, selection: Selection, values: torch.Tensor) -> None:
        """Sets whole chunks; `values` has the shape of the selection and any device. Raises StorageError."""
        expected = DTYPES[self.dtype]
        if values.dtype != expected:
            raise ValueError(f"array {self.path}: {values.dtype} values for {expected}")
        self._array[selection] = _bits(values)

    def commit(self) -> ArrayRecord:
        """Makes what was written durable and returns the record that a ledger entry is to hold.

        Raises:
            ValueError: a chunk was never written.
            StorageError: no room, or a failing device.
        """
        keys = [_chunk_name(at) for at in _coordinates(self.shape, self.chunks, self.upper_tiles)]
        checksums = [checksum for key in keys if (checksum := _checksum(self.storage, key)) is not None]
        if missing := len(keys) - len(checksums):
            raise ValueError(f"array {self.path}: {missing} of {len(keys)} chunks were never written")
        self.storage.sync([METADATA_FILE, *keys])
        metadata = self.storage.read(METADATA_FILE)
        self._committed = True
        return ArrayRecord(
            version=ARRAY_VERSION,
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            chunks=self.chunks,
            symmetric=self.upper_tiles,
            metadata_sha256=hashlib.sha256(metadata).hexdigest(),
            checksums=tuple(checksums),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            with suppress(StorageError):  # nobody names it; what stays, the next sweep removes
                self.storage.delete_folder("")


class ArrayReader:
    """A committed array. Every chunk is held against the record before its numbers are given out."""

    def __init__(self, storage: Storage, record: ArrayRecord) -> None:
        self.storage = storage
        self._name = record.path  # what a ledger entry calls it
        self.shape = record.shape
        self.chunks = record.chunks
        self.dtype = DTYPES[record.dtype]
        self.symmetric = record.symmetric
        grid = math.prod(_chunk_counts(self.shape, self.chunks))
        if grid > 2 * len(record.checksums):  # before a grid of any size is listed; the upper tiles are over half
            raise self._corrupt("", f"{len(record.checksums)} checksums for a grid of {grid} chunks")
        coordinates = _coordinates(self.shape, self.chunks, self.symmetric)
        if len(coordinates) != len(record.checksums):
            raise self._corrupt("", f"{len(record.checksums)} checksums for {len(coordinates)} chunks")
        self._checksums = dict(zip(coordinates, record.checksums, strict=True))
        self._check_metadata(record)
        self._array = zarr.open_array(store=ZarrStore(storage, read_only=True), mode="r")
        stored = (self._array.shape, self._array.chunks, self._array.dtype.name)
        if stored != (self.shape, self.chunks, ZARR_NAMES[record.dtype]):
            raise self._corrupt("", f"{stored}, its record says {self.shape}, {self.chunks}, {record.dtype}")

    def read(self, selection: Selection) -> torch.Tensor:
        """The numbers of a selection (slices with step 1, one per axis), on the CPU.

        Raises:
            CorruptError: a chunk is missing, damaged, or of another array or generation.
            StorageError: it cannot be read.
        """
        selection = tuple(slice(*part.indices(size)) for part, size in zip(selection, self.shape, strict=True))
        for at in self._touched(selection):
            name = _chunk_name(at)
            checksum = _checksum(self.storage, name)
            if checksum is None:
                raise self._corrupt(name, "missing or cut short")
            if checksum != self._checksums[at]:
                raise self._corrupt(name, f"checksum {checksum}, not the chunk that was committed")
        try:
            values = np.asarray(self._array[selection])
        except ValueError as error:  # of the Crc32c codec
            raise self._corrupt("", str(error)) from error
        tensor = torch.from_numpy(values)
        return tensor.view(self.dtype) if self.dtype == torch.bfloat16 else tensor

    def _touched(self, selection: Selection) -> Iterable[Coordinates]:
        axes = zip(selection, self.chunks, strict=True)
        return itertools.product(*(range(part.start // edge, -(-part.stop // edge)) for part, edge in axes))

    def _check_metadata(self, record: ArrayRecord) -> None:
        try:
            metadata = self.storage.read(METADATA_FILE)
        except (FileNotFoundError, ValueError):
            raise self._corrupt(METADATA_FILE, "missing") from None
        if hashlib.sha256(metadata).hexdigest() != record.metadata_sha256:
            raise self._corrupt(METADATA_FILE, "damaged" if metadata else "missing")

    def _corrupt(self, name: str, fault: str) -> CorruptError:
        return CorruptError(f"{self.storage.at(name)}: stored data is damaged: {fault}", self._name)


def chunk_shape(shape: Sequence[int], edge: int = 1024) -> tuple[int, ...]:
    """Chunks of at most edge² numbers, at most `edge` along an axis (a vector: edge²), the last axes filled first."""
    left = edge * edge
    chunks: list[int] = []
    for size in reversed(shape):
        chunks.append(max(1, min(size, left, edge if len(shape) > 1 else left)))
        left //= chunks[-1]
    return tuple(reversed(chunks))


def _coordinates(shape: Coordinates, chunks: Coordinates, upper_tiles: bool) -> list[Coordinates]:
    """Positions in the chunk grid of all chunks that are stored, in C order."""
    everything = itertools.product(*map(range, _chunk_counts(shape, chunks)))
    return [at for at in everything if not upper_tiles or at[-2] <= at[-1]]


def _chunk_counts(shape: Coordinates, chunks: Coordinates) -> list[int]:
    """Chunks along each axis."""
    return [-(-size // edge) for size, edge in zip(shape, chunks, strict=True)]


def _chunk_name(at: Coordinates) -> str:
    return ".".join(["c", *map(str, at)])


def _checksum(storage: Storage, name: str) -> str | None:
    """The CRC32C that the codec appended to a chunk, in hex; None when there is no chunk, or not enough of it."""
    try:
        checksum = storage.read(name, -CHECKSUM_BYTES)
    except (FileNotFoundError, ValueError):
        return None
    return checksum.hex() if len(checksum) == CHECKSUM_BYTES else None


def _bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    values = values.detach().cpu()
    array: np.ndarray[Any, Any] = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    return array
