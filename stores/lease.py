"""Leases: names held where no kernel sees who holds them, by objects that owners renew. docs/formats.md#buckets."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import psutil

from manifests.errors import StorageError

LEASE_S = 60.0
RENEW_S = 5.0


class Conditional(Protocol):
    """A place that writes a lease only where it is as it was. A tag changes with what is written."""

    def read_lease(self, name: str) -> tuple[Mapping[str, Any], str] | None:
        """What stands in a lease (nothing: no lease of ours), and its tag; None when there is none."""
        ...

    def write_lease(self, name: str, content: Mapping[str, Any], before: str | None) -> str | None:
        """Writes it if its tag is `before` (None: if there is none); the new tag, or None. Raises StorageError."""
        ...

    def at(self, name: str) -> str:
        """A name as messages give it."""
        ...


def take_lease(place: Conditional, name: str) -> Lease:
    """Holds a name. Raises BlockingIOError when another process does."""
    found = place.read_lease(name)
    if found is not None and not _is_free(place, name, *found):
        raise BlockingIOError(errno.EAGAIN, "held", place.at(name))
    return Lease(place, name, found)


def _is_free(place: Conditional, name: str, content: Mapping[str, Any], tag: str) -> bool:
    """Whether a lease was given up, or its owner is dead: gone from this machine, or silent for the lease's time.

    No two clocks are compared: who lives renews the lease, and its tag changes.
    """
    if content.get("released") or is_gone(content):
        return True
    deadline = time.monotonic() + LEASE_S
    while time.monotonic() < deadline:
        time.sleep(min(RENEW_S / 2, LEASE_S))
        now = place.read_lease(name)
        if now is None or now[1] != tag:
            return False
    return True


class Lease:
    """See `stores.backend.NameLock`: an object that its owner, a thread of this process, renews until it is released.

    `generation` grows with each owner: what was done under an older one is of an owner that is dead or should be.
    """

    across_hosts = True

    def __init__(self, place: Conditional, name: str, before: tuple[Mapping[str, Any], str] | None) -> None:
        self.generation = (int(before[0].get("generation", 0)) if before else 0) + 1
        self._place = place
        self._name = name
        self._content = {"version": 1, "generation": self.generation, "token": uuid.uuid4().hex, **this_process()}
        self._tag = before[1] if before else None
        self._renewals = 0
        self._renewed_at = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if not self._renew():
            raise BlockingIOError(errno.EAGAIN, "another was first", place.at(name))
        threading.Thread(target=self._keep_renewing, name=f"lease {name}", daemon=True).start()

    def is_ours(self) -> bool:
        """Renews it, which shows it. Raises StorageError when the bucket does not answer and it may still be ours."""
        return not self._ended.is_set() and self._renew()

    def fence(self) -> int | None:
        is_fresh = time.monotonic() - self._renewed_at < LEASE_S / 2
        return self.generation if (is_fresh and not self._ended.is_set()) or self.is_ours() else None

    def release(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            with suppress(StorageError):  # it runs out
                self._renew(released=True)

    def _renew(self, released: bool = False) -> bool:
        with self._lock:
            self._renewals += 1
            content = {**self._content, "renewals": self._renewals, "released": released}
            asked_at = time.monotonic()
            try:
                tag = self._place.write_lease(self._name, content, self._tag)
            except StorageError:
                if time.monotonic() - self._renewed_at < LEASE_S:
                    raise
                tag = None  # it ran out, and another may have it
            if tag is None:
                self._ended.set()
                return False
            self._tag, self._renewed_at = tag, asked_at
            return True

    def _keep_renewing(self) -> None:
        while not self._ended.wait(RENEW_S):
            with suppress(StorageError):
                self._renew()


def this_process() -> dict[str, Any]:
    """What tells on the same machine, and only there, whether this process still lives."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = uuid.uuid4().hex
    return {"machine": machine, "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a lease is seen to have ended."""
    if owner.get("machine") != this_process()["machine"]:
        return False
    try:
        return bool(psutil.Process(int(owner["pid"])).create_time() != owner["started"])
    except (psutil.NoSuchProcess, ValueError):
        return True
