"""One writer per place: a name held until its owner ends, and a note saying who that is. docs/formats.md#run_dir.

The name `lock` is held, and removed, if at all, by the one who holds it (whoever waited sees that and makes another);
`lock.json` beside it holds {host, pid, started, heartbeat, released, command, progress, token}, times in Unix seconds.
Where a hold is not seen by other hosts, the heartbeat decides: one younger than 60 s is a living owner, and so is one
that is renewed while it is watched, whatever its clock says.
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
from types import TracebackType
from typing import Any, Self

from manifests.errors import InUseError, StorageError
from stores.storage import NameLock, Place, Storage, open_storage

FRESH_S = 60.0
WATCH_S = 12.0  # an older heartbeat may be of a clock that is behind; four beats of a job's
MAX_NOTE_BYTES = 16 * 1024 * 1024
PATIENCE_S = 0.3  # read_lock of another process may hold the lock for a moment
LOCK = "lock"

logger = logging.getLogger(__name__)


class RunLock:
    """The lock of a place, held between `acquire` and `release`, or in a `with` block.

    `temporary`: releasing it removes its files; otherwise they go on saying who was last.
    """

    def __init__(self, place: Place, name: str = LOCK, temporary: bool = False) -> None:
        self.storage = open_storage(place)
        self.name = name
        self.temporary = temporary
        self._hold: NameLock | None = None
        self._owner: dict[str, Any] = {}
        self.previous_progress: Mapping[str, Any] = {}  # the progress that the owner before noted last

    @property
    def token(self) -> str:
        """Names this owner, once it holds the lock."""
        return str(self._owner["token"])

    @property
    def is_held(self) -> bool:
        """Whether this process took it and has not given it up."""
        return self._hold is not None

    def acquire(self) -> None:
        """Takes the lock, also from an owner that died.

        Raises:
            InUseError: a living owner has it: its host, pid and age of the heartbeat.
            StorageError: the file cannot be made or locked.
        """
        if self._hold is not None:
            raise InUseError(f"{self._at}: this process holds the lock already")
        hold = self._wait()
        try:
            before = self._check_before(hold)
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
            hold.release()
            raise
        self._hold = hold
        self.previous_progress = before

    def beat(self, progress: Mapping[str, Any]) -> None:
        """Says that the owner lives and how far it is. Call it at least every 5 s.

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
            owner = _describe(_read_owner(self.storage, self.name))
            raise InUseError(f"{self._at}: the lock was lost: {owner}; stopping")

    def fence(self) -> int:
        """See `NameLock.fence`; 0 where the lock is not held. Raises InUseError when another may have it."""
        found = 0 if self._hold is None else self._hold.fence()
        if found is None:
            owner = _describe(_read_owner(self.storage, self.name))
            raise InUseError(f"{self._at}: the lock was lost: {owner}; nothing more is committed")
        return found

    def has_note(self) -> bool:
        """Whether an owner, now or once, left its note here."""
        return _read_owner(self.storage, self.name) is not None

    def release(self) -> None:
        """Gives the lock up; nothing when it is not held. Touches nothing that another owner has written."""
        if self._hold is None:
            return
        try:
            if self._is_ours() and self.temporary:
                self.storage.delete([_note_name(self.name), self.name])
            elif self._is_ours():
                self._owner["released"] = time.time()
                self._write_owner()
        except StorageError as error:  # the kernel's lock goes all the same; only other hosts wait out the heartbeat
            logger.warning("could not note that the lock is released: %s", error)
        finally:
            self._hold.release()
            self._hold = None

    @property
    def _at(self) -> str:
        return self.storage.at(self.name)

    def _wait(self) -> NameLock:
        """The hold of the name. Raises InUseError when another keeps it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.storage.hold(self.name)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = _describe(_read_owner(self.storage, self.name))
                    raise InUseError(f"{self._at}: {owner}; wait for it, or stop it first") from None
                time.sleep(PATIENCE_S / 10)

    def _check_before(self, hold: NameLock) -> Mapping[str, Any]:
        """With the name in hand: says who died, and refuses where it may be an owner on another host that lives.
        Returns the progress that this owner noted last."""
        owner = _read_owner(self.storage, self.name)
        progress = owner.get("progress") if owner else None
        before = progress if isinstance(progress, dict) else {}
        if owner is None or owner.get("released"):
            return before
        if not hold.across_hosts and (_lives_elsewhere(owner) or self._beats_elsewhere(owner)):
            raise InUseError(
                f"{self._at}: {_describe(owner)}; this host cannot see whether it lives: if it does not, try again "
                f"when the heartbeat is older than {FRESH_S:.0f} s"
            )
        logger.warning("taking over the lock %s: %s and is dead", self._at, _describe(owner))
        return before

    def _beats_elsewhere(self, owner: Mapping[str, Any]) -> bool:
        """Whether an owner on another host renews its note while we watch it."""
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
        if self._hold is None or not self._hold.is_ours():
            return False
        owner = _read_owner(self.storage, self.name)
        return owner is not None and owner.get("token") == self._owner["token"]

    def _write_owner(self) -> None:
        self.storage.replace(_note_name(self.name), json.dumps(self._owner).encode())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_lock(place: Place, name: str = LOCK) -> dict[str, Any] | None:
    """The last owner's note plus `alive` (bool) and `heartbeat_age_s`; None when there never was one.

    Raises:
        StorageError: the files cannot be read.
    """
    storage = open_storage(place)
    owner = _read_owner(storage, name)
    if owner is None:
        return None
    age_s = max(0.0, time.time() - float(owner["heartbeat"]))  # another host's clock may be ahead of ours
    alive = storage.is_held(name) or _lives_elsewhere(owner)
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
        return None  # never owned, or lost in a power cut: then the hold alone decides
    return {**owner, "heartbeat": heartbeat} if isinstance(owner, dict) and math.isfinite(heartbeat) else None


def _describe(owner: Mapping[str, Any] | None) -> str:
    if owner is None:
        return "held by a process that left no note"
    age_s = max(0.0, time.time() - float(owner["heartbeat"]))
    return (
        f"held by host {owner.get('host')}, pid {owner.get('pid')} ({owner.get('command')}), "
        f"heartbeat {age_s:.0f} s ago"
    )
