"""Leases: locks for places without a kernel's lock, as objects that owners renew. docs/formats.md#buckets."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import psutil

from manifests.errors import StorageError
from stores.backend import NameLock

LEASE_S = 60.0
RENEW_S = 5.0


TaggedLease: TypeAlias = tuple[Mapping[str, Any], str]  # content, entity tag


class LeaseStore(Protocol):
    """A storage with conditional writes: each write changes the tag."""

    def read_lease(self, name: str) -> TaggedLease | None:
        """Return a lease's content (empty if it is not ours) and tag; None if it does not exist."""
        ...

    def write_lease(self, name: str, content: Mapping[str, Any], before: str | None) -> str | None:
        """Write if the tag is still `before` (None: no lease exists). Return the new tag, or None if it is not.

        Raises StorageError.
        """
        ...

    def at(self, name: str) -> str:
        """The full address of a name, for messages."""
        ...


def take_lease(store: LeaseStore, name: str) -> Lease:
    """Lock a name. Raises BlockingIOError when another process holds it."""
    current = store.read_lease(name)
    if current is not None and not _is_free(store, name, *current):
        raise BlockingIOError(errno.EAGAIN, "held", store.at(name))
    return Lease(store, name, current)


def _is_free(store: LeaseStore, name: str, content: Mapping[str, Any], tag: str) -> bool:
    """True if a lease was released, or its owner is dead: ended on this machine, or silent for LEASE_S.

    No two clocks are compared: a living owner renews the lease, which changes its tag.
    """
    if content.get("released") or is_gone(content):
        return True
    deadline = time.monotonic() + LEASE_S
    while time.monotonic() < deadline:
        time.sleep(min(RENEW_S / 2, LEASE_S))
        now = store.read_lease(name)
        if now is None or now[1] != tag:
            return False
    return True


class Lease(NameLock):
    """An object that a thread of this process renews until it is released.

    `generation` grows with each owner; writes under an older generation come from an owner that is dead or replaced.
    """

    def __init__(self, store: LeaseStore, name: str, before: TaggedLease | None) -> None:
        self.generation = (int(before[0].get("generation", 0)) if before else 0) + 1
        self._store = store
        self._name = name
        self._content = {"version": 1, "generation": self.generation, "token": uuid.uuid4().hex, **this_process()}
        self._tag = before[1] if before else None
        self._renewals = 0
        self._renewed_at = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if not self._renew():
            raise BlockingIOError(errno.EAGAIN, "another was first", store.at(name))
        threading.Thread(target=self._keep_renewing, name=f"lease {name}", daemon=True).start()

    def is_ours(self) -> bool:
        # Only the owner's renewal succeeds. It raises if the bucket does not answer and the lease may still be ours.
        return not self._ended.is_set() and self._renew()

    def fence(self) -> int | None:
        is_fresh = time.monotonic() - self._renewed_at < LEASE_S / 2
        return self.generation if (is_fresh and not self._ended.is_set()) or self.is_ours() else None

    def release(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            with suppress(StorageError):  # the lease expires anyway
                self._renew(released=True)

    def _renew(self, released: bool = False) -> bool:
        with self._lock:
            self._renewals += 1
            content = {**self._content, "renewals": self._renewals, "released": released}
            asked_at = time.monotonic()
            try:
                tag = self._store.write_lease(self._name, content, self._tag)
            except StorageError:
                if time.monotonic() - self._renewed_at < LEASE_S:
                    raise
                tag = None  # the lease expired: another process may own it
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
    """Identify this process, so that others of the same machine can see whether it still runs."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = uuid.uuid4().hex
    return {"machine": machine, "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """True if the process that wrote a lease ran on this machine and has ended."""
    if owner.get("machine") != this_process()["machine"]:
        return False
    try:
        return bool(psutil.Process(int(owner["pid"])).create_time() != owner["started"])
    except (psutil.NoSuchProcess, ValueError):
        return True
