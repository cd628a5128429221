"""A bucket as a storage: the suite of all storages, conditions, leases, stores on it; the server is on loopback."""

from __future__ import annotations

import json
import pickle
import time
from contextlib import suppress

import pytest
import torch

from manifests.errors import InputError, InUseError, StorageError
from stores import bucket as bucket_module
from stores.activations import ActivationStore
from stores.bucket import Bucket
from stores.ledger import Ledger
from stores.lock import RunLock, read_lock
from stores.storage import Storage, open_storage
from tests.stores.test_storage import StorageConformance


@pytest.fixture
def bucket(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty folder of a bucket; leases are short."""
    monkeypatch.setattr(bucket_module, "LEASE_S", 2.0)
    monkeypatch.setattr(bucket_module, "RENEW_S", 0.2)
    return Bucket(f"{s3_bucket}/folder")


class TestBucket(StorageConformance):
    @pytest.fixture
    def storage(self, bucket: Bucket) -> Storage:
        return bucket


def test_addresses() -> None:
    storage = open_storage("s3://some-bucket/a/b/")
    assert storage.at("c") == "s3://some-bucket/a/b/c"
    assert open_storage("s3://some-bucket").at("c") == "s3://some-bucket/c"
    assert storage.address == "s3://some-bucket/a/b"
    assert pickle.loads(pickle.dumps(storage)) == storage == open_storage("s3://some-bucket/a").below("b")
    assert b"secret" not in pickle.dumps(storage)
    for wrong in (
        "s3://",
        "s3://b",
        "s3://bucket//a",
        "s3://bucket/a?b",
        "s3:/bucket",
        "gs://bucket/a",
        "s3://Bucket/a",
    ):
        with pytest.raises(InputError, match=r"give a directory|no address of a bucket"):
            open_storage(wrong if "://" in wrong else "x://")


def test_large_objects_go_in_parts_and_come_in_ranges(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(bucket_module, "RANGE_BYTES", 2**20)
    data = torch.randint(256, (11 * 2**20 + 3,), dtype=torch.uint8)
    with bucket.writer("large") as file:
        for piece in data.split(3 * 2**20):
            file.write(piece.numpy().data)
    bucket.write("again", data.numpy().data)
    for name in ("large", "again"):
        assert "-" in str(bucket.stamp(name)["e_tag"]), "no upload in parts"
        found = torch.empty_like(data)
        with bucket.reader(name) as reader:
            assert reader.size == len(data)
            assert reader.read_into(0, found.numpy().data) == len(data)
            assert torch.equal(found, data)
            assert reader.read_into(len(data) - 5, found.numpy().data) == 5
            assert reader.sha256() == reader.sha256(0, len(data))


def test_an_upload_that_is_left_is_no_object(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * 2**20)
    with suppress(KeyError), bucket.writer("half") as file:
        file.write(bytes(11 * 2**20))
        raise KeyError
    assert bucket.names() == []


def test_what_is_replaced_while_it_is_read(bucket: Bucket) -> None:
    bucket.replace("a", b"one")
    with bucket.reader("a") as reader:
        assert reader.read(0, 2) == b"on"
        bucket.replace("a", b"two")
        with pytest.raises(StorageError, match="folder/a: it was replaced while it was read"):
            reader.read(0, 2)


def test_copies_within_a_bucket_and_from_elsewhere(bucket: Bucket, tmp_path: object) -> None:
    bucket.replace("a", b"data")
    bucket.take("b", bucket, "a")
    bucket.below("c").copy("a", bucket, "a")
    assert (bucket.read("b"), bucket.read("c/a")) == (b"data", b"data")
    disk = open_storage(str(tmp_path))
    disk.take("a", bucket, "b")
    bucket.take("d", disk, "a")
    assert bucket.read("d") == b"data"


def test_a_bucket_is_tried_before_it_is_used(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.prepare(["ledger"])
    assert bucket.names() == []
    assert bucket.fault() is None
    missing = Bucket("s3://no-such-bucket/a")
    assert missing.fault() == (
        "not to be listed: 404 Not Found: NoSuchBucket: The specified bucket does not exist; check the bucket's name"
    )
    with pytest.raises(StorageError, match=r"writing s3://no-such-bucket/a/\..*: NoSuchBucket: .*; check the bucket's"):
        missing.prepare()
    real = Bucket._put
    monkeypatch.setattr(Bucket, "_put", lambda self, name, data, **_: real(self, name, data))  # conditions are dropped
    with pytest.raises(StorageError, match="does not keep the conditions If-None-Match and If-Match"):
        bucket.prepare()


def test_a_silent_owner_is_succeeded(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is taken with a higher generation, and it sees that when it comes back."""
    monkeypatch.setattr(bucket_module, "_is_gone", lambda _: False)  # of a machine elsewhere
    monkeypatch.setattr(bucket_module, "RENEW_S", 3600.0)
    first = bucket.hold("lock")
    monkeypatch.setattr(bucket_module, "RENEW_S", 0.2)
    started = time.monotonic()
    second = bucket.hold("lock")
    assert time.monotonic() - started >= 2.0
    assert second.generation == first.generation + 1
    assert not first.is_ours()
    first.release()
    assert second.is_ours()
    second.release()
    assert bucket.hold("lock").generation == second.generation + 1


def test_an_owner_that_is_gone_from_this_machine_is_succeeded_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "LEASE_S", 3600.0)
    dead = {**bucket_module._this_process(), "pid": 2**22 + 1, "generation": 7, "token": "dead"}
    bucket.replace("lock", json.dumps(dead).encode())
    assert not bucket.is_held("lock")
    held = bucket.hold("lock")
    assert held.generation == 8
    bucket.replace("lock", b"no lease")
    assert not held.is_ours()


def test_lock_and_ledger(bucket: Bucket) -> None:
    with RunLock(bucket) as lock:
        lock.beat({"layer": 3})
        with pytest.raises(InUseError, match=r"folder/lock: held by host"):
            RunLock(bucket).acquire()
        owner = read_lock(bucket)
        assert owner is not None
        assert (owner["alive"], owner["progress"]) == (True, {"layer": 3})
        bucket.delete(["lock"])
        with pytest.raises(InUseError, match="the lock was lost"):
            lock.check()
    ledger = Ledger(bucket.below("ledger"))
    ledger.commit("layer/00000", {"a": 1})
    ledger.commit("layer/00000", {"a": 2})
    assert Ledger(bucket.below("ledger")).get("layer/00000") == {"a": 2}
    assert bucket.names("ledger") == ["ledger/layer.00000.000002.json"]


def test_activations(bucket: Bucket) -> None:
    store = ActivationStore(bucket)
    hidden = torch.randn(3, 4, 5)
    record = store.write("dense", 1, 0, hidden, micro_batch=2)
    assert torch.equal(store.open(record).read(1, 3), hidden[1:3])
    store.drop(record)
    assert not [name for name in bucket.names() if "/c." in name]


def test_a_log_grows(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    log = bucket.appender("log")
    log.write("one\n")
    log.close()
    log.write("two\n")
    log.close()
    assert bucket.read("log") == b"one\ntwo\n"
