"""Ranges of objects on a node's own disk, up to a size: workers of one node, and passes of one job, fetch each once.

One file for each range, by a digest of what it is of, with a checksum at its end. One process fetches while the others
that want a range of the same object wait. What was not asked for the longest goes first.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from manifests.errors import StorageError
from stores.backend import Readable
from stores.durable import partial_path

CHECKSUM_BYTES = 4
RANGE_SUFFIX = ".range"
ROOM = "room"

logger = logging.getLogger(__name__)


class NodeCache:
    """At most `limit_bytes` of ranges in a folder that all processes of this user on this node share."""

    def __init__(self, limit_bytes: int, folder: Path | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.folder = folder or Path(tempfile.gettempdir()) / f"lamina-cache-{os.getuid()}"
        self._said = False

    def over(self, file: Readable, name: str) -> Readable:
        """The same bytes, through the cache. `name` tells them from all others, those of the same place at another time
        included."""
        return _Cached(file, self, name)

    def load(self, key: str, view: memoryview) -> bool:
        """Fills `view`, and returns whether the range is there, whole."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                done = 0
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
                whole = done == len(view) and file.read() == _checksum(view)
            if whole:
                os.utime(path)
            return whole
        except FileNotFoundError:
            return False
        except OSError as error:
            self._say(error)
            return False

    def store(self, key: str, view: memoryview) -> None:
        """Keeps a range, if it fits; a disk that fails is said, once, and costs no more than the cache."""
        path, needed = self._path(key), len(view) + CHECKSUM_BYTES
        if needed > self.limit_bytes:
            return
        temporary = partial_path(path)
        try:
            with self.locked(ROOM):
                self._make_room(needed)
                with open(temporary, "wb") as file:
                    file.write(view)
                    file.write(_checksum(view))
                os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._say(error)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """One process at a time. Locks are few: names share them by their digest.

        Raises StorageError where the folder is another user's, who could put other numbers there.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise StorageError(f"{self.folder} is another user's; set TMPDIR, or workers.cache_gb: 0")
        lock = name if name == ROOM else hashlib.sha256(name.encode()).hexdigest()[:2]
        descriptor = os.open(self.folder / f"{lock}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, needed: int) -> None:
        entries = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(RANGE_SUFFIX):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if used + needed <= self.limit_bytes:
                return
            os.unlink(path)
            used -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}{RANGE_SUFFIX}"

    def _say(self, error: OSError) -> None:
        if not self._said:
            logger.warning("cache %s: %s; what it lacks is fetched again", self.folder, error)
        self._said = True


class _Cached(Readable):
    """See `NodeCache.over`."""

    def __init__(self, file: Readable, cache: NodeCache, name: str) -> None:
        self.size = file.size
        self._file = file
        self._cache = cache
        self._name = name

    def read(self, begin: int, end: int) -> bytes:
        return self._file.read(begin, end)

    def read_spans(self, spans: Sequence[tuple[int, memoryview]]) -> list[int]:
        counts = {begin: len(view) for begin, view in spans}
        with self._cache.locked(self._name):
            missing = [(begin, view) for begin, view in spans if not self._cache.load(self._key(begin, view), view)]
            for (begin, view), count in zip(missing, self._file.read_spans(missing), strict=True):
                counts[begin] = count
                if count == len(view):
                    self._cache.store(self._key(begin, view), view)
        return [counts[begin] for begin, _ in spans]

    def _key(self, begin: int, view: memoryview) -> str:
        return f"{self._name} {begin} {len(view)}"


def _checksum(view: memoryview) -> bytes:
    return zlib.crc32(view).to_bytes(CHECKSUM_BYTES, "little")
