"""Writes and verifies the output's files: safetensors shards, copied shards and the index. docs/formats.md#output.

Each file is durable and whole when it gets its name. The index comes last: a directory without it is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from manifests.errors import CorruptError, InputError, NumericsError, StorageError
from manifests.records import ShardRecord, StagedRecord, TensorDescription
from stores.backend import PIECE_BYTES, Readable
from stores.background import Background
from stores.headers import DTYPE_NAMES, DTYPES, TensorRecord, build_header, read_header
from stores.source import INDEX_FILE, SourceCheckpoint
from stores.storage import Place, Storage, Writable, open_storage
from stores.threads import parallel_map

METADATA = {"format": "pt"}  # transformers requires it
CHECKED_NUMBERS = 16 * 1024 * 1024

Spec = tuple[str, str, tuple[int, ...]]


def write_shard(
    place: Place,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    threads: int = 1,
) -> ShardRecord:
    """Write a safetensors file durably; equal tensors and metadata give equal bytes in any order.

    Return the record for a ledger entry. `tensors` may be lazy: each tensor is read twice, and few are then in memory
    at a time. `threads`: the number of tensors checked at a time.

    Raises:
        NumericsError: a tensor holds NaN or infinity; nothing is written.
        StorageError: no room, or a failing device; nothing is published.
    """
    checked = parallel_map(lambda key: _checked(key, tensors[key], threads > 1), tensors, threads)
    digest_of = {spec[0]: digest for spec, digest in checked if digest}
    specs = [spec for spec, _ in checked]
    return _write(open_storage(place), name, specs, metadata, lambda key: _tensor_bytes(tensors[key]), digest_of)


def tensor_digest(tensor: torch.Tensor) -> str:
    """The sha256 of a tensor's bytes, as in its record."""
    digest = hashlib.sha256()
    for piece in _tensor_bytes(tensor):
        digest.update(piece)
    return digest.hexdigest()


def copy_shard(
    place: Place,
    name: str,
    source: SourceCheckpoint,
    names: Iterable[str],
    copy_of: Mapping[str, str] = MappingProxyType({}),
) -> ShardRecord:
    """Copy tensors of the source, bit for bit, into a new shard, a few megabytes at a time.

    A weight that its files hold only in parts, in a stored format, is decoded. `copy_of`: a name in the new shard ->
    the source's name, where they differ.

    Return the record as `write_shard` does. Raises InputError (no such tensor) and StorageError.
    """
    storage, specs = open_storage(place), []
    for key in names:
        from_ = copy_of.get(key, key)
        record = source.stored.get(from_) or source.tensors.get(from_)
        if record is None:
            raise InputError(f"{storage.at(name)}: cannot copy {from_!r}: the source has no such tensor")
        specs.append((key, record.dtype, record.shape))

    def pieces(key: str) -> Iterator[Any]:
        key = copy_of.get(key, key)
        return source.copy_bytes(key) if key in source.stored else _tensor_bytes(source.read([key])[key])

    return _write(storage, name, specs, None, pieces)


def verify_shard(place: Place, name: str, record: ShardRecord) -> None:
    """Compare a shard with its record, streaming it. Raises CorruptError, naming the tensors that differ."""
    storage, ledger_path = open_storage(place), record.path if isinstance(record, StagedRecord) else ""
    path = storage.at(name)
    try:
        size = storage.size(name)
    except (FileNotFoundError, ValueError):
        raise CorruptError(f"{path}: missing", ledger_path) from None
    if size != record.size:
        raise CorruptError(f"{path}: {size} bytes, committed were {record.size}", ledger_path)
    with storage.reader(name) as file:
        if file.sha256() != record.sha256:
            differing = _differing(storage, name, file, record)
            raise CorruptError(f"{path}: sha256 differs from what was committed; {differing}", ledger_path)
    stored = {key: (at.dtype, at.shape) for key, at in read_header(storage, name).items()}
    if stored != {key: (tensor.dtype, tensor.shape) for key, tensor in record.tensors.items()}:
        raise CorruptError(f"{path}: holds other tensors than its record says", ledger_path)


def describe_shard(place: Place, name: str) -> ShardRecord:
    """Return the record of an existing file, as `write_shard` would. Raises InputError on a damaged header."""
    storage = open_storage(place)
    header = read_header(storage, name)
    with storage.reader(name) as file:
        tensors = {
            key: TensorDescription(dtype=at.dtype, shape=at.shape, sha256=file.sha256(at.begin, at.end))
            for key, at in header.items()
        }
        return ShardRecord(file=name.rpartition("/")[2], size=file.size, sha256=file.sha256(), tensors=tensors)


