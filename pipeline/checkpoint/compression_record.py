"""compression.json: its schema, its seal, and the comparison of a checkpoint's files with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from manifests.entries import GroupReport
from manifests.errors import CorruptError, InputError
from manifests.records import ComparedFigures, FormSpec, ShardRecord, TensorDescription
from stores.json_files import MAX_JSON_BYTES, parse_json
from stores.storage import Place, Storage, open_storage

RECORD_VERSION = 1
RECORD_FILE = "compression.json"
MODELLING_FILE = "modeling_lamina.py"
SEAL = "sha256"
SHOWN_FAULTS = 5


def _plain_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError("not a plain file name")
    return name


def _path_in_folders(name: str) -> str:
    for part in name.split("/"):
        _plain_name(part)
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
FilePath = Annotated[str, AfterValidator(_path_in_folders)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _File(_Section):
    size: Size
    sha256: Digest


class _Tensor(TensorDescription):
    model_config = ConfigDict(extra="allow")

    form: str
    origin: str
    shard: FileName


class _Pair(_Section):
    dense: Size
    compressed: Size


class _Counts(_Section):
    parameters: _Pair
    decoder_parameters: _Pair
    bytes: _Pair
    cache_bytes_per_token: _Pair


class _LayerSection(_Section):
    groups: dict[str, GroupReport]
    forms: dict[str, FormSpec]


class _Source(_Section):
    files: dict[str, _File]


class _Entry(_Section):
    method: str


class _Manifest(_Section):
    methods: list[_Entry]


class _CompressionRecord(_Section):
    version: Literal[1]
    sha256: Digest
    source: _Source
    manifest: _Manifest
    counts: _Counts
    layers: list[_LayerSection]
    compared: ComparedFigures | None = None
    shards: dict[FileName, _File]
    files: dict[FilePath, _File]
    claimed: dict[str, str]
    tensors: dict[str, _Tensor]


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON file of a checkpoint. Equal values give equal bytes."""
    return f"{json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()


def sealed(compression: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with the sha256 of its other fields, so that damage to the record itself is noticed."""
    return {**compression, SEAL: _seal(compression)}


def index_arguments(compression: Mapping[str, Any]) -> tuple[dict[str, str], int, int]:
    """Return the arguments of `index_content`: tensor -> shard, total bytes and numbers."""
    weight_map = {name: entry["shard"] for name, entry in compression["tensors"].items()}
    return weight_map, compression["counts"]["bytes"]["compressed"], compression["counts"]["parameters"]["compressed"]


def shard_record(file: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> ShardRecord:
    """Convert a shard and its tensors from the compression record's format to the ledger's."""
    described = {
        name: TensorDescription(dtype=entry["dtype"], shape=tuple(entry["shape"]), sha256=entry["sha256"])
        for name, entry in tensors.items()
    }
    return ShardRecord(size=file["size"], sha256=file["sha256"], tensors=described)


def describe_bytes(content: bytes) -> dict[str, Any]:
    """Return the size and the sha256 of a file's content."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def describe_file(storage: Storage, name: str) -> dict[str, Any]:
    """Return the size and the sha256 of a file. Raises StorageError."""
    with storage.reader(name) as file:
        return {"size": file.size, "sha256": file.sha256()}


def existing_checkpoint(output: Place) -> Storage:
    """Return the storage of a Lamina checkpoint, which may lack its record. Raises InputError if it lacks its modelling
    code, too."""
    storage = open_storage(output)
    if (fault := storage.fault()) or not any(map(storage.has, (RECORD_FILE, MODELLING_FILE))):
        raise _no_record(storage, fault or "missing")
    return storage


def _no_record(storage: Storage, fault: str) -> InputError:
    return InputError(f"{storage.at(RECORD_FILE)}: {fault}; is it a Lamina checkpoint? Give the output of a job")


def read_record(output: Place) -> dict[str, Any]:
    """Read compression.json and verify its digest and schema.

    Raises:
        InputError: it is missing, or of another version.
        CorruptError: it is damaged, edited, or does not follow the schema.
    """
    storage = existing_checkpoint(output)
    path = storage.at(RECORD_FILE)
    try:
        content = storage.read_whole(RECORD_FILE, MAX_JSON_BYTES)
        compression = parse_json(content)
    except FileNotFoundError:
        raise _no_record(storage, "missing") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: damaged: not JSON: {error or type(error).__name__}") from error
    if not isinstance(compression, dict):
        raise CorruptError(f"{path}: damaged: a JSON {type(compression).__name__}, expected an object")
    version, seal = compression.get("version"), compression.get(SEAL)
    is_sealed = seal == _seal(compression)
    is_intact = is_sealed and content == encode_json(compression)
    # Other versions may be encoded otherwise, or have no seal.
    if version != RECORD_VERSION and (is_intact or (version is not None and (is_sealed or seal is None))):
        raise InputError(f"{path}: version {version!r}, this Lamina knows {RECORD_VERSION}")
    if not is_intact:
        raise CorruptError(f"{path}: damaged or edited: it differs from its own sha256")
    try:
        _CompressionRecord.model_validate(compression)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:SHOWN_FAULTS]]
        raise CorruptError(f"{path}: damaged or edited: {'; '.join(faults)}") from None
    return compression


def file_fault(storage: Storage, name: str, record: Mapping[str, Any], digest: bool = True) -> str | None:
    """Return the fault of a file of the checkpoint, or None. Without `digest`, only its size is compared."""
    path = storage.at(name)
    if not storage.has(name):
        return f"{path}: missing"
    with storage.reader(name) as file:
        if file.size != record["size"]:
            return f"{path}: {file.size} bytes, {RECORD_FILE} says {record['size']}"
        if digest and file.sha256() != record["sha256"]:
            return f"{path}: sha256 differs from the one in {RECORD_FILE}"
    return None


def quick_faults(output: Place, seal: str) -> list[str]:
    """Return the faults of the record, of small files (by digest) and of shards (by size), without reading weights.

    `seal`: the digest of the record that the job wrote.
    """
    storage = open_storage(output)
    try:
        compression = read_record(storage)
    except (InputError, CorruptError) as error:
        return [str(error)]
    if compression[SEAL] != seal:
        return [f"{storage.at(RECORD_FILE)}: not written by this job"]
    faults = [file_fault(storage, name, record) for name, record in compression["files"].items()]
    faults += [file_fault(storage, name, record, digest=False) for name, record in compression["shards"].items()]
    return [fault for fault in faults if fault]


def _seal(compression: Mapping[str, Any]) -> str:
    content = {name: value for name, value in compression.items() if name != SEAL}
    return hashlib.sha256(encode_json(content)).hexdigest()
