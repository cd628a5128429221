"""The protocol of a storage: bytes by name. `stores/storage.py` opens storages by address.

Names are relative, their parts joined by `/`. A folder is a common prefix of names and need not be created.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol

from manifests.errors import LaminaError, StorageError

PIECE_BYTES = 8 * 1024 * 1024
REWRITE_EVERY_S = 10.0
PROBE = ".lamina.probe"


class Writable(Protocol):
    """A file to write to."""

    def write(self, data: Any, /) -> object:
        """Append bytes, or any object with a buffer."""
        ...


class Appender(Protocol):
    """Text that grows under a name while others may read it."""

    def write(self, text: str, /) -> object:
        """Append a text. Raises OSError or StorageError."""
        ...

    def flush(self) -> object:
        """Do nothing beyond `write`; `logging` calls it after every line."""
        ...

    def close(self) -> object:
        """Publish all of the text. Raises the errors of `write`."""
        ...


class NameLock(ABC):
    """An exclusive lock of a name, until `release` or the end of this process.

    Attributes:
        across_hosts: the lock excludes processes of other hosts, however they mount the place.
    """

    across_hosts = True

    @abstractmethod
    def is_ours(self) -> bool:
        """True unless the name was removed or another process took the lock."""

    def fence(self) -> int | None:
        """Return a number that grows with each owner; commits carry it. 0 where the kernel alone separates owners.

        None: another process may own the lock by now. Asks the storage at most once in half the time after which
        another may take the lock.
        """
        return 0

    @abstractmethod
    def release(self) -> None:
        """Release the lock."""


class Readable(ABC):
    """An opened name: its `size` and ranges of its bytes, as they were when it was opened.

    Attributes:
        tag: identifies this version of the bytes; None where reading costs no more than asking for a tag.
    """

    size: int
    tag: str | None = None

    @abstractmethod
    def read(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end`, or as many as there are. Raises StorageError."""

    def read_into(self, begin: int, view: memoryview) -> int:
        """Fill `view` with the bytes from `begin` on; return their number. Raises StorageError."""
        data = self.read(begin, begin + len(view))
        view[: len(data)] = data
        return len(data)

    def read_spans(self, spans: Sequence[tuple[int, memoryview]]) -> list[int]:
        """Fill several ascending spans as `read_into` does, and return the number of bytes of each.

        A bucket combines spans into few requests. Raises StorageError.
        """
        return [self.read_into(begin, view) for begin, view in spans]

    def pieces(self, begin: int = 0, end: int | None = None, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yield bytes `begin` to `end`, or as many as there are, piece by piece. Raises StorageError."""
        end = self.size if end is None else min(end, self.size)
        while begin < end and (piece := self.read(begin, min(begin + piece_bytes, end))):
            yield piece
            begin += len(piece)

    def sha256(self, begin: int = 0, end: int | None = None) -> str:
        """The hex SHA-256 of bytes `begin` to `end`. Raises StorageError."""
        digest = hashlib.sha256()
        for piece in self.pieces(begin, end):
            digest.update(piece)
        return digest.hexdigest()


class Storage(ABC):
    """Bytes by name. A write appears whole or not at all, and is durable when the method returns.

    Equal storages name the same place. They are picklable, keep nothing open and touch nothing before the first call.
    Every method raises StorageError when the place fails (full, read-only, gone); the error names the place and what to
    change.
    """

    # Every storage implements these.

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> None:
        """Write under an unused name: one of several racing writers wins.

        Raises FileExistsError if the name is in use; its bytes are untouched.
        """

    @abstractmethod
    def writer(self, name: str) -> AbstractContextManager[Writable]:
        """`replace`, piece by piece: published when the block ends, never on an exception."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes `begin` to `end` (None: the last), or as many as there are; a negative `begin` counts from the
        end.

        Raises FileNotFoundError, and ValueError for a name that holds no bytes, such as a directory.
        """

    @abstractmethod
    def stamp(self, name: str) -> Mapping[str, int | str]:
        """Return `size` and other metadata that changes when the bytes do, without reading them. Raises the errors of
        `read`."""

    @abstractmethod
    def modified_times(self, folder: str = "") -> Mapping[str, float]:
        """Return the names of a folder and the folders below it, ascending, with their times of writing (Unix seconds).

        Temporary files of running writers are left out.
        """

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove names durably; missing ones are no error."""

    @abstractmethod
    def hold(self, name: str) -> NameLock:
        """Lock a name, creating it if need be. Raises BlockingIOError when another process holds it."""

    @abstractmethod
    def is_held(self, name: str) -> bool:
        """True if a process holds the lock of the name."""

    @abstractmethod
    def below(self, folder: str) -> Storage:
        """Return the storage of a folder's names."""

    @abstractmethod
    def at(self, name: str = "") -> str:
        """The full address of a name, for messages."""

    # The other methods are built on these. A storage overrides those that it can do better.

    def replace(self, name: str, data: bytes) -> None:
        """Write under a name, replacing its bytes."""
        with self.writer(name) as file:
            file.write(data)

    def write(self, name: str, data: Any) -> None:
        """Replace a file as `replace` does, but durably only after `sync`: for many pieces that count together."""
        self.replace(name, data)

    def sync(self, names: Iterable[str]) -> None:
        """Make earlier `write` calls for these names durable."""
        return

    def size(self, name: str) -> int:
        """The number of bytes. Raises the errors of `read`."""
        return int(self.stamp(name)["size"])

    @contextmanager
    def reader(self, name: str) -> Iterator[Readable]:
        """Open a name to read many ranges of it. Raises StorageError, also when there is no such name."""
        yield Ranges(self, name)

    def sha256(self, name: str) -> str:
        """The hex SHA-256 of a name's bytes. Raises StorageError."""
        with self.reader(name) as file:
            return file.sha256()

    def names(self, folder: str = "") -> list[str]:
        """Return the names of a folder and of the folders below it, ascending, without temporary files."""
        return list(self.modified_times(folder))

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders directly in a folder, ascending."""
        return sorted({name.partition("/")[0] for name in self._inside(folder) if "/" in name})

    def children(self, folder: str = "") -> list[str]:
        """Return the last parts of all entries directly in a folder, ascending: names, folders, special files."""
        return sorted({name.partition("/")[0] for name in self._inside(folder)})

    def files(self, folder: str = "") -> list[str]:
        """Return the last parts of the names directly in a folder, ascending."""
        return [name for name in self._inside(folder) if "/" not in name]

    def _inside(self, folder: str) -> list[str]:
        start = f"{folder}/" if folder else ""
        return [name.removeprefix(start) for name in self.names(folder)]

    def read_whole(self, name: str, limit_bytes: int) -> bytes:
        """Return the bytes of a small name. Raises the errors of `read`, and ValueError beyond `limit_bytes`."""
        if (size := self.size(name)) > limit_bytes:
            raise ValueError(f"{size:,} bytes, more than {limit_bytes:,}")
        return self.read(name, end=limit_bytes)

    def has(self, name: str) -> bool:
        """True if there are bytes under a name."""
        try:
            self.size(name)
        except (FileNotFoundError, ValueError):
            return False
        return True

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and everything in it, durably; a missing one is no error. "" is the whole storage."""
        self.delete(self.names(folder))

    def delete_folders(self, folders: Mapping[str, Sequence[str]]) -> None:
        """Remove folders durably. `folders`: the names in each."""
        self.delete([name for names in folders.values() for name in names])

    def sweep(self, below: bool = True) -> int:
        """Remove temporary files and empty folders that killed writers left, and make published files durable.
        Return the number of files removed.

        `below`: in all folders; else at the top only. Call it only while no process writes.
        """
        return 0

    def link_or_copy(self, name: str, source: Storage, source_name: str) -> None:
        """Copy a name in the cheapest way. Both names may share one file afterwards, so neither may be edited."""
        self.copy(name, source, source_name)

    def copy(self, name: str, source: Storage, source_name: str) -> None:
        """Copy the bytes of a name in any storage to a name here, replacing it, a few megabytes at a time."""
        with source.reader(source_name) as reader, self.writer(name) as file:
            for piece in reader.pieces():
                file.write(piece)

    def appender(self, name: str) -> Appender:
        """Open a growing text such as a log. It is written at once where that is cheap, else every few seconds.

        Raises OSError or StorageError.
        """
        return _RewrittenText(self, name)

    def prepare(self, folders: Iterable[str] = ()) -> None:
        """Check that names can be written, also in these folders."""
        self.replace(PROBE, b"probe")
        self.delete([PROBE])

    def free_bytes(self) -> int | None:
        """The free space; None where it is unknown."""
        return None

    def fault(self) -> str | None:
        """Describe why the place cannot be read or written; None if no fault shows without writing."""
        return None

    def exists(self) -> bool:
        """True if the place exists: a directory, even an empty one; in a bucket, any name."""
        return bool(self.children())

    def remove_empty(self) -> None:
        """Remove the place itself if it is an empty directory."""
        return

    @property
    def folder(self) -> str | None:
        """The directory of this machine with these files, for libraries that only read directories; None if there is
        none."""
        return None

    @property
    def address(self) -> str:
        """Return the canonical address of the place."""
        return self.at()


def matching(storage: Storage, patterns: Sequence[str]) -> list[str]:
    """Return the names that match any shell pattern, ascending: `*.model` at the top, `FOLDER/*.jinja` in a folder.

    Only the last part of a pattern may hold wildcards.
    """
    parts: dict[str, list[str]] = {}
    for pattern in patterns:
        folder, _, last = pattern.rpartition("/")
        parts.setdefault(folder, []).append(last)
    return sorted(
        f"{folder}/{name}" if folder else name
        for folder, lasts in parts.items()
        for name in storage.files(folder)
        if any(fnmatchcase(name, last) for last in lasts)
    )


class Ranges(Readable):
    """Reads each range by `Storage.read`."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        with self._missing_is_fault():
            self.size = storage.size(name)

    def read(self, begin: int, end: int) -> bytes:
        with self._missing_is_fault():
            return self._storage.read(self._name, begin, end) if begin < end else b""

    @contextmanager
    def _missing_is_fault(self) -> Iterator[None]:
        try:
            yield
        except LaminaError:  # an InputError is a ValueError, too
            raise
        except (FileNotFoundError, ValueError) as error:
            at = self._storage.at(self._name)
            raise StorageError(f"reading {at}: it was removed or never written; check the address") from error


class _RewrittenText(Appender):
    """Writes the whole text again every few seconds, for storages whose names cannot grow. Logs are short."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._text = ""
        self._written = ""
        self._written_at = time.monotonic()

    def write(self, text: str) -> None:
        self._text += text
        if time.monotonic() - self._written_at > REWRITE_EVERY_S:
            self.close()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._written != self._text:
            self._written_at = time.monotonic()  # also after an attempt that fails
            self._storage.replace(self._name, self._text.encode())
            self._written = self._text
