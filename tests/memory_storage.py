"""Storage in memory, for tests."""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from stores.backend import NameLock, Storage


class Memory(Storage):
    """Bytes by name, shared with the storages that `below` returns. Safe for threads."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._written: dict[str, float] = {}
        self._locks: dict[str, object] = {}
        self._lock = threading.RLock()
        self._prefix = ""

    def put_if_absent(self, name: str, data: bytes) -> None:
        with self._lock:
            if self._prefix + name in self._files:
                raise FileExistsError(errno.EEXIST, "already there", self.at(name))
            self.write(name, data)

    @contextmanager
    def writer(self, name: str) -> Iterator[io.BytesIO]:
        file = io.BytesIO()
        yield file
        self.write(name, file.getvalue())

    def write(self, name: str, data: Any) -> None:
        with self._lock:
            self._files[self._prefix + name] = bytes(data)
            self._written[self._prefix + name] = time.time()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        data = self._file(name)
        return data[max(0, len(data) + begin) if begin < 0 else begin : end]

    def stamp(self, name: str) -> dict[str, int | str]:
        data = self._file(name)
        return {"size": len(data), "written": str(self._written[self._prefix + name])}

    def modified_times(self, folder: str = "") -> dict[str, float]:
        start = self._prefix + (f"{folder}/" if folder else "")
        with self._lock:
            inside = sorted(name for name in self._files if name.startswith(start))
            return {name.removeprefix(self._prefix): self._written[name] for name in inside}

    def delete(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._files.pop(self._prefix + name, None)

    def hold(self, name: str) -> MemoryLock:
        with self._lock:
            if self.is_held(name):
                raise BlockingIOError(errno.EAGAIN, "held", self.at(name))
            if self._prefix + name not in self._files:
                self.write(name, b"")
            lock = MemoryLock(self._files, self._locks, self._prefix + name)
            self._locks[self._prefix + name] = lock
            return lock

    def is_held(self, name: str) -> bool:
        lock = self._locks.get(self._prefix + name)
        return isinstance(lock, MemoryLock) and lock.is_ours()

    def below(self, folder: str) -> Memory:
        inside = Memory()
        inside._files, inside._locks, inside._lock = self._files, self._locks, self._lock
        inside._written = self._written
        inside._prefix = f"{self._prefix}{folder}/"
        return inside

    def at(self, name: str = "") -> str:
        return f"memory:{self._prefix}{name}"

    def _file(self, name: str) -> bytes:
        with self._lock:
            if self._prefix + name not in self._files:
                raise FileNotFoundError(errno.ENOENT, "no such name", self.at(name))
            return self._files[self._prefix + name]


class MemoryLock(NameLock):
    """An entry in the table of locks; removing the name removes its lock."""

    def __init__(self, files: dict[str, bytes], locks: dict[str, object], name: str) -> None:
        self._files = files
        self._locks = locks
        self._name = name

    def is_ours(self) -> bool:
        return self._locks.get(self._name) is self and self._name in self._files

    def release(self) -> None:
        if self._locks.get(self._name) is self:
            del self._locks[self._name]
