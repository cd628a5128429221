"""A cache of object ranges on a node's disk: its workers, and the passes of a job, fetch each range once.

Each range is a file, named by a digest of its key, with a checksum at its end. One process fetches while others that
need a range of the same object wait. The least recently used range is evicted first.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from manifests.errors import StorageError
from stores.backend import Readable
from stores.durable import partial_path, read_into

CHECKSUM_BYTES = 4
RANGE_SUFFIX = ".range"
ROOM = "room"

logger = logging.getLogger(__name__)


class NodeCache:
    """A cache of at most `limit_bytes`, in a folder that all processes of this user on this node share."""

    def __init__(self, limit_bytes: int, folder: Path | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.folder = folder or Path(tempfile.gettempdir()) / f"lamina-cache-{os.getuid()}"
        self._warned = False

    def over(self, file: Readable, name: str) -> Readable:
        """Wrap a file in the cache. `name` identifies the bytes: it differs between versions of one object."""
        return _Cached(file, self, name)

    def load(self, key: str, view: memoryview) -> bool:
        """Fill `view` from the cache; return False if the range is missing or damaged."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                whole = read_into(file, view) == len(view) and file.read() == _checksum(view)
            if whole:
                os.utime(path)
            return whole
        except FileNotFoundError:
            return False
        except OSError as error:
            self.warn_once(error)
            return False

    def store(self, key: str, view: memoryview) -> None:
        """Store a range if it fits. A failing disk is logged once and costs nothing but the cache."""
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
            self.warn_once(error)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Admit one process at a time. There are 256 locks, shared by the names' digests.

        Raises StorageError if the folder belongs to another user, who could forge its content.
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

    def warn_once(self, error: OSError) -> None:
        """Log an error of this node's disk, unless one was logged before."""
        if not self._warned:
            logger.warning("cache %s: %s; missing ranges are fetched again", self.folder, error)
        self._warned = True


class _Cached(Readable):
    """A file whose ranges are read through the cache."""

    def __init__(self, file: Readable, cache: NodeCache, name: str) -> None:
        self.size = file.size
        self._file = file
        self._cache = cache
        self._name = name

    def read(self, begin: int, end: int) -> bytes:
        return self._file.read(begin, end)

    def read_spans(self, spans: Sequence[tuple[int, memoryview]]) -> list[int]:
        counts = {begin: len(view) for begin, view in spans}
        with ExitStack() as stack:
            try:
                stack.enter_context(self._cache.locked(self._name))
            except OSError as error:
                self._cache.warn_once(error)
                return self._file.read_spans(spans)
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
