"""Storage on a disk: files below a directory, made durable by fsync and rename."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from manifests.errors import StorageError
from stores.backend import NameLock, Readable, Storage
from stores.durable import (
    NO_HARD_LINKS,
    PARTIAL_NAME,
    create_only,
    durable_file,
    fsync_directory,
    make_directory,
    partial_path,
    read_into,
    storage_error,
    storage_errors,
    sweep_partials,
    write_durably,
)

DIGEST_BYTES = 2**20
NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True)
class Disk(Storage):
    """The files below `root`, which need not exist yet."""

    root: Path

    def __init__(self, root: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "root", Path(root))

    def put_if_absent(self, name: str, data: bytes) -> None:
        make_directory((self.root / name).parent)
        create_only(self.root / name, data)

    @contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        make_directory((self.root / name).parent)
        with durable_file(self.root / name) as file:
            yield file

    def write(self, name: str, data: Any) -> None:
        path = self.root / name
        make_directory(path.parent)
        temporary = partial_path(path)
        with storage_errors("writing", path):
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def sync(self, names: Iterable[str]) -> None:
        paths = [self.root / name for name in names]
        for path in paths:
            with storage_errors("syncing", path):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        for directory in dict.fromkeys(path.parent for path in paths):
            fsync_directory(directory)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        path = self.root / name
        size = self.size(name)
        start = max(0, size + begin) if begin < 0 else begin
        with storage_errors("reading", path), open(path, "rb", buffering=0) as file:
            file.seek(start)
            return _read_fully(file, max(0, (size if end is None else min(end, size)) - start))

    def size(self, name: str) -> int:
        return self._status(name).st_size

    def stamp(self, name: str) -> dict[str, int | str]:
        status = self._status(name)
        return {
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "ctime_ns": status.st_ctime_ns,
            "inode": status.st_ino,
        }

    def _status(self, name: str) -> os.stat_result:
        path = self.root / name
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if path.is_symlink():
                raise ValueError("a link to nothing") from None
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from error
        except OSError as error:
            raise storage_error("reading", path, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file")
        return status

    @contextmanager
    def reader(self, name: str) -> Iterator[DiskFile]:
        path = self.root / name
        with storage_errors("reading", path):
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        with file:
            yield DiskFile(path, file)

    def modified_times(self, folder: str = "") -> dict[str, float]:
        times = {}
        for name in self.names(folder):
            with suppress(FileNotFoundError):  # removed since it was listed
                times[name] = os.stat(self.root / name).st_mtime
        return times

    def names(self, folder: str = "") -> list[str]:
        names = []
        with storage_errors("listing", self.root / folder):
            for parent, _, files in os.walk(self.root / folder, onerror=_raise_unless_missing):
                within = Path(parent).relative_to(self.root)
                names += [(within / file).as_posix() for file in files if not PARTIAL_NAME.fullmatch(file)]
        return sorted(names)

    def folders(self, folder: str = "") -> list[str]:
        directory = self.root / folder
        with storage_errors("listing", directory):
            if not directory.is_dir():
                return []
            return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())

    def children(self, folder: str = "") -> list[str]:
        directory = self.root / folder
        with storage_errors("listing", directory):
            if not directory.is_dir():
                return []
            return sorted(name for name in os.listdir(directory) if not PARTIAL_NAME.fullmatch(name))

    def files(self, folder: str = "") -> list[str]:
        with storage_errors("listing", self.root / folder):
            return [name for name in self.children(folder) if (self.root / folder / name).is_file()]

    def delete(self, names: Iterable[str]) -> None:
        paths = [self.root / name for name in names]
        for path in paths:
            with storage_errors("removing", path):
                path.unlink(missing_ok=True)
        for directory in dict.fromkeys(path.parent for path in paths):
            if directory.is_dir():
                fsync_directory(directory)

    def delete_folder(self, folder: str) -> None:
        path = self.root / folder
        with storage_errors("removing", path):
            if path.is_dir():
                shutil.rmtree(path)
                fsync_directory(path.parent)

    def delete_folders(self, folders: Mapping[str, Sequence[str]]) -> None:
        for folder in folders:
            self.delete_folder(folder)

    def sweep(self, below: bool = True) -> int:
        removed = sweep_partials(self.root, below)
        for parent, folders, _ in os.walk(self.root, topdown=False) if below else ():
            for folder in folders:
                with suppress(OSError):  # it is not empty
                    os.rmdir(Path(parent, folder))
        if self.root.is_dir():
            fsync_directory(self.root)
        return removed

    def link_or_copy(self, name: str, source: Storage, source_name: str) -> None:
        make_directory((self.root / name).parent)
        if not (isinstance(source, Disk) and _link(source.root / source_name, self.root / name)):
            self.copy(name, source, source_name)

    def appender(self, name: str) -> TextIO:
        return open(self.root / name, "a", encoding="utf-8", buffering=1)

    def prepare(self, folders: Iterable[str] = ()) -> None:
        for folder in ("", *folders):
            make_directory(self.root / folder)
        probe = partial_path(self.root / "probe")
        write_durably(probe, b"probe")
        with storage_errors("removing", probe):
            probe.unlink()

    def free_bytes(self) -> int:
        path = self.root
        while not path.exists():
            path = path.parent
        with storage_errors("measuring", path):
            return shutil.disk_usage(path).free

    def fault(self) -> str | None:
        return "no directory" if self.root.exists() and not self.root.is_dir() else None

    def exists(self) -> bool:
        return os.path.lexists(self.root)

    def remove_empty(self) -> None:
        with suppress(OSError):  # it is not empty, or does not exist
            self.root.rmdir()

    @property
    def folder(self) -> str:
        return str(self.root)

    @property
    def address(self) -> str:
        return os.path.realpath(self.root)  # `Path.resolve` would raise on circular links

    def hold(self, name: str) -> FileLock:
        path = self.root / name
        make_directory(path.parent)
        while True:
            with storage_errors("opening the lock", path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            lock = FileLock(path, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.release()
                raise
            except OSError as error:
                lock.release()
                hint = "; this filesystem has no locks: choose a directory on another"
                hint = hint if error.errno in NO_FLOCK else ""
                raise StorageError(f"locking {path}: {error.strerror}{hint}") from error
            if lock.is_ours():
                return lock
            lock.release()  # the file was removed between open and flock: lock the new one

    def is_held(self, name: str) -> bool:
        path = self.root / name
        with storage_errors("reading the lock", path):
            if not path.exists():
                return False
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
            return False

    def below(self, folder: str) -> Disk:
        return Disk(self.root / folder)

    def at(self, name: str = "") -> str:
        return str(self.root / name)


class DiskFile(Readable):
    """An open file."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, begin: int, end: int) -> bytes:
        with storage_errors("reading", self._path):
            self._file.seek(begin)
            return _read_fully(self._file, max(0, end - begin))

    def read_into(self, begin: int, view: memoryview) -> int:
        with storage_errors("reading", self._path):
            self._file.seek(begin)
            return read_into(self._file, view)

    def sha256(self, begin: int = 0, end: int | None = None) -> str:
        # One buffer that fits into the processor's cache.
        end = self.size if end is None else min(end, self.size)
        digest, view = hashlib.sha256(), memoryview(bytearray(DIGEST_BYTES))
        while begin < end and (count := self.read_into(begin, view[: end - begin])):
            digest.update(view[:count])
            begin += count
        return digest.hexdigest()


class FileLock(NameLock):
    """The kernel's lock of an open file, which ends with its process."""

    across_hosts = False  # a network filesystem may not share it

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def is_ours(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        os.close(self._descriptor)


def _link(source: Path, target: Path) -> bool:
    """Hard-links a file to a second name, replacing an older file. False where links are impossible."""
    path = source.resolve()  # a hub's snapshot holds symbolic links: link their targets
    temporary = partial_path(target)
    try:
        os.link(path, temporary)
    except OSError as error:
        if error.errno not in (*NO_HARD_LINKS, errno.EACCES):
            raise storage_error(f"linking {path} to", target, error) from error
        return False
    with storage_errors("writing", target):
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # rename does nothing if both names are one file already
    fsync_directory(target.parent)
    return True


def _read_fully(file: Any, num_bytes: int) -> bytes:
    """Read repeatedly: one call returns at most 2 GiB, and a signal may cut it short."""
    pieces = []
    while num_bytes and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
