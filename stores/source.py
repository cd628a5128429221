"""The dense checkpoint: sharded safetensors in a directory, in a bucket or on the hub. Read-only.

Opening checks all names, shapes and sizes. Tensors are read front to back, each file opened once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from lamina.stored_lamina import StoredFormat
from manifests.errors import InputError, StorageError, reason
from manifests.parts import Fused
from manifests.records import SourceFile
from stores.backend import PIECE_BYTES
from stores.checkpoint_files import (
    indexed_names,
    named_tensors,
    raise_faults,
    read_object,
    read_tensors,
    short_read,
)
from stores.durable import storage_error
from stores.formats import decode, holds_parts, keeps, stored_weights, with_formats
from stores.headers import TensorRecord
from stores.hub import open_hub
from stores.model_files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from stores.node_cache import NodeCache
from stores.storage import Readable, Storage, is_address, open_storage
from stores.threads import parallel_map
from stores.weight_parts import cut

__all__ = [
    "CONFIG_FILE", "INDEX_FILE", "SINGLE_FILE", "SourceCheckpoint", "is_hub_id", "open_source", "raise_faults",
]  # fmt: skip

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONTENT_FIELDS = ("size", "mtime_ns", "inode")  # of a stamp, without the ctime, which a hard link changes

FileStamp = dict[str, int | str]
Bring = Callable[[torch.Tensor], torch.Tensor]  # to another device


def _stay(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checked checkpoint. It keeps no file open, so that it can be sent to workers on nodes that reach its storage.

    Attributes:
        config: the content of config.json.
        tensors: every tensor by name; a weight in a stored format in place of its parts.
        files: the safetensors files.
        indexed: the checkpoint has an index.
        cache_bytes: size of the cache on the reading node's disk for tensors of a bucket (`stores.node_cache`).
        tags: the required entity tags of files in a bucket.
        left_out: tensors of the files that are not part of the model, and not among `tensors`.
        file_names: the names in the files of renamed tensors, by which a `quantization_config` names modules.
        opened: stamps of files on a disk, taken before the first was read.
    """

    storage: Storage
    config: dict[str, Any]
    tensors: dict[str, TensorRecord]
    files: tuple[str, ...]
    indexed: bool
    cache_bytes: int = 0
    tags: Mapping[str, int | str] = field(default_factory=dict)
    opened: Mapping[str, FileStamp] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    file_names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def stored(self) -> dict[str, TensorRecord]:
        """The tensors of the files by name, among them the parts of weights in a stored format."""
        return {part.name: part for record in self.tensors.values() for part in record.stored}

    @cached_property
    def _owners(self) -> dict[str, TensorRecord]:
        """Map each part of a weight that can stay in its format to the weight."""
        return {part.name: record for record in self.tensors.values() if keeps(record) for part in record.stored}

    def stored_bytes(self) -> dict[str, tuple[int, bool]]:
        """Return the bytes of each weight in a stored format, and True if a Lamina checkpoint may keep the format."""
        return {name: (record.num_bytes, keeps(record)) for name, record in self.tensors.items() if record.parts}

    @property
    def place(self) -> str:
        """The address, for messages and `open_source`."""
        return self.storage.at()

    def require(self, shapes: Mapping[str, Sequence[int]], hint: str = "") -> None:
        """Check that these tensors exist with these shapes. Raises InputError with all faults (up to 20).

        `hint`: the likely cause of a fault.
        """
        faults = []
        for name, shape in shapes.items():
            record = self.tensors.get(name)
            if record is None:
                faults.append(f"{name}: missing")
            elif record.shape != tuple(shape):
                faults.append(f"{name}: shape {list(record.shape)}, expected {list(shape)}")
        raise_faults(f"{self.place}: config.json and weights do not fit together{hint}", faults)

    def with_weights(self, modules: Mapping[str, StoredFormat] | None = None, embedding: str = "") -> SourceCheckpoint:
        """Return the checkpoint with weights in place of the tensors that they are stored in; no bytes are read.

        `modules`: the format of each module; None: the formats in a source's `quantization_config`, for which
        `embedding` is the path of the table of token embeddings. Raises InputError for an unknown format, and for
        tensors that do not fit theirs.
        """
        if modules is None:
            tensors, faults = stored_weights(self.config, self.tensors, embedding, self.file_names)
        else:
            tensors, faults = with_formats(modules, self.tensors)
        raise_faults(f"{self.place}: weights that cannot be decoded", faults)
        return replace(self, tensors=tensors)

    def with_parts(self, fused: Mapping[str, Fused]) -> SourceCheckpoint:
        """Return the checkpoint with the parts of some tensors in place of these; no bytes are copied.

        `fused`: by tensor; those that are missing are skipped. Raises InputError if a tensor has another shape.
        """
        tensors, faults = dict(self.tensors), []
        for name in fused.keys() & tensors.keys():
            record, (shape, parts) = tensors.pop(name), fused[name]
            if record.shape != shape:
                faults.append(f"{name}: shape {list(record.shape)}, expected {list(shape)}")
                continue
            for part in parts:
                if record.form is not None:
                    tensors[part.name] = cut(record, part)
                    continue
                begin, end = (record.begin + count * record.torch_dtype.itemsize for count in (part.begin, part.end))
                place = replace(record, name=part.name, shape=part.shape, begin=begin, end=end)
                tensors[part.name] = place if part.is_whole_block else replace(place, part=part)
        raise_faults(f"{self.place}: config.json and weights do not fit together", sorted(faults))
        return replace(self, tensors=tensors)

    def renamed(self, names: Mapping[str, str]) -> SourceCheckpoint:
        """Return the checkpoint with some tensors under other names: stored name -> name.

        Raises InputError if two tensors get one name.
        """
        if not names:
            return self
        names = {name: names.get(name, name) for name in self.tensors}
        tensors = {names[name]: replace(record, name=names[name]) for name, record in self.tensors.items()}
        clashing = [name for name, other in names.items() if tensors[other] != replace(self.tensors[name], name=other)]
        raise_faults(f"{self.place}: two tensors for one name", sorted(clashing))
        of_file = {other: self.file_names.get(name, name) for name, other in names.items()}
        return replace(
            self, tensors=tensors, file_names={name: of_file[name] for name in tensors if name != of_file[name]}
        )

    def read(self, names: Iterable[str], bring: Bring = _stay) -> dict[str, torch.Tensor]:
        """Return the tensors, each in its own memory, in the order of `names`; reads by file and offset.

        `bring`: moves the parts of a weight in a stored format to the device that decodes it, where the weight stays;
        all other tensors are on the CPU.

        Raises:
            InputError: no such tensor, or parts that contradict each other.
            NumericsError: scales of a stored format that are not finite, or zero where codes are not.
            StorageError: the file cannot be read, or changed after it was opened.
        """
        names = list(names)
        records = [self._record(name) for name in dict.fromkeys(names)]
        stored = self._read({part for record in records for part in record.stored})
        tensors = {}
        for record in records:
            parts = {part: bring(stored[at]) for part, at in record.parts}
            tensors[record.name] = decode(record, parts) if record.parts else stored[record]
        return {name: tensors[name] for name in names}

    def read_kept(self, weight: str, name: str) -> torch.Tensor:
        """Return the part `name` of a weight that a Lamina checkpoint keeps in its format, or any other weight itself.

        Raises the errors of `read`.
        """
        if not keeps(self._record(weight)):
            return self.read([weight])[weight]
        part = self.stored[name]
        return self._read({part})[part]

    def decoded(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of a layer with decoded weights in place of parts that are in the source's format.

        Raises the errors of `formats.decode`.
        """
        plain, owners = dict(tensors), self._owners
        for record in dict.fromkeys(owners[name] for name in tensors if name in owners):
            if holds_parts(record, tensors):
                parts = {part: plain.pop(at.name) for part, at in record.parts}
                plain[record.name] = decode(record, parts)
        return plain

    def _read(self, records: Set[TensorRecord]) -> dict[TensorRecord, torch.Tensor]:
        tensors: dict[TensorRecord, torch.Tensor] = {}
        ordered = sorted(records, key=lambda record: (record.file, record.begin))
        for file_name in sorted({record.file for record in records}):
            with self.storage.reader(file_name) as file:
                self._check_same(file_name, file)
                if self.cache_bytes and file.tag:
                    file = NodeCache(self.cache_bytes).over(file, f"{self.storage.at(file_name)} {file.tag}")
                tensors |= read_tensors(file, [record for record in ordered if record.file == file_name])
        return tensors

    def copy_bytes(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yield the bytes of a tensor of the files as they are there, in pieces. Raises the errors of `read`."""
        record, num_bytes = self._stored_record(name), 0
        if record.part is not None:
            numbers = self._read({record})[record] if record.form is None else self.read([name])[name]
            bytes_N = numbers.flatten().view(torch.uint8).numpy()
            yield from (bytes_N[at : at + piece_bytes].tobytes() for at in range(0, len(bytes_N), piece_bytes))
            return
        with self.storage.reader(record.file) as file:
            self._check_same(record.file, file)
            for piece in file.pieces(record.begin, record.end, piece_bytes):
                num_bytes += len(piece)
                yield piece
        if num_bytes != record.num_bytes:
            raise short_read(record, num_bytes)

    def equal(self, one: str, other: str) -> bool:
        """True if two tensors have the same dtype, shape and bytes; reads both in pieces. Raises the errors of
        `read`."""
        first, second = self._record(one), self._record(other)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        if first.parts or second.parts:
            return torch.equal(*self.read([one, other]).values())
        return all(a == b for a, b in zip(self.copy_bytes(one), self.copy_bytes(other), strict=True))

    def file_stamp(self, file: str) -> FileStamp:
        """Return metadata of a file that changes when its bytes do, without reading them. Raises StorageError."""
        try:
            return dict(self.storage.stamp(file))
        except (FileNotFoundError, ValueError) as error:
            raise StorageError(
                f"reading {self.storage.at(file)}: {reason(error)}; restore it, then start again"
            ) from error

    def file_digests(self, previous: Mapping[str, SourceFile]) -> dict[str, SourceFile]:
        """Return stamp and sha256 of config.json, the index and every safetensors file.

        The stamp of a file on a disk has size, mtime_ns, ctime_ns and inode. A file whose stamp equals that of its
        `previous` record is not read again. Raises StorageError if a file cannot be read, or changes meanwhile.
        """
        names = [CONFIG_FILE, *([INDEX_FILE] if self.indexed else []), *self.files]
        records = parallel_map(lambda name: self._digest(name, previous.get(name)), names)
        return dict(zip(names, records, strict=True))

    def _digest(self, file_name: str, previous: SourceFile | None) -> SourceFile:
        stamp = self.file_stamp(file_name)
        before = self.opened.get(file_name, stamp)
        if any(before.get(field) != stamp.get(field) for field in CONTENT_FIELDS):
            raise self._changed(file_name)
        if previous is not None and previous.as_json() == {**stamp, "sha256": previous.sha256}:
            return previous
        sha256 = self.storage.sha256(file_name)
        if self.file_stamp(file_name) != stamp:
            raise self._changed(file_name)
        return SourceFile.model_validate({**stamp, "sha256": sha256})

    def _changed(self, file_name: str) -> StorageError:
        path = self.storage.at(file_name)
        return StorageError(f"{path}: changed while it was read; let nothing write to the source, then start again")

    def _record(self, name: str) -> TensorRecord:
        if name not in self.tensors:
            raise InputError(f"{self.place}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]

    def _stored_record(self, name: str) -> TensorRecord:
        return self.stored[name] if name in self.stored else self._record(name)

    def _check_same(self, file_name: str, file: Readable) -> None:
        expected_tag, actual_bytes = self.tags.get(file_name), file.size
        if expected_tag and file.tag and file.tag != expected_tag:
            raise StorageError(
                f"{self.storage.at(file_name)}: changed after the job opened it (entity tag {file.tag}, was "
                f"{expected_tag}); restore it, then run the same command again"
            )
        # The header accounts for every byte: the end of the last tensor is the file's size.
        expected_bytes = max(record.end for record in self.stored.values() if record.file == file_name)
        if actual_bytes < expected_bytes:
            raise StorageError(
                f"{self.storage.at(file_name)}: {actual_bytes} bytes, expected {expected_bytes}: "
                "it was changed or truncated after the job opened it; restore it, then run the same command again"
            )


def open_source(source: str, revision: str | None = None, *, code: bool = False) -> SourceCheckpoint:
    """Open a directory, a bucket or a hub id and check config, index and every header.

    The weights of a hub model are fetched later, by the node that reads them.

    Args:
        source: a directory, an address or a hub id.
        revision: of a hub id.
        code: also fetch the Python files of a hub model.

    Raises:
        InputError: all faults at once (up to 20).
        StorageError: a file cannot be read.
    """
    try:
        return _open(_locate(source) or open_hub(source, revision, code))
    except OSError as error:
        raise InputError(f"model source {storage_error('reading', error.filename or source, error)}") from error


def is_hub_id(source: str) -> bool:
    """True for a hub id, False for a directory or bucket. Raises InputError if it can be neither."""
    return _locate(source) is None


def _open(storage: Storage) -> SourceCheckpoint:
    names = frozenset(storage.files())
    opened = _stamps(storage, names)
    faults: list[str] = []
    config = read_object(storage, CONFIG_FILE, faults)
    indexed = SINGLE_FILE not in names  # as transformers, which prefers the single file to the index
    names_of = indexed_names(storage, names, faults) if indexed else {SINGLE_FILE: None}
    tensors = named_tensors(storage, {file: names_of[file] for file in names_of if file in names}, faults)
    missing = "missing, though the index names it; fetch the model again"
    faults += [f"{storage.at(file)}: {missing}" for file in names_of if file not in names]
    raise_faults(f"{storage.at()}: no usable checkpoint", faults)
    return SourceCheckpoint(storage, config, tensors, tuple(names_of), indexed, opened=opened)


def _stamps(storage: Storage, names: Set[str]) -> dict[str, FileStamp]:
    """Return the stamps of a checkpoint's files on a disk; none in a bucket, where each would cost a request."""
    stamps: dict[str, FileStamp] = {}
    for name in names if storage.folder is not None else ():
        if name in (CONFIG_FILE, INDEX_FILE) or name.endswith(".safetensors"):
            with suppress(OSError, ValueError):  # reading the file raises the error
                stamps[name] = dict(storage.stamp(name))
    return stamps


def _locate(source: str) -> Storage | None:
    """Return the directory or bucket; None for a hub id."""
    if is_address(source):
        storage = open_storage(source)
        if fault := storage.fault():
            raise InputError(f"model source {source}: {fault}")
        return storage
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return open_storage(os.path.realpath(path))
    if os.path.exists(path):
        raise InputError(f"model source {source}: a file; give the directory that holds config.json")
    if not HUB_ID.fullmatch(source):
        raise InputError(
            f"model source {source}: no such directory; give one that holds config.json and safetensors files (a "
            f"relative path is relative to {os.getcwd()}), a hub id such as meta-llama/Llama-2-7b-hf, or "
            "s3://BUCKET/FOLDER"
        )
    return None
