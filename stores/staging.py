"""Compressed layers before they are put together: one safetensors file each, under RUN_DIR/staged/."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Mapping

import torch

from manifests.errors import CorruptError, InputError
from manifests.records import StagedRecord
from stores.checkpoint import tensor_digest, write_shard
from stores.headers import parse_header
from stores.source import read_tensors
from stores.storage import Place, open_storage
from stores.threads import parallel_map

STAGED = "staged"
STAGED_NAME = re.compile(r"layer-\d{5,}\.[0-9a-f]{32}\.safetensors")


def write_staged(run_dir: Place, layer: int, tensors: Mapping[str, torch.Tensor], threads: int = 1) -> StagedRecord:
    """Writes a layer under a name nobody reads yet; its record, with `path` relative to RUN_DIR, goes to the ledger.

    `threads`: as of `write_shard`. Raises NumericsError (a tensor is not finite) and StorageError.
    """
    path = f"{STAGED}/layer-{layer:05d}.{uuid.uuid4().hex}.safetensors"
    return StagedRecord(**dict(write_shard(run_dir, path, tensors, threads=threads)), path=path)


def sweep_staged(run_dir: Place, live: Iterable[StagedRecord]) -> int:
    """Removes staged layers that no record names, as a crash before their entry leaves them. Returns how many.

    Touches no file that `write_staged` did not name. Raises StorageError.
    """
    storage, kept = open_storage(run_dir), {record.path for record in live}
    names = (name for name in storage.names(STAGED) if STAGED_NAME.fullmatch(name.removeprefix(f"{STAGED}/")))
    strays = [name for name in names if name not in kept]
    storage.delete(strays)
    return len(strays) + storage.below(STAGED).sweep()


def read_staged(run_dir: Place, record: StagedRecord, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a staged layer, or some of them, each held against its digest. Raises CorruptError."""
    storage, name = open_storage(run_dir), record.path
    path = storage.at(name)
    if not storage.has(name):
        raise CorruptError(f"staged layer missing: {path}", name)
    with storage.reader(name) as file:
        try:
            there = parse_header(path, name, file.read, file.size)
        except InputError as error:
            raise CorruptError(f"staged layer damaged: {error}", name) from None
        wanted = {key: found for key, found in record.tensors.items() if names is None or key in names}
        for key, committed in wanted.items():
            at = there.get(key)
            if at is None or (at.dtype, at.shape) != (committed.dtype, committed.shape):
                raise _damaged(path, key, name)
        tensors = read_tensors(file, sorted((there[key] for key in wanted), key=lambda at: at.begin))
    digests = parallel_map(lambda key: tensor_digest(tensors[key]), wanted)
    for (key, committed), digest in zip(wanted.items(), digests, strict=True):
        if digest != committed.sha256:
            raise _damaged(path, key, name)
    return {key: tensors[key] for key in wanted}


def _damaged(path: str, key: str, name: str) -> CorruptError:
    return CorruptError(f"staged layer damaged: {path}: tensor {key} is not what was committed", name)