def write_index(place: Place, weight_map: Mapping[str, str], total_bytes: int, total_parameters: int) -> None:
    """Write model.safetensors.index.json durably. Call it last. Raises StorageError."""
    open_storage(place).replace(INDEX_FILE, index_content(weight_map, total_bytes, total_parameters))


def index_content(weight_map: Mapping[str, str], total_bytes: int, total_parameters: int) -> bytes:
    """Return the content of model.safetensors.index.json; equal arguments give equal bytes."""
    content = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(
    storage: Storage,
    name: str,
    specs: Iterable[Spec],
    metadata: Mapping[str, str] | None,
    pieces: Callable[[str], Iterator[Any]],
    digest_of: Mapping[str, str] = MappingProxyType({}),
) -> ShardRecord:
    """Write a shard of tensors from their bytes in `pieces`. `digest_of`: digests that were computed already."""
    # Wide dtypes first: every tensor is aligned to its own size for readers that map the file.
    ordered = sorted(specs, key=lambda spec: (-DTYPES[spec[1]].itemsize, spec[0]))
    header, records = build_header(ordered, {**METADATA, **(metadata or {})})
    with storage.writer(name) as file, Background() as background:
        shard = _Hashed(file, background)
        shard.write(header)
        tensors = {
            record.name: TensorDescription(
                dtype=record.dtype,
                shape=record.shape,
                sha256=_write_tensor(shard, record, pieces(record.name), digest_of.get(record.name)),
            )
            for record in records
        }
    file_name, sha256 = name.rpartition("/")[2], shard.digest.hexdigest()
    return ShardRecord(file=file_name, size=shard.num_bytes, sha256=sha256, tensors=tensors)


class _Hashed:
    """A file being written, with its size and its digest, which a background thread computes."""

    def __init__(self, file: Writable, background: Background) -> None:
        self._file = file
        self._background = background
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, piece: Any) -> None:
        self._background.submit(self.digest.update, piece)
        self._file.write(piece)
        self.num_bytes += len(piece)


def _write_tensor(shard: _Hashed, record: TensorRecord, pieces: Iterator[Any], sha256: str | None) -> str:
    """Write a tensor and return its digest, which is computed if it is None."""
    digest = hashlib.sha256()
    for piece in pieces:
        if sha256 is None:
            digest.update(piece)
        shard.write(piece)
    if shard.num_bytes != record.end:
        raise StorageError(f"tensor {record.name!r}: wrote up to byte {shard.num_bytes}, expected {record.end}")
    return sha256 or digest.hexdigest()


def _tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().flatten()
    view = flat.view(torch.uint8).numpy().data
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _checked(name: str, tensor: torch.Tensor, with_digest: bool) -> tuple[Spec, str]:
    """Return a tensor's description, and its digest or "". Raises NumericsError if the tensor is not finite."""
    _check_finite(name, tensor)
    spec = (name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    return spec, tensor_digest(tensor) if with_digest else ""


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    flat = tensor.detach().flatten()
    for start in range(0, flat.numel(), CHECKED_NUMBERS):
        part = flat[start : start + CHECKED_NUMBERS]
        part = part.float() if part.dtype.itemsize == 1 else part
        if not torch.isfinite(torch.stack(torch.aminmax(part))).all():  # NaN propagates to both ends
            bad = int((~torch.isfinite(part)).sum())
            raise NumericsError(
                f"tensor {name}: {bad} of {part.numel()} numbers from {start} on are NaN or infinite; "
                "the source or the calibration text is damaged, or a value overflowed in the checkpoint's dtype"
            )


def _differing(storage: Storage, name: str, file: Readable, record: ShardRecord) -> str:
    try:
        header = read_header(storage, name)
    except InputError as error:
        return f"its header is damaged ({error})"
    differing = []
    for key, tensor in record.tensors.items():
        at = header.get(key)
        same = at is not None and (at.dtype, at.shape) == (tensor.dtype, tensor.shape)
        if at is None or not same or file.sha256(at.begin, at.end) != tensor.sha256:
            differing.append(key)
    return f"tensors that differ: {', '.join(differing)}" if differing else "its tensors do not differ"
