"""Checks of the lock of a run directory that hold for every kind of storage."""

from __future__ import annotations

import pytest

from manifests.errors import InUseError
from stores.backend import Storage
from stores.lock import RunLock, read_lock


def check_held_lock(storage: Storage, lock: RunLock, address: str) -> None:
    """Check that a held lock shows its owner's progress, keeps others out, and notices that it is deleted."""
    lock.beat({"unit": 3})
    with pytest.raises(InUseError, match=f"{address}: held by host"):
        RunLock(storage).acquire()
    owner = read_lock(storage)
    assert owner is not None
    assert (owner["alive"], owner["progress"]) == (True, {"unit": 3})
    storage.delete(["lock"])
    with pytest.raises(InUseError, match="the lock was lost"):
        lock.check()
