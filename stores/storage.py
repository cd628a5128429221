"""Opens storages by their address: a directory, a bucket, or a model on the hub.

`stores/backend.py` defines the protocol; `stores/disk.py`, `stores/bucket.py` and `stores/hub.py` implement it. A new
kind of storage is one more such file and a line in `open_storage`; another service of buckets is a line in
`stores/bucket_client.py`.
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
    """True for an address with a scheme, such as `s3://bucket/folder`; False for a path."""
    return SCHEME_END in place


def open_storage(place: Place) -> Storage:
    """Return the storage at an address, or `place` itself if it is a storage.

    Raises InputError on an unknown scheme.
    """
    if isinstance(place, Storage):
        return place
    address = os.fspath(place)
    scheme, has_scheme, _ = address.partition(SCHEME_END)
    if not has_scheme:
        return Disk(place)
    if scheme == "hub":
        from stores.hub import hub_at

        return hub_at(address)
    from stores.bucket import Bucket  # imported late: slower than everything else `status` needs
    from stores.bucket_client import SERVICES

    if scheme not in SERVICES:
        raise InputError(f"{address}: unknown kind of storage; give a directory, or a bucket as s3://BUCKET/FOLDER")
    return Bucket(address)


def open_file(file: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage that holds a file, and its name there. Raises the InputErrors of `open_storage`."""
    folder, name = os.path.split(os.fspath(file))
    return open_storage(folder), name


def contains(outer: str, inner: str) -> bool:
    """True if two addresses are equal, or `inner` is below `outer`."""
    return f"{inner}/".startswith(f"{outer.rstrip('/')}/")


@contextmanager
def on_this_machine(place: Place, choose: Callable[[Storage], Iterable[str]]) -> Iterator[str]:
    """Yield a directory of this machine with the names that `choose` returns, for libraries that read files only.

    A disk yields its own directory, other storages a temporary copy. Raises StorageError.
    """
    storage = open_storage(place)
    if storage.folder is not None:
        yield storage.folder
        return
    with tempfile.TemporaryDirectory(prefix="lamina-") as folder:
        for name in choose(storage):
            Disk(folder).link_or_copy(name, storage, name)
        yield folder
