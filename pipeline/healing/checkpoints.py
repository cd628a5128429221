"""Checkpoints of a training in RUN_DIR, by torch.distributed.checkpoint: read again by any number of processes.

RUN_DIR/healing/step-000120.<generation>/, on a disk or in a bucket. torch writes `.metadata` last, when all processes
have written their parts.
"""

from __future__ import annotations

import io
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from manifests.errors import CorruptError, StorageError, reason
from pipeline.healing.processes import Processes
from stores.backend import Readable, Storage, Writable

FOLDER = "healing"
METADATA = ".metadata"
BUFFER_BYTES = 1024 * 1024  # read at a time; torch reads small pieces


def save_state(run_dir: Storage, step: int, state: Mapping[str, Tensor], processes: Processes) -> str:
    """Write a checkpoint durably: each process writes its part. Return its folder, relative to RUN_DIR.

    Raises StorageError.
    """
    folder = processes.first(f"{FOLDER}/step-{step:06d}.{uuid.uuid4().hex}")
    try:
        with _alone():
            save(dict(state), storage_writer=_Writer(run_dir, folder))
    except (OSError, StorageError) as error:
        with suppress(OSError, StorageError):
            run_dir.delete_folder(folder)
        raise StorageError(
            f"{run_dir.at(folder)}: the checkpoint of a healing cannot be written ({reason(error)}); free some room, "
            "then run the same command again"
        ) from error
    return folder


def load_state(run_dir: Storage, folder: str, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state` from a checkpoint. Raises CorruptError if it is missing or damaged."""
    try:
        if not run_dir.has(f"{folder}/{METADATA}"):  # torch would log a traceback
            raise FileNotFoundError(f"{METADATA} is missing")
        with _alone():
            load(state, storage_reader=_Reader(run_dir, folder))
    except Exception as error:  # torch raises many types about damaged files
        at = run_dir.at(folder)
        raise CorruptError(f"{at}: the checkpoint of a healing is damaged ({reason(error)})") from error


def sweep_states(run_dir: Storage, live: str | None) -> None:
    """Remove all checkpoints but one."""
    if live is None:
        run_dir.delete_folder(FOLDER)
        return
    for name in run_dir.folders(FOLDER):
        if name.startswith("step-") and f"{FOLDER}/{name}" != live:
            run_dir.delete_folder(f"{FOLDER}/{name}")


@contextmanager
def _alone() -> Iterator[None]:
    """Ignore torch's warning that one process alone saves or loads, and raise the first process's error as it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


class _Writer(FileSystemWriter):
    """Writes a checkpoint to a storage, which makes each file durable itself."""

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__(folder, sync_files=False)
        self.fs = _Files(storage)
        self.path = folder


class _Reader(FileSystemReader):
    """Reads a checkpoint from a storage."""

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__(folder)
        self.fs = _Files(storage)
        self.path = folder


class _Files(FileSystem):
    """A storage as torch's checkpoints see it. Paths are names in it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode == "rb":
            with self.storage.reader(str(path)) as readable:
                yield io.BufferedReader(_Reading(readable), BUFFER_BYTES)
        else:
            with self.storage.writer(str(path)) as file:
                yield _Writing(file)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.storage.link_or_copy(str(new_path), self.storage, str(path))
        self.storage.sync([str(new_path)])
        self.storage.delete([str(path)])

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: writing a name creates its folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.storage.has(str(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.storage.delete([str(path)])


class _Writing(io.RawIOBase):
    """A file that is written from its begin to its end, and knows its place."""

    def __init__(self, file: Writable) -> None:
        self.file, self.place = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        copy = bytes(data)  # a bucket reads it later, and torch's buffer is gone then
        self.file.write(copy)
        self.place += len(copy)
        return len(copy)

    def tell(self) -> int:
        return self.place


class _Reading(io.RawIOBase):
    """The bytes of a name as a file."""

    def __init__(self, readable: Readable) -> None:
        self.readable_bytes, self.place = readable, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.readable_bytes.size}[whence]
        self.place = begin + offset
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any, /) -> int:
        count = self.readable_bytes.read_into(self.place, memoryview(buffer).cast("B"))
        self.place += count
        return count
