"""Reads and writes headers of safetensors files, without trusting them. docs/formats.md#output.

Layout: 8 bytes little-endian length n, n bytes JSON, then the tensors' bytes without gaps to the end of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamina.stored_lamina import StoredFormat
from manifests.errors import InputError
from manifests.parts import FusedPart
from stores.backend import Ranges
from stores.json_files import without_duplicates
from stores.storage import Place, open_storage

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64  # torch's limit; the product of a million sizes takes minutes
FIRST_BYTES = 1 << 17  # most headers are shorter
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRecord:
    """The location of a tensor: bytes `begin` to `end` of `file`, a name inside the checkpoint.

    `part`: the part of these bytes that the tensor consists of, if it is not all of them in order.

    A weight in a stored format (`stores.formats`) is decoded from its `parts`: `dtype` and `shape` are those of the
    decoded weight, the location is that of its first part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    part: FusedPart | None = None
    form: StoredFormat | None = None
    parts: tuple[tuple[str, TensorRecord], ...] = ()

    @property
    def num_bytes(self) -> int:
        """The size of the tensor; of a weight in a stored format, the size of its parts in the files."""
        stored = sum(at.num_bytes for _, at in self.parts) if self.parts else self.end - self.begin
        if self.part is None:
            return stored
        return stored * math.prod(self.shape) // (self.part.end - self.part.begin)

    @property
    def stored(self) -> tuple[TensorRecord, ...]:
        """The tensors in the files: the parts, or the tensor itself."""
        return tuple(at for _, at in self.parts) or (self,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the format's name. Raises KeyError for one that torch lacks."""
        return DTYPES[self.dtype]


def read_header(place: Place, name: str) -> dict[str, TensorRecord]:
    """Return the tensors of a safetensors file by name, in the order of their bytes.

    Raises:
        InputError: not safetensors, truncated, or a header that contradicts itself or the file's size.
        StorageError: the file cannot be read.
    """
    storage = open_storage(place)
    file = Ranges(storage, name)
    return parse_header(storage.at(name), name.rpartition("/")[2], file.read, file.size)


def parse_header(path: str, file: str, read: Callable[[int, int], bytes], file_bytes: int) -> dict[str, TensorRecord]:
    """Return what `read_header` returns, read by a function `read(begin, end)`. `file_bytes`: the file's size.

    `path` names the file in errors, `file` in the checkpoint. Raises InputError, and the errors of `read`.
    """
    first = read(0, min(FIRST_BYTES, file_bytes))  # in a bucket, one request
    header_bytes = _header_length(path, first[:LENGTH_BYTES], file_bytes)
    data_begin = LENGTH_BYTES + header_bytes
    text = first[LENGTH_BYTES:data_begin] if data_begin <= len(first) else read(LENGTH_BYTES, data_begin)
    if len(text) != header_bytes:
        raise InputError(f"{path}: truncated: expected {header_bytes} bytes of header, got {len(text)}")
    entries = _parse_json(path, text)
    entries.pop("__metadata__", None)
    records = [_record(path, file, name, entry, data_begin) for name, entry in entries.items()]
    records.sort(key=lambda record: (record.begin, record.end))
    _check_layout(path, records, data_begin, file_bytes)
    return {record.name: record for record in records}


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorRecord]]:
    """Return the header of tensors (name, dtype, shape) stored in this order, and their locations.

    Blanks pad it so that the data begins at a multiple of 8. Equal arguments give equal bytes.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = LENGTH_BYTES + len(text)
    records = [
        TensorRecord(name, entry["dtype"], tuple(entry["shape"]), "", *(begin + at for at in entry["data_offsets"]))
        for name, entry in entries.items()
        if name != "__metadata__"
    ]
    return struct.pack("<Q", len(text)) + text, records


def _header_length(path: str, prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise InputError(f"{path}: truncated: {file_bytes} bytes, expected at least {LENGTH_BYTES}; fetch it again")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"{path}: not a safetensors file: a header of {length} bytes claimed (limit {MAX_HEADER_BYTES})"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise InputError(
            f"{path}: truncated: expected a header of {length} bytes, the whole file has {file_bytes}; fetch it again"
        )
    return length


def _parse_json(path: str, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise InputError(f"{path}: damaged safetensors header: {error}") from error
    if not isinstance(entries, dict):
        raise InputError(f"{path}: damaged safetensors header: a JSON {type(entries).__name__}, expected an object")
    return entries


def _record(path: str, file: str, name: str, entry: Any, data_begin: int) -> TensorRecord:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{path}: tensor {name!r}: expected dtype, shape and data_offsets, found {_shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{path}: tensor {name!r}: unknown dtype {_shown(dtype)}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise InputError(f"{path}: tensor {name!r}: shape {_shown(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(f"{path}: tensor {name!r}: data_offsets {_shown(offsets)} are not [begin, end]")
    expected_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != expected_bytes:
        raise InputError(
            f"{path}: tensor {name!r}: {dtype} {shape} takes {expected_bytes} bytes, "
            f"its data_offsets hold {offsets[1] - offsets[0]}"
        )
    return TensorRecord(name, dtype, tuple(shape), file, data_begin + offsets[0], data_begin + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_layout(path: str, records: list[TensorRecord], data_begin: int, file_bytes: int) -> None:
    position = data_begin
    for record in records:
        if record.begin != position:
            fault = "overlaps the tensor before it" if record.begin < position else "leaves a gap before it"
            raise InputError(
                f"{path}: tensor {record.name!r} {fault}: it begins at byte {record.begin}, expected {position}"
            )
        position = record.end
    if position != file_bytes:
        fault = "truncated" if file_bytes < position else "has bytes that no tensor owns"
        raise InputError(f"{path}: {fault}: expected {position} bytes, the file has {file_bytes}; fetch it again")
