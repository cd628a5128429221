"""Makes disks fail: an error, a short write or a delay at the nth operation of a process on files in some folders."""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROWING = ("open", "write", "mkdir", "link")  # operations that a full disk or a quota refuses
CHANGES = {  # name in `os` -> (kind, position of the path)
    "mkdir": ("mkdir", 0),
    "link": ("link", 1),
    "replace": ("replace", 1),
    "rename": ("replace", 1),
    "unlink": ("remove", 0),
    "remove": ("remove", 0),
    "rmdir": ("remove", 0),
}
SLOW_S = 0.005


@dataclass
class Fault:
    """A fault of a disk. It also counts operations, so that a fault that never occurs counts those of a job.

    Attributes:
        code: errno to raise; None: nothing fails.
        nth: the first operation that fails (from 1); 0: none.
        lasting: every later operation that such a disk refuses fails as well.
        match: the fault concerns only paths that contain this.
        short: writes take one byte at a time.
        slow: every operation waits a little.
    """

    folders: tuple[Path, ...]
    code: int | None = None
    nth: int = 0
    lasting: bool = True
    match: str = ""
    short: bool = False
    slow: bool = False
    seen: int = 0
    struck: list[str] = field(default_factory=list)

    def meet(self, kind: str, path: Any) -> None:
        """Count an operation before it runs. Raise OSError if it should fail."""
        where = os.path.realpath(os.fsdecode(path)) if not isinstance(path, int) else _opened(path)
        if not where.startswith(tuple(map(str, self.folders))) or self.match not in where:
            return
        self.seen += 1
        if self.slow:
            time.sleep(SLOW_S)
        full = self.code in (errno.ENOSPC, errno.EDQUOT)
        due = self.seen == self.nth or (self.lasting and 0 < self.nth < self.seen and (not full or kind in GROWING))
        if due and self.code is not None and not (full and kind == "remove"):
            self.struck.append(f"{kind} {where}")
            raise OSError(self.code, os.strerror(self.code), where)


def _opened(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


class _File(io.FileIO):
    """An unbuffered file whose writes meet the fault."""

    fault: Fault

    def write(self, data: Any) -> int:
        self.fault.meet("write", self.fileno())
        return int(super().write(bytes(data)[:1] if self.fault.short and len(data) > 1 else data) or 0)


@contextmanager
def failing(fault: Fault) -> Iterator[Fault]:
    """Make files fail in this process until the block ends."""
    originals = [(os, name, getattr(os, name)) for name in (*CHANGES, "fsync", "open")]
    originals += [(builtins, "open", builtins.open), (io, "open", io.open)]
    real_open = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, *rest: Any,
               **options: Any) -> Any:  # fmt: skip
        plain = not isinstance(file, int) and rest in ((), (None,)) and not options and set(mode) & set("wxa")
        if not plain:
            return real_open(file, mode, buffering, encoding, errors, *rest, **options)
        fault.meet("open", file)
        raw = _File(file, mode.replace("b", "").replace("t", ""))
        raw.fault = fault
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors)

    def changing(name: str, real: Any) -> Any:
        kind, position = CHANGES[name]

        def change(*arguments: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None:
                fault.meet(kind, arguments[position])
            return real(*arguments, **options)

        return change

    def fsync(descriptor: Any) -> None:
        fault.meet("fsync", descriptor if isinstance(descriptor, int) else descriptor.fileno())

    def os_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and options.get("dir_fd") is None:
            fault.meet("open", path)
        return real_os_open(path, flags, *arguments, **options)

    real_os_open = os.open
    for name in CHANGES:
        setattr(os, name, changing(name, getattr(os, name)))
    os.fsync, os.open = fsync, os_open  # type: ignore[assignment]
    builtins.open = io.open = opened
    try:
        yield fault
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def flip(path: Path) -> None:
    """Damage a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def no_hard_links(*_: object) -> None:
    """Stand in for `os.link` on a filesystem without hard links."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
