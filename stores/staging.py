"""Compressed layers before assembly: one safetensors file each, under RUN_DIR/staged/."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

import torch

from manifests.errors import CorruptError, InputError
from manifests.records import StagedRecord
from stores.checkpoint import tensor_digest, write_shard
from stores.checkpoint_files import read_tensors
from stores.headers import parse_header
from stores.run_directory import STAGED
from stores.storage import Place, open_storage
from stores.threads import parallel_map


def write_staged(run_dir: Place, layer: int, tensors: Mapping[str, torch.Tensor], threads: int = 1) -> StagedRecord:
    """Write a layer under a new name; return its record for the ledger, with `path` relative to RUN_DIR.

    `threads` as in `write_shard`. Raises NumericsError (a tensor is not finite) and StorageError.
    """
    path = f"{STAGED}/layer-{layer:05d}.{uuid.uuid4().hex}.safetensors"
    return StagedRecord(**dict(write_shard(run_dir, path, tensors, threads=threads)), path=path)


def read_staged(run_dir: Place, record: StagedRecord, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a staged layer, or some of them, each checked by its digest. Raises CorruptError."""
    storage, name = open_storage(run_dir), record.path
    path = storage.at(name)
    if not storage.has(name):
        raise CorruptError(f"staged layer missing: {path}", name)
    with storage.reader(name) as file:
        try:
            stored = parse_header(path, name, file.read, file.size)
        except InputError as error:
            raise CorruptError(f"staged layer damaged: {error}", name) from None
        selected = {key: tensor for key, tensor in record.tensors.items() if names is None or key in names}
        for key, committed in selected.items():
            at = stored.get(key)
            if at is None or (at.dtype, at.shape) != (committed.dtype, committed.shape):
                raise _damaged(path, key, name)
        read = read_tensors(file, sorted((stored[key] for key in selected), key=lambda at: at.begin))
        tensors = {record.name: tensor for record, tensor in read.items()}
    digests = parallel_map(lambda key: tensor_digest(tensors[key]), selected)
    for (key, committed), digest in zip(selected.items(), digests, strict=True):
        if digest != committed.sha256:
            raise _damaged(path, key, name)
    return {key: tensors[key] for key in selected}


def _damaged(path: str, key: str, name: str) -> CorruptError:
    return CorruptError(f"staged layer damaged: {path}: tensor {key} is not what was committed", name)
