"""The stores on a storage that is no disk: nothing of theirs is a file by another way than the protocol."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from manifests.errors import CorruptError
from stores.activations import ActivationStore
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.statistics import StatisticsStore
from tests.memory_storage import Memory
from tests.stores.held_locks import check_held_lock


def test_ledger() -> None:
    storage = Memory()
    ledger = Ledger(storage)
    ledger.commit("unit/00000", {"a": 1})
    ledger.commit("unit/00000", {"a": 2})
    ledger.commit("unit/00001", {})
    ledger.retract("unit/00001")
    assert Ledger(storage).get("unit/00000") == {"a": 2}
    assert ledger.keys() == ["unit/00000"]
    ledger.sweep()
    assert storage.names() == ["unit.00000.000002.json"]
    storage.replace("unit.00000.000003.json", storage.read("unit.00000.000002.json"))
    assert Ledger(storage).get("unit/00000") == {"a": 2}, "an entry under another's name does not count"
    ledger.clear()
    assert storage.names() == []


def test_lock() -> None:
    storage = Memory()
    with RunLock(storage) as lock:
        check_held_lock(storage, lock, "memory:lock")
    with RunLock(storage, ".lock", temporary=True):
        pass
    assert storage.names() == ["lock.json"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics(dtype: torch.dtype) -> None:
    storage = Memory()
    store = StatisticsStore(storage, tile=4)
    half = torch.randn(2, 10, 10).to(dtype)
    moment = half + half.mT
    record = store.write(3, "in", moment)
    assert torch.equal(StatisticsStore(storage, tile=4).read(record), moment)
    other = store.write(3, "in", half)
    assert store.sweep([record]) == 1
    assert torch.equal(store.read(record), moment)
    with pytest.raises(CorruptError, match=r"memory:layer-00003/in/.*/zarr.json: stored data is damaged: missing"):
        store.read(other)


def test_activations() -> None:
    storage = Memory()
    store = ActivationStore(storage)
    hidden = torch.randn(3, 4, 5)
    record = store.write("dense", 1, 0, hidden, micro_batch=2)
    assert torch.equal(store.open(record).read(1, 3), hidden[1:3])
    store.drop(record)
    assert not [name for name in storage.names() if "/c." in name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:2],
        lambda data: b"",
    ],
)
def test_damage_is_found(damage: Callable[[bytes], bytes]) -> None:
    storage = Memory()
    store = ActivationStore(storage)
    record = store.write("dense", 1, 0, torch.randn(3, 4, 5))
    chunk = next(name for name in storage.names() if name.endswith("c.1.0.0"))
    storage.replace(chunk, damage(storage.read(chunk)))
    assert store.open(record).read(0, 1).shape == (1, 4, 5)
    with pytest.raises(CorruptError, match="stored data is damaged") as caught:
        store.open(record).read(0, 3)
    assert caught.value.path == record.path


def test_a_writer_that_is_left_leaves_nothing() -> None:
    storage = Memory()
    with ActivationStore(storage).writer("dense", 1, 0, (3, 4, 5), torch.float32) as writer:
        writer.append(torch.ones(1, 4, 5))
    assert [name.rpartition("/")[2] for name in storage.names()] == ["zarr.json"] * 4
