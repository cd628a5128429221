"""Zarr 3 arrays, each written once under a new generation and checked against its record when read.

docs/formats.md#arrays. The checks detect a missing chunk, which Zarr reads as zeros; a flipped bit (Crc32c in the codec
chain); and a chunk of another array or generation (the record lists the checksum of each chunk, in C order, and the
digest of the metadata).

    <directory>/<prefix>/<generation>/zarr.json, c.0.0, c.0.1, ...
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
import torch
import zarr
from zarr.abc.store import ByteRequest
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import Buffer, BufferPrototype

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
    """The arrays of one storage. Each array has one writer; writers of different arrays may run in parallel."""

    def __init__(self, place: Place) -> None:
        self.storage = open_storage(place)
        self._groups: set[str] = set()  # group metadata files that exist

    def create(
        self, prefix: str, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[int], upper_tiles: bool = False
    ) -> ArrayWriter:
        """Create a new generation of `prefix`. `upper_tiles`: chunks below the diagonal of the last two axes are
        never written. Raises ValueError (shape, dtype) and StorageError.
        """
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
        """Open a committed array. Raises CorruptError (missing or damaged) and InputError (version)."""
        if record.version != ARRAY_VERSION:
            raise InputError(f"array {record.path}: version {record.version}, this Lamina knows {ARRAY_VERSION}")
        return ArrayReader(self.storage.below(record.path), record)

    def drop(self, *records: ArrayRecord) -> None:
        """Remove arrays, if they exist; retract or replace their ledger entries first. Raises StorageError."""
        self.storage.delete_folders({record.path: _files_of(record) for record in records})

    def sweep(self, live: Iterable[ArrayRecord]) -> int:
        """Remove temporary files and all generations without a record in `live`; return the number of generations.

        Call it only in the process that holds the run's lock, while no worker writes. Raises StorageError.
        """
        live_paths = {record.path for record in live}
        doomed: dict[str, list[str]] = {}  # generation -> its files
        for name in self.storage.names():
            path = name.rpartition("/")[0]
            if GENERATION.fullmatch(path.rpartition("/")[2]) and path not in live_paths:
                doomed.setdefault(path, []).append(name)
        self.storage.delete_folders(doomed)
        self.storage.sweep()
        return len(doomed)

    def _make_groups(self, prefix: str) -> None:
        """Write the metadata of all parent groups, so that any Zarr reader can walk the store."""
        parts = prefix.split("/")
        for depth in range(len(parts), -1, -1):
            name = "/".join([*parts[:depth], METADATA_FILE])
            if name not in self._groups and not self.storage.has(name):
                self.storage.replace(name, GROUP_METADATA)
            self._groups.add(name)


class ArrayWriter:
    """An array being written. It counts once the ledger has its record. Its `with` block removes it if uncommitted."""

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
        self._rows = 0  # written by `append`
        self._store = _NewArrayStore(storage)
        self._array = zarr.create_array(
            store=self._store,
            shape=shape,
            dtype=ZARR_NAMES[dtype],
            chunks=chunks,
            filters=None,
            compressors=Crc32cCodec(),
            fill_value=0,
            attributes={"lamina_dtype": dtype, "upper_tiles": upper_tiles},
            chunk_key_encoding={"name": "default", "separator": "."},  # one directory, one fsync
            config={"write_empty_chunks": True},  # chunks are counted, those of zeros included
        )

    def write_(self, selection: Selection, values: torch.Tensor) -> None:
        """Set whole chunks to `values`, which has the selection's shape and any device.

        Raises ValueError (another dtype) and StorageError.
        """
        expected = DTYPES[self.dtype]
        if values.dtype != expected:
            raise ValueError(f"array {self.path}: {values.dtype} values for {expected}")
        self._array[selection] = _bits(values)

    def append(self, values: torch.Tensor) -> None:
        """Write the next rows along the first axis, from any device; each call but the last fills whole chunks.

        Raises ValueError (shape, dtype, an incomplete chunk before) and StorageError.
        """
        rows, *rest = self.shape
        stop = self._rows + values.shape[0]
        if tuple(values.shape[1:]) != tuple(rest) or stop > rows:
            raise ValueError(f"array {self.path}: piece {list(values.shape)} at row {self._rows} of {rows}")
        if self._rows % self.chunks[0]:
            raise ValueError(f"array {self.path}: row {self._rows} is inside a chunk of {self.chunks[0]} rows")
        self.write_((slice(self._rows, stop), *map(slice, rest)), values)
        self._rows = stop

    def commit(self) -> ArrayRecord:
        """Make the chunks durable and return the record for a ledger entry.

        Raises:
            ValueError: a chunk was never written.
            StorageError: no room, or a failing device.
        """
        keys = [_chunk_name(at) for at in _coordinates(self.shape, self.chunks, self.upper_tiles)]
        checksums = [self._store.ends[key].hex() for key in keys if key in self._store.ends]
        if missing := len(keys) - len(checksums):
            raise ValueError(f"array {self.path}: {missing} of {len(keys)} chunks were never written")
        self.storage.sync([METADATA_FILE, *keys])
        self._committed = True
        return ArrayRecord(
            version=ARRAY_VERSION,
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            chunks=self.chunks,
            symmetric=self.upper_tiles,
            metadata_sha256=self._store.metadata_sha256,
            checksums=tuple(checksums),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._committed:
            with suppress(StorageError):  # no record names it: the next sweep removes leftovers
                self.storage.delete_folder("")


class ArrayReader:
    """A committed array. Each chunk is checked against the record before its values are returned."""

    def __init__(self, storage: Storage, record: ArrayRecord) -> None:
        self.storage = storage
        self._path = record.path
        self.shape = record.shape
        self.chunks = record.chunks
        self.dtype = DTYPES[record.dtype]
        self.symmetric = record.symmetric
        grid = math.prod(_chunk_counts(self.shape, self.chunks))
        if grid > 2 * len(record.checksums):  # checked before the grid is listed; upper tiles are over half of it
            raise self._corrupt("", f"{len(record.checksums)} checksums for a grid of {grid} chunks")
        coordinates = _coordinates(self.shape, self.chunks, self.symmetric)
        if len(coordinates) != len(record.checksums):
            raise self._corrupt("", f"{len(record.checksums)} checksums for {len(coordinates)} chunks")
        self._checksums = dict(zip(map(_chunk_name, coordinates), record.checksums, strict=True))
        self._metadata_sha256 = record.metadata_sha256
        with self._corrupt_on_error():
            self._array = zarr.open_array(store=_CheckedStore(storage, self._check), mode="r", zarr_format=3)
        stored = (self._array.shape, self._array.chunks, self._array.dtype.name)
        if stored != (self.shape, self.chunks, ZARR_NAMES[record.dtype]):
            raise self._corrupt("", f"{stored}, its record says {self.shape}, {self.chunks}, {record.dtype}")

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return rows start to stop of the first axis, on the CPU. Raises the errors of `select`, and ValueError
        (bounds)."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows {start} to {stop} of {self.shape[0]}")
        return self.select((slice(start, stop), *map(slice, self.shape[1:])))

    def select(self, selection: Selection) -> torch.Tensor:
        """Return the values of a selection (slices with step 1, one per axis), on the CPU.

        Raises:
            CorruptError: a chunk is missing, damaged, or of another array or generation.
            StorageError: it cannot be read.
        """
        selection = tuple(slice(*part.indices(size)) for part, size in zip(selection, self.shape, strict=True))
        with self._corrupt_on_error():
            values = np.asarray(self._array[selection])
        tensor = torch.from_numpy(values)
        return tensor.view(self.dtype) if self.dtype == torch.bfloat16 else tensor

    def _check(self, name: str, data: Buffer | None) -> None:
        """Check the data of one name before Zarr decodes it. Raises CorruptError."""
        if name == METADATA_FILE:
            if not data or hashlib.sha256(data.to_bytes()).hexdigest() != self._metadata_sha256:
                raise self._corrupt(name, "damaged" if data else "missing")
        elif data is None or len(data) < CHECKSUM_BYTES:
            raise self._corrupt(name, "missing or cut short")
        elif (checksum := data[-CHECKSUM_BYTES:].to_bytes().hex()) != self._checksums[name]:
            raise self._corrupt(name, f"checksum {checksum}, not the chunk that was committed")

    @contextmanager
    def _corrupt_on_error(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # from the Crc32c codec, or a name that holds no bytes
            raise self._corrupt("", str(error)) from error

    def _corrupt(self, name: str, fault: str) -> CorruptError:
        return CorruptError(f"{self.storage.at(name)}: stored data is damaged: {fault}", self._path)


class _NewArrayStore(ZarrStore):
    """Receives the chunks of a new array. Keys that were not set do not exist: the storage need not be asked.

    Attributes:
        ends: chunk -> the CRC32C that the codec appended to it.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.ends: dict[str, bytes] = {}
        self.metadata_sha256 = ""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await super().get(key, prototype, byte_range) if key in self.ends else None

    async def set(self, key: str, value: Buffer) -> None:
        await super().set(key, value)
        if key == METADATA_FILE:
            self.metadata_sha256 = hashlib.sha256(value.to_bytes()).hexdigest()
        else:
            self.ends[key] = value[-CHECKSUM_BYTES:].to_bytes()


