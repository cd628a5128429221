"""Storage in memory, for tests: gone with the process. See `stores.storage.Storage`."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Memory:
    """Bytes by name. `below` shares them; threads may use one together."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._held: dict[str, object] = {}
        self._lock = threading.RLock()
        self._prefix = ""

    def put_if_absent(self, name: str, data: bytes) -> None:
        with self._lock:
            if self._prefix + name in self._files:
                raise FileExistsError(errno.EEXIST, "already there", self.at(name))
            self.write(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self.write(name, data)

    @contextmanager
    def writer(self, name: str) -> Iterator[io.BytesIO]:
        file = io.BytesIO()
        yield file
        self.write(name, file.getvalue())

    def write(self, name: str, data: Any) -> None:
        with self._lock:
            self._files[self._prefix + name] = bytes(data)

    def sync(self, names: Iterable[str]) -> None:
        for name in names:
            self.size(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        data = self._file(name)
        return data[max(0, len(data) + begin) if begin < 0 else begin : end]

    def size(self, name: str) -> int:
        return len(self._file(name))

    def names(self, folder: str = "") -> list[str]:
        start = self._prefix + (f"{folder}/" if folder else "")
        with self._lock:
            return sorted(name.removeprefix(self._prefix) for name in self._files if name.startswith(start))

    def folders(self, folder: str = "") -> list[str]:
        start = f"{folder}/" if folder else ""
        inside = (name.removeprefix(start) for name in self.names(folder))
        return sorted({name.partition("/")[0] for name in inside if "/" in name})

    def delete(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._files.pop(self._prefix + name, None)

    def delete_folder(self, folder: str) -> None:
        with self._lock:
            self.delete(self.names(folder))

    def sweep(self, below: bool = True) -> int:
        return 0

    def hold(self, name: str) -> MemoryLock:
        with self._lock:
            if self.is_held(name):
                raise BlockingIOError(errno.EAGAIN, "held", self.at(name))
            self._files.setdefault(self._prefix + name, b"")
            lock = MemoryLock(self._files, self._held, self._prefix + name)
            self._held[self._prefix + name] = lock
            return lock

    def is_held(self, name: str) -> bool:
        lock = self._held.get(self._prefix + name)
        return isinstance(lock, MemoryLock) and lock.is_ours()

    def below(self, folder: str) -> Memory:
        inside = Memory()
        inside._files, inside._held, inside._lock = self._files, self._held, self._lock
        inside._prefix = f"{self._prefix}{folder}/"
        return inside

    def at(self, name: str = "") -> str:
        return f"memory:{self._prefix}{name}"

    def _file(self, name: str) -> bytes:
        with self._lock:
            if self._prefix + name not in self._files:
                raise FileNotFoundError(errno.ENOENT, "no such name", self.at(name))
            return self._files[self._prefix + name]


class MemoryLock:
    """See `stores.storage.Hold`. A name that was removed is nobody's."""

    def __init__(self, files: dict[str, bytes], held: dict[str, object], name: str) -> None:
        self._files = files
        self._held = held
        self._name = name

    def is_ours(self) -> bool:
        return self._held.get(self._name) is self and self._name in self._files

    def release(self) -> None:
        if self._held.get(self._name) is self:
            del self._held[self._name]
