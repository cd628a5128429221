"""Opens the places that stores keep their bytes in, by their address: a directory, or a bucket.

`stores/backend.py` says what a place can do; `stores/disk.py` is its files, `stores/memory.py` serves tests. Another
kind of place is one more file like these, and a line in `open_storage`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from manifests.errors import InputError
from stores.backend import Appender, NameLock, Readable, Storage, Writable, matching
from stores.disk import Disk

__all__ = [
    "Appender", "NameLock", "Place", "Readable", "Storage", "Writable", "is_address", "matching", "on_this_machine",
    "open_file", "open_storage",
]  # fmt: skip

Place: TypeAlias = "Storage | str | os.PathLike[str]"
SCHEME_END = "://"


def is_address(place: str) -> bool:
    """Whether it names a place by scheme, as `s3://bucket/folder` does, and is no path."""
    return SCHEME_END in place


def open_storage(place: Place) -> Storage:
    """The storage at a directory; a storage is itself.

    Raises InputError: an address of a kind of place that is not known.
    """
    if isinstance(place, Storage):
        return place
    address = os.fspath(place)
    if address.startswith("s3://"):
        from stores.bucket import Bucket  # takes longer than all else that `status` needs

        return Bucket(address)
    if address.startswith("hub://"):
        from stores.hub import hub_at

        return hub_at(address)
    if is_address(address):
        raise InputError(f"{address}: no known kind of place; give a directory, or a bucket as s3://BUCKET/FOLDER")
    return Disk(place)


def open_file(file: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The place that a file is in, and its name there. Raises InputError as `open_storage` does."""
    folder, name = os.path.split(os.fspath(file))
    return open_storage(folder), name


def contains(outer: str, inner: str) -> bool:
    """Whether an address is another's, or of a folder that it is in."""
    return f"{inner}/".startswith(f"{outer.rstrip('/')}/")


@contextmanager
def on_this_machine(place: Place, choose: Callable[[Storage], Iterable[str]]) -> Iterator[str]:
    """A folder of this machine with the names that `choose` gives: itself, or a copy that goes with the block.

    For libraries that read files only. Raises StorageError.
    """
    storage = open_storage(place)
    if storage.folder is not None:
        yield storage.folder
        return
    with tempfile.TemporaryDirectory(prefix="lamina-") as folder:
        for name in choose(storage):
            Disk(folder).link_or_copy(name, storage, name)
        yield folder
