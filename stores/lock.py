"""One writer per directory: a kernel lock that dies with its owner, and a note saying who that is. DESIGN §3.

`lock` is flocked, and removed, if at all, by the one who holds it (whoever waited sees that and makes another);
`lock.json` beside it holds {host, pid, started, heartbeat, released, command, progress, token}, times in Unix seconds.
Where the filesystem does not share flock between hosts, the heartbeat decides: one younger than 60 s is a living owner.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from manifests.errors import InUseError, StorageError
from stores.durable import make_directory, read_whole, storage_errors, write_durably

FRESH_S = 60.0
MAX_NOTE_BYTES = 16 * 1024 * 1024
PATIENCE_S = 0.3  # read_lock of another process may hold the lock for a moment
NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

logger = logging.getLogger(__name__)


class RunLock:
    """The lock at `path`, held between `acquire` and `release`, or in a `with` block.

    `temporary`: releasing it removes its files; otherwise they go on saying who was last.
    """

    def __init__(self, path: str | Path, temporary: bool = False) -> None:
        self.path = Path(path)
        self.temporary = temporary
        self._descriptor: int | None = None
        self._owner: dict[str, Any] = {}

    @property
    def token(self) -> str:
        """Names this owner, once it holds the lock."""
        return str(self._owner["token"])

    def acquire(self) -> None:
        """Takes the lock, also from an owner that died.

        Raises:
            InUseError: a living owner has it: its host, pid and age of the heartbeat.
            StorageError: the file cannot be made or locked.
        """
        if self._descriptor is not None:
            raise InUseError(f"{self.path}: this process holds the lock already")
        make_directory(self.path.parent)
        descriptor = _flock(self.path)
        try:
            _check_elsewhere(self.path)
            now = time.time()
            self._owner = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": now,
                "heartbeat": now,
                "released": None,
                "command": " ".join(sys.argv),
                "progress": {},
                "token": uuid.uuid4().hex,
            }
            self._write_owner()
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def beat(self, progress: Mapping[str, Any]) -> None:
        """Says that the owner lives and how far it is. Call it at least every 20 s.

        Raises:
            InUseError: another has taken the lock meanwhile: stop writing.
            StorageError: the note cannot be written.
        """
        self.check()
        self._owner |= {"heartbeat": time.time(), "progress": dict(progress)}
        self._write_owner()

    def check(self) -> None:
        """Raises InUseError when the lock is no longer ours: another has it, or its filesystem went away."""
        if not self._is_ours():
            raise InUseError(f"{self.path}: the lock was lost: {_describe(_read_owner(self.path))}; stopping")

    def has_note(self) -> bool:
        """Whether an owner, now or once, left its note here."""
        return _read_owner(self.path) is not None

    def release(self) -> None:
        """Gives the lock up; nothing when it is not held. Touches nothing that another owner has written."""
        if self._descriptor is None:
            return
        try:
            if self._is_ours() and self.temporary:
                with storage_errors("removing", self.path):
                    _owner_path(self.path).unlink(missing_ok=True)
                    self.path.unlink(missing_ok=True)
            elif self._is_ours():
                self._owner["released"] = time.time()
                self._write_owner()
        except StorageError as error:  # the kernel's lock goes all the same; only other hosts wait out the heartbeat
            logger.warning("could not note that the lock is released: %s", error)
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_ours(self) -> bool:
        if self._descriptor is None or not _is_same_file(self._descriptor, self.path):
            return False
        owner = _read_owner(self.path)
        return owner is not None and owner.get("token") == self._owner["token"]

    def _write_owner(self) -> None:
        write_durably(_owner_path(self.path), json.dumps(self._owner).encode())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_lock(path: str | Path) -> dict[str, Any] | None:
    """The last owner's note plus `alive` (bool) and `heartbeat_age_s`; None when there never was one.

    Raises:
        StorageError: the files cannot be read.
    """
    path = Path(path)
    owner = _read_owner(path)
    if owner is None:
        return None
    age_s = time.time() - float(owner["heartbeat"])
    alive = _is_locked(path) or _lives_elsewhere(owner)
    return {**owner, "alive": alive, "heartbeat_age_s": age_s}


def _flock(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with storage_errors("opening the lock", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                return descriptor
            os.close(descriptor)  # somebody removed the file between open and flock: lock the new one
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise InUseError(f"{path}: {_describe(_read_owner(path))}; wait for it, or stop it first") from None
            time.sleep(PATIENCE_S / 10)
        except OSError as error:
            os.close(descriptor)
            hint = "; this filesystem has no locks: choose a directory on another" if error.errno in NO_FLOCK else ""
            raise StorageError(f"locking {path}: {error.strerror}{hint}") from error


def _check_elsewhere(path: Path) -> None:
    """With the kernel's lock in hand: refuses when an owner on another host may live, and says who died."""
    owner = _read_owner(path)
    if owner is None or owner.get("released"):
        return
    if _lives_elsewhere(owner):
        raise InUseError(
            f"{path}: {_describe(owner)}; this host cannot see whether it lives: if it does not, try again when "
            f"the heartbeat is older than {FRESH_S:.0f} s"
        )
    logger.warning("taking over the lock %s: %s and is dead", path, _describe(owner))


def _lives_elsewhere(owner: Mapping[str, Any]) -> bool:
    foreign = owner.get("host") != socket.gethostname() and not owner.get("released")
    return foreign and abs(time.time() - float(owner["heartbeat"])) < FRESH_S


def _is_locked(path: Path) -> bool:
    with storage_errors("reading the lock", path):
        if not path.exists():
            return False
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _owner_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(read_whole(_owner_path(path), MAX_NOTE_BYTES))
        heartbeat = float(owner["heartbeat"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # never owned, or lost in a power cut: then the kernel's lock alone decides
    return {**owner, "heartbeat": heartbeat} if isinstance(owner, dict) and math.isfinite(heartbeat) else None


def _describe(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "held by a process that left no note"
    age_s = time.time() - float(owner["heartbeat"])
    return (
        f"held by host {owner.get('host')}, pid {owner.get('pid')} ({owner.get('command')}), "
        f"heartbeat {age_s:.0f} s ago"
    )
