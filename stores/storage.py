"""Where stores keep their bytes: one small protocol. `stores/disk.py` is its files, `stores/memory.py` serves tests.

Names are relative, their parts joined by `/`; a folder is what names have in common and needs no making. Another kind
of place is one more file like these two, and a line in `open_storage`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from stores.disk import Disk


class Writable(Protocol):
    """What a writer writes to."""

    def write(self, data: Any, /) -> object:
        """Appends bytes, or anything with a buffer of them."""
        ...


class Hold(Protocol):
    """A name held against all other processes, until `release` or the end of this one."""

    def is_ours(self) -> bool:
        """Whether it still is: the name was not removed, nor given to another."""
        ...

    def release(self) -> None:
        """Lets go of it."""
        ...


class Storage(Protocol):
    """Bytes by name. What is written appears whole or not at all, and is durable when the method returns.

    Every method raises StorageError when the place fails (full, read-only, gone): naming it, and what to change.
    """

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Writes under a name that nobody has: one of several racing writers wins.

        Raises FileExistsError: the name is taken; what has it is untouched.
        """
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Writes under a name, in place of what had it."""
        ...

    def writer(self, name: str) -> AbstractContextManager[Writable]:
        """`replace`, piece by piece: published when the block ends, never on an exception."""
        ...

    def write(self, name: str, data: Any) -> None:
        """As `replace`, but durable only after `sync`: for many pieces that count together."""
        ...

    def sync(self, names: Iterable[str]) -> None:
        """Makes durable what `write` wrote under these names."""
        ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` (None: the last), or as many as there are; a negative `begin` counts from the end.

        Raises FileNotFoundError, and ValueError when the name is of something that holds no bytes.
        """
        ...

    def size(self, name: str) -> int:
        """How many bytes there are. Raises as `read` does."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """The names of a folder and of those below it, ascending; without those of writers at work."""
        ...

    def folders(self, folder: str = "") -> list[str]:
        """The names of the folders directly in a folder, ascending."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Removes names durably; those that are not there, too, are gone afterwards."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Removes a folder with all that is in it, durably; nothing when there is none. "" is all of the storage."""
        ...

    def sweep(self, below: bool = True) -> int:
        """Removes what killed writers left, and makes durable what they published. Returns how many were removed.

        `below`: in all folders; else at the top. Only while nobody writes.
        """
        ...

    def hold(self, name: str) -> Hold:
        """Holds a name, making it when it is not there. Raises BlockingIOError when another process holds it."""
        ...

    def is_held(self, name: str) -> bool:
        """Whether a process holds the name."""
        ...

    def below(self, folder: str) -> Storage:
        """The names of a folder, as a storage."""
        ...

    def at(self, name: str = "") -> str:
        """A name as messages give it, place included."""
        ...


Place: TypeAlias = "Storage | str | os.PathLike[str]"


def open_storage(place: Place) -> Storage:
    """The storage at a directory; a storage is itself."""
    return Disk(place) if isinstance(place, str | os.PathLike) else place
