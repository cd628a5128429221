"""The lock of a run directory: it admits one writer, and a note describes the owner. docs/formats.md#run_dir.

The name `lock` is locked until its owner ends. Only the owner may remove it; processes that wait notice and create a
new one. `lock.json` beside it holds {host, pid, started, heartbeat, released, command, progress, token}, times in Unix
seconds. Where other hosts do not see the lock, the heartbeat decides: an owner lives if its heartbeat is younger than
60 s, or is renewed while it is watched, whatever its clock says.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, Self

from manifests.errors import InUseError, StorageError
from stores.storage import NameLock, Place, Storage, open_storage

FRESH_S = 60.0
WATCH_S = 12.0  # an old heartbeat may come from a clock that is behind; a job beats four times in it
MAX_NOTE_BYTES = 16 * 1024 * 1024
PATIENCE_S = 0.3  # `read_lock` in another process may hold the lock for a moment
LOCK = "lock"

logger = logging.getLogger(__name__)


class RunLock:
    """The lock of a storage, held between `acquire` and `release`, or in a `with` block.

    `temporary`: `release` removes its files; otherwise they keep describing the last owner.
    """

    def __init__(self, place: Place, name: str = LOCK, temporary: bool = False) -> None:
        self.storage = open_storage(place)
        self.name = name
        self.temporary = temporary
        self._lock: NameLock | None = None
        self._owner: dict[str, Any] = {}
        self.previous_progress: Mapping[str, Any] = {}  # as the previous owner noted it last

    @property
    def token(self) -> str:
        """The unique token of this owner; set by `acquire`."""
        return str(self._owner["token"])

    @property
    def is_held(self) -> bool:
        """True between `acquire` and `release` of this process."""
        return self._lock is not None

    def acquire(self) -> None:
        """Acquire the lock, also from a dead owner.

        Raises:
            InUseError: a living owner has it; names its host, pid and age of the heartbeat.
            StorageError: the file cannot be created or locked.
        """
        if self._lock is not None:
            raise InUseError(f"{self._at}: this process holds the lock already")
        lock = self._wait()
        try:
            previous_progress = self._check_previous_owner(lock)
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
            lock.release()
            raise
        self._lock = lock
        self.previous_progress = previous_progress

    def beat(self, progress: Mapping[str, Any]) -> None:
        """Write a heartbeat and the progress. Call it at least every 5 s.

        Raises:
            InUseError: another process has the lock: stop writing.
            StorageError: the note cannot be written.
        """
        self.check()
        self._owner |= {"heartbeat": time.time(), "progress": dict(progress)}
        self._write_owner()

    def check(self) -> None:
        """Raise InUseError if the lock is lost: another process has it, or its filesystem is gone."""
        if not self._is_ours():
            raise InUseError(f"{self._at}: the lock was lost: {self._describe_owner()}; stopping")

    def fence(self) -> int:
        """Return `NameLock.fence`; 0 if the lock is not held. Raises InUseError if another process may have it."""
        fence = 0 if self._lock is None else self._lock.fence()
        if fence is None:
            raise InUseError(f"{self._at}: the lock was lost: {self._describe_owner()}; nothing more is committed")
        return fence

    def has_note(self) -> bool:
        """True if a present or former owner left its note."""
        return _read_owner(self.storage, self.name) is not None

    def release(self) -> None:
        """Release the lock if it is held. Never touches the note of another owner."""
        if self._lock is None:
            return
        try:
            if self._is_ours() and self.temporary:
                self.storage.delete([_note_name(self.name), self.name])
            elif self._is_ours():
                self._owner["released"] = time.time()
                self._write_owner()
        except StorageError as error:  # the kernel's lock ends all the same; only other hosts wait for the heartbeat
            logger.warning("could not note that the lock is released: %s", error)
        finally:
            self._lock.release()
            self._lock = None

    @property
    def _at(self) -> str:
        return self.storage.at(self.name)

    def _wait(self) -> NameLock:
        """Lock the name. Raises InUseError if another process keeps it locked."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.storage.hold(self.name)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InUseError(f"{self._at}: {self._describe_owner()}; wait for it, or stop it first") from None
                time.sleep(PATIENCE_S / 10)

    def _describe_owner(self) -> str:
        owner = _read_owner(self.storage, self.name)
        if self._lock is not None and owner is not None and owner.get("token") == self.token:
            return "it was removed, or taken by a process that has left no note yet"
        return _describe(owner)

    def _check_previous_owner(self, lock: NameLock) -> Mapping[str, Any]:
        """Return the progress that the previous owner noted last; logs that it died.

        Raises InUseError if it may still live on another host.
        """
        owner = _read_owner(self.storage, self.name)
        noted = owner.get("progress") if owner else None
        progress = noted if isinstance(noted, dict) else {}
        if owner is None or owner.get("released"):
            return progress
        if not lock.across_hosts and (_lives_elsewhere(owner) or self._beats_elsewhere(owner)):
            raise InUseError(
                f"{self._at}: {_describe(owner)}; this host cannot see whether it lives: if it does not, try again "
                f"when the heartbeat is older than {FRESH_S:.0f} s"
            )
        logger.warning("taking over the lock %s: %s; it is dead", self._at, _describe(owner))
        return progress

    def _beats_elsewhere(self, owner: Mapping[str, Any]) -> bool:
        """True if an owner on another host renews its note within WATCH_S."""
        if owner.get("host") == socket.gethostname():
            return False
        logger.warning("%s: %s; watching for %.0f s whether it lives", self._at, _describe(owner), WATCH_S)
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(WATCH_S / 20)
            now = _read_owner(self.storage, self.name)
            if now is None or now.get("released"):
                return False
            if now["heartbeat"] != owner["heartbeat"]:
                return True
        return False

    def _is_ours(self) -> bool:
        if self._lock is None or not self._lock.is_ours():
            return False
        owner = _read_owner(self.storage, self.name)
        return owner is not None and owner.get("token") == self._owner["token"]

    def _write_owner(self) -> None:
        self.storage.replace(_note_name(self.name), json.dumps(self._owner).encode())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def read_lock(place: Place) -> dict[str, Any] | None:
    """Return the last owner's note plus `alive` (bool) and `heartbeat_age_s`; None if there never was one.

    Raises StorageError.
    """
    storage = open_storage(place)
    owner = _read_owner(storage, LOCK)
    if owner is None:
        return None
    age_s = max(0.0, time.time() - float(owner["heartbeat"]))  # another host's clock may be ahead of ours
    alive = storage.is_held(LOCK) or _lives_elsewhere(owner)
    return {**owner, "alive": alive, "heartbeat_age_s": age_s}


def _lives_elsewhere(owner: Mapping[str, Any]) -> bool:
    foreign = owner.get("host") != socket.gethostname() and not owner.get("released")
    return foreign and abs(time.time() - float(owner["heartbeat"])) < FRESH_S


def _note_name(name: str) -> str:
    return f"{name}.json"


def _read_owner(storage: Storage, name: str) -> dict[str, Any] | None:
    try:
        owner = json.loads(storage.read(_note_name(name), end=MAX_NOTE_BYTES))
        heartbeat = float(owner["heartbeat"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # never owned, or lost in a power cut: then the lock alone decides
    return {**owner, "heartbeat": heartbeat} if isinstance(owner, dict) and math.isfinite(heartbeat) else None


def _describe(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "held by a process that left no note"
    age_s = max(0.0, time.time() - float(owner["heartbeat"]))
    return (
        f"held by host {owner.get('host')}, pid {owner.get('pid')} ({owner.get('command')}), "
        f"heartbeat {age_s:.0f} s ago"
    )
