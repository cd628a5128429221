"""What a place of bytes can do: the one protocol under all stores. `stores/storage.py` opens places by their address.

Names are relative, their parts joined by `/`; a folder is what names have in common and needs no making.
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
SHOWN_EVERY_S = 10.0
PROBE = ".lamina.probe"


class Writable(Protocol):
    """What a writer writes to."""

    def write(self, data: Any, /) -> object:
        """Appends bytes, or anything with a buffer of them."""
        ...


class Appender(Protocol):
    """Text that grows under a name while others may read it."""

    def write(self, text: str, /) -> object:
        """Appends. Raises OSError or StorageError."""
        ...

    def flush(self) -> object:
        """Nothing that `write` would not do."""
        ...

    def close(self) -> object:
        """Shows all of it. Raises as `write` does."""
        ...


class NameLock(Protocol):
    """A name held against all other processes, until `release` or the end of this one.

    Attributes:
        across_hosts: against those of other hosts, too, whatever the place is mounted through.
    """

    across_hosts: bool

    def is_ours(self) -> bool:
        """Whether it still is: the name was not removed, nor given to another."""
        ...

    def fence(self) -> int | None:
        """What grows with each owner and stands on what they commit; 0 where the kernel alone tells them apart.

        None: another may own it by now. Asks at most once in half the time after which another may take it.
        """
        ...

    def release(self) -> None:
        """Lets go of it."""
        ...


class Readable(ABC):
    """The bytes under one name, as they were when it was opened: its `size`, and ranges of them.

    Attributes:
        tag: tells them from all others that the name has had; None where reading is as cheap as looking that up.
    """

    size: int
    tag: str | None = None

    @abstractmethod
    def read(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end`, or as many as there are. Raises StorageError."""

    def read_into(self, begin: int, view: memoryview) -> int:
        """Fills `view` with the bytes from `begin` on; returns how many there were. Raises StorageError."""
        data = self.read(begin, begin + len(view))
        view[: len(data)] = data
        return len(data)

    def read_spans(self, spans: Sequence[tuple[int, memoryview]]) -> list[int]:
        """`read_into` of several, ascending: in the fewest requests, where reading is requests. Raises StorageError."""
        return [self.read_into(begin, view) for begin, view in spans]

    def pieces(self, begin: int = 0, end: int | None = None, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Bytes `begin` to `end`, or as many as there are, a piece at a time. Raises StorageError."""
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
    """Bytes by name. What is written appears whole or not at all, and is durable when the method returns.

    Equal ones name the same place; they are picklable, hold nothing open and touch nothing before they are asked to.
    Every method raises StorageError when the place fails (full, read-only, gone): naming it, and what to change.
    """

    # What a place must have of its own.

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> None:
        """Writes under a name that nobody has: one of several racing writers wins.

        Raises FileExistsError: the name is taken; what has it is untouched.
        """

    @abstractmethod
    def writer(self, name: str) -> AbstractContextManager[Writable]:
        """`replace`, piece by piece: published when the block ends, never on an exception."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` (None: the last), or as many as there are; a negative `begin` counts from the end.

        Raises FileNotFoundError, and ValueError when the name is of something that holds no bytes.
        """

    @abstractmethod
    def stamp(self, name: str) -> Mapping[str, int | str]:
        """`size`, and whatever else is told without reading that changes when the bytes do. Raises as `read` does."""

    @abstractmethod
    def modified_times(self, folder: str = "") -> Mapping[str, float]:
        """The names of a folder and of those below it, ascending, and when each was written (Unix seconds).

        Without those of writers at work.
        """

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Removes names durably; those that are not there, too, are gone afterwards."""

    @abstractmethod
    def hold(self, name: str) -> NameLock:
        """Holds a name, making it when it is not there. Raises BlockingIOError when another process holds it."""

    @abstractmethod
    def is_held(self, name: str) -> bool:
        """Whether a process holds the name."""

    @abstractmethod
    def below(self, folder: str) -> Storage:
        """The names of a folder, as a storage."""

    @abstractmethod
    def at(self, name: str = "") -> str:
        """A name as messages give it, place included."""

    # What follows from that; a place overrides what it can do better.

    def replace(self, name: str, data: bytes) -> None:
        """Writes under a name, in place of what had it."""
        with self.writer(name) as file:
            file.write(data)

    def write(self, name: str, data: Any) -> None:
        """As `replace`, but durable only after `sync`: for many pieces that count together."""
        self.replace(name, data)

    def sync(self, names: Iterable[str]) -> None:
        """Makes durable what `write` wrote under these names."""
        return

    def size(self, name: str) -> int:
        """How many bytes there are. Raises as `read` does."""
        return int(self.stamp(name)["size"])

    @contextmanager
    def reader(self, name: str) -> Iterator[Readable]:
        """Many ranges of one name. Raises StorageError, also when there is no such name."""
        yield Ranges(self, name)

    def sha256(self, name: str) -> str:
        """The hex SHA-256 of a name's bytes. Raises StorageError."""
        with self.reader(name) as file:
            return file.sha256()

    def names(self, folder: str = "") -> list[str]:
        """The names of a folder and of those below it, ascending; without those of writers at work."""
        return list(self.modified_times(folder))

    def folders(self, folder: str = "") -> list[str]:
        """The names of the folders directly in a folder, ascending."""
        start = f"{folder}/" if folder else ""
        inside = (name.removeprefix(start) for name in self.names(folder))
        return sorted({name.partition("/")[0] for name in inside if "/" in name})

    def children(self, folder: str = "") -> list[str]:
        """Whatever is directly in a folder, by its last part, ascending: names, folders, things that hold no bytes."""
        start = f"{folder}/" if folder else ""
        return sorted({name.removeprefix(start).partition("/")[0] for name in self.names(folder)})

    def files(self, folder: str = "") -> list[str]:
        """The names directly in a folder, by their last part, ascending."""
        start = f"{folder}/" if folder else ""
        inside = (name.removeprefix(start) for name in self.names(folder))
        return [name for name in inside if "/" not in name]

    def read_whole(self, name: str, limit_bytes: int) -> bytes:
        """The bytes of what is small by its nature. Raises as `read` does, and ValueError beyond `limit_bytes`."""
        if (size := self.size(name)) > limit_bytes:
            raise ValueError(f"{size:,} bytes, more than {limit_bytes:,}")
        return self.read(name, end=limit_bytes)

    def has(self, name: str) -> bool:
        """Whether there are bytes under a name."""
        try:
            self.size(name)
        except (FileNotFoundError, ValueError):
            return False
        return True

    def delete_folder(self, folder: str) -> None:
        """Removes a folder with all that is in it, durably; nothing when there is none. "" is all of the storage."""
        self.delete(self.names(folder))

    def delete_folders(self, folders: Mapping[str, Sequence[str]]) -> None:
        """Removes folders, durably, of which the names of all that is in them are known."""
        self.delete([name for names in folders.values() for name in names])

    def sweep(self, below: bool = True) -> int:
        """Removes what killed writers left, empty folders among it, and makes durable what they published. Returns how
        many files were removed.

        `below`: in all folders; else at the top. Only while nobody writes.
        """
        return 0

    def link_or_copy(self, name: str, source: Storage, source_name: str) -> None:
        """As `copy`, in the cheapest way: the two may be one and the same afterwards, so that neither may be edited."""
        self.copy(name, source, source_name)

    def copy(self, name: str, source: Storage, source_name: str) -> None:
        """The bytes of a name at any place, under a name here, in place of what had it; a few megabytes at a time."""
        with source.reader(source_name) as reader, self.writer(name) as file:
            for piece in reader.pieces():
                file.write(piece)

    def appender(self, name: str) -> Appender:
        """Text that grows under a name, such as a log: at once where that is cheap, else every few seconds.

        Raises OSError or StorageError.
        """
        return _RewrittenText(self, name)

    def prepare(self, folders: Iterable[str] = ()) -> None:
        """Makes sure that names can be written, also in these folders."""
        self.replace(PROBE, b"probe")
        self.delete([PROBE])

    def free_bytes(self) -> int | None:
        """The room that is left; None where there is no telling."""
        return None

    def fault(self) -> str | None:
        """Why nothing can be read or written here, as far as it shows without writing; None: nothing is known."""
        return None

    def exists(self) -> bool:
        """Whether the place is there: a folder, though it be empty; elsewhere, any name."""
        return bool(self.children())

    def remove_empty(self) -> None:
        """Removes the place itself if nothing is in it, where a place is something of its own."""
        return

    @property
    def folder(self) -> str | None:
        """The folder of this machine that the names are files in, for libraries that read nothing else; None: none."""
        return None

    @property
    def address(self) -> str:
        """The place, spelled in the one way that all who mean it spell it."""
        return self.at()


def matching(storage: Storage, patterns: Sequence[str]) -> list[str]:
    """The names that fit any of the patterns, ascending: `*.model` at the place itself, `FOLDER/*.jinja` in a folder.

    A pattern's last part is as a shell has it.
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
    """See `Storage.reader`, by `Storage.read`."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        with self._there():
            self.size = storage.size(name)

    def read(self, begin: int, end: int) -> bytes:
        with self._there():
            return self._storage.read(self._name, begin, end) if begin < end else b""

    @contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except LaminaError:  # an InputError is a ValueError, too
            raise
        except (FileNotFoundError, ValueError) as error:
            at = self._storage.at(self._name)
            raise StorageError(f"reading {at}: it was removed or never made; check the address") from error


class _RewrittenText:
    """See `Appender`: all of the text again every few seconds, where a name cannot grow. For logs, which are short."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._text = ""
        self._shown = ""
        self._shown_at = time.monotonic()

    def write(self, text: str) -> None:
        self._text += text
        if time.monotonic() - self._shown_at > SHOWN_EVERY_S:
            self.close()

    def flush(self) -> None:
        """Nothing: `logging` asks for it after every line."""

    def close(self) -> None:
        if self._shown != self._text:
            self._shown_at = time.monotonic()  # also of an attempt that fails
            self._storage.replace(self._name, self._text.encode())
            self._shown = self._text