class _CheckedStore(ZarrStore):
    """Passes everything that Zarr reads through `check`. Zarr asks for whole chunks only."""

    def __init__(self, storage: Storage, check: Callable[[str, Buffer | None], None]) -> None:
        super().__init__(storage, read_only=True)
        self.check = check

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        assert byte_range is None
        data = await super().get(key, prototype)
        self.check(key, data)
        return data


def chunk_shape(shape: Sequence[int], edge: int = 1024) -> tuple[int, ...]:
    """Return chunks of at most edge² numbers, at most `edge` along an axis (a vector: edge²), the last axes first."""
    room = edge * edge
    chunks: list[int] = []
    for size in reversed(shape):
        chunks.append(max(1, min(size, room, edge if len(shape) > 1 else room)))
        room //= chunks[-1]
    return tuple(reversed(chunks))


def _coordinates(shape: Coordinates, chunks: Coordinates, upper_tiles: bool) -> list[Coordinates]:
    """Return the grid positions of all stored chunks, in C order."""
    everything = itertools.product(*map(range, _chunk_counts(shape, chunks)))
    return [at for at in everything if not upper_tiles or at[-2] <= at[-1]]


def _files_of(record: ArrayRecord) -> list[str]:
    """Return the names of an array's metadata and chunks."""
    chunks = _coordinates(record.shape, record.chunks, record.symmetric)
    return [f"{record.path}/{name}" for name in (METADATA_FILE, *map(_chunk_name, chunks))]


def _chunk_counts(shape: Coordinates, chunks: Coordinates) -> list[int]:
    """The number of chunks along each axis."""
    return [-(-size // edge) for size, edge in zip(shape, chunks, strict=True)]


def _chunk_name(at: Coordinates) -> str:
    return ".".join(["c", *map(str, at)])


def _bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    values = values.detach().cpu()
    array: np.ndarray[Any, Any] = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    return array
