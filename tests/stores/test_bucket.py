"""A bucket as a storage: the suite of all storages, conditions, leases, stores on it; the server is on loopback."""

from __future__ import annotations

import json
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from manifests.errors import InputError, InUseError, StorageError
from manifests.records import LedgerKey
from stores import bucket as bucket_module
from stores import bucket_client, lease
from stores.activations import ActivationStore
from stores.bucket import Bucket
from stores.checkpoint import write_shard
from stores.checkpoint_files import read_tensors
from stores.headers import FIRST_BYTES, read_header
from stores.ledger import Ledger
from stores.lock import RunLock
from stores.run_directory import RunDirectory
from stores.source import open_source
from stores.storage import Storage, open_storage
from tests import buckets
from tests.faults import Proxy
from tests.stores.held_locks import check_held_lock
from tests.stores.test_storage import StorageConformance


@pytest.fixture
def bucket(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty folder of a bucket; leases are short."""
    monkeypatch.setattr(lease, "LEASE_S", 2.0)
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
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
        with pytest.raises(InputError, match=r"give a directory|not a bucket address"):
            open_storage(wrong if "://" in wrong else "x://")


@pytest.mark.slow
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
    bucket.link_or_copy("b", bucket, "a")
    bucket.below("c").copy("a", bucket, "a")
    assert (bucket.read("b"), bucket.read("c/a")) == (b"data", b"data")
    disk = open_storage(str(tmp_path))
    disk.link_or_copy("a", bucket, "b")
    bucket.link_or_copy("d", disk, "a")
    assert bucket.read("d") == b"data"


def test_a_bucket_is_tried_before_it_is_used(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.prepare(["ledger"])
    assert bucket.names() == []
    assert bucket.fault() is None
    missing = Bucket("s3://no-such-bucket/a")
    assert missing.fault() == (
        "cannot be listed: 404 Not Found: NoSuchBucket: The specified bucket does not exist; check the bucket's name"
    )
    with pytest.raises(StorageError, match=r"writing s3://no-such-bucket/a/\..*: NoSuchBucket: .*; check the bucket's"):
        missing.prepare()
    real = Bucket._put
    monkeypatch.setattr(Bucket, "_put", lambda self, name, data, **_: real(self, name, data))  # conditions are dropped
    with pytest.raises(StorageError, match="ignores the conditions If-None-Match or If-Match"):
        bucket.prepare()


@pytest.mark.slow
def test_a_silent_owner_is_succeeded(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is taken with a higher generation, and it sees that when it comes back."""
    monkeypatch.setattr(lease, "is_gone", lambda _: False)  # of a machine elsewhere
    monkeypatch.setattr(lease, "RENEW_S", 3600.0)
    first = bucket.hold("lock")
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
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
    monkeypatch.setattr(lease, "LEASE_S", 3600.0)
    dead = {**lease.this_process(), "pid": 2**22 + 1, "generation": 7, "token": "dead"}
    bucket.replace("lock", json.dumps(dead).encode())
    assert not bucket.is_held("lock")
    held = bucket.hold("lock")
    assert held.generation == 8
    bucket.replace("lock", b"no lease")
    assert not held.is_ours()


@pytest.mark.slow
def test_lock_and_ledger(bucket: Bucket) -> None:
    with RunLock(bucket) as lock:
        check_held_lock(bucket, lock, "folder/lock")
    ledger = Ledger(bucket.below("ledger"))
    ledger.commit("unit/00000", {"a": 1})
    ledger.commit("unit/00000", {"a": 2})
    assert Ledger(bucket.below("ledger")).get("unit/00000") == {"a": 2}
    assert bucket.names("ledger") == ["ledger/unit.00000.000002.json"]


def asked(proxy: Proxy) -> list[str]:
    """Return the methods of the requests since the last call, without those of leases."""
    methods = [method for method, path, _, _ in proxy.requests if "lock" not in path]
    proxy.requests.clear()
    return sorted(methods)


@pytest.mark.slow
def test_how_often_the_server_is_asked(s3_url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry and each chunk once; the owner of the lock lists the ledger where it commits."""
    proxy = Proxy(s3_url)
    with proxy.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        run = RunDirectory(Bucket(bucket.at()))
        with run.lock:
            for number in range(5):
                run.ledger.commit(LedgerKey(f"unit/{number}"), {"n": number})
            assert asked(proxy) == ["GET"] * 5 + ["PUT"] * 5
            assert run.ledger.get(LedgerKey("unit/3")) == {"n": 3}
            assert len(run.ledger.keys()) == 5
            assert asked(proxy) == []
        reader = RunDirectory(Bucket(bucket.at())).ledger
        assert len(reader.keys("unit/")) == 5
        assert asked(proxy) == ["GET"] * 6
        assert reader.get(LedgerKey("unit/4")) == {"n": 4}
        assert asked(proxy) == ["GET"]
        store = ActivationStore(Bucket(bucket.at("arrays")))
        store.write("dense", 0, 0, torch.randn(4, 2, 3), micro_batch=2)
        asked(proxy)
        record = store.write("dense", 0, 1, torch.randn(4, 2, 3), micro_batch=2)
        assert asked(proxy) == ["HEAD", "PUT", "PUT", "PUT", "PUT"], "a group's metadata, the array's, two chunks"
        store.open(record).read(0, 4)
        assert asked(proxy) == ["GET"] * 3
        store.sweep([])
        assert asked(proxy) == ["GET", "POST"]
        shard = Bucket(bucket.at())
        write_shard(shard, "shard.safetensors", {f"t{number}": torch.randn(3) for number in range(6)})
        records = read_header(shard, "shard.safetensors")
        asked(proxy)
        with shard.reader("shard.safetensors") as file:
            assert [*read_tensors(file, list(records.values()))] == list(records.values())
        assert asked(proxy) == ["GET", "HEAD"], "neighbours come together"


@pytest.mark.slow
def test_an_owner_that_was_succeeded_commits_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped (SIGSTOP, a laptop's lid) behind its last look at the lock, it comes back when another has it."""
    monkeypatch.setattr(lease, "is_gone", lambda _: False)
    monkeypatch.setattr(lease, "RENEW_S", 3600.0)
    old, new = RunDirectory(bucket), RunDirectory(bucket)
    old.lock.acquire()
    old.ledger.commit(LedgerKey("unit/a"), {"by": "old"})
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    new.lock.acquire()
    new.ledger.commit(LedgerKey("unit/a"), {"by": "new"})
    with pytest.raises(InUseError, match="the lock was lost"):
        old.ledger.commit(LedgerKey("unit/b"), {"by": "old"})
    monkeypatch.setattr(lease.Lease, "fence", lambda self: self.generation)  # it looked just before
    with pytest.raises(InUseError, match="the lock was lost"):
        old.ledger.commit(LedgerKey("unit/a"), {"by": "old"})
    old.ledger.commit(LedgerKey("unit/b"), {"by": "old"})
    new.ledger.commit(LedgerKey("unit/b"), {"by": "new"})
    assert [new.ledger.get(LedgerKey(f"unit/{name}")) for name in "ab"] == [{"by": "new"}] * 2
    assert bucket.below("ledger").names() == ["unit.a.2000001.json", "unit.b.2000001.json"]
    new.lock.release()


def test_a_lock_that_somebody_removed_begins_anew(bucket: Bucket) -> None:
    for _ in range(2):
        run = RunDirectory(bucket)
        with run.lock:
            run.ledger.commit(LedgerKey("unit/a"), {"n": 1})
    bucket.delete(["lock", "lock.json"])
    run = RunDirectory(bucket)
    with run.lock:
        run.ledger.commit(LedgerKey("unit/a"), {"n": 2})
    assert run.ledger.get(LedgerKey("unit/a")) == {"n": 2}


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


@pytest.fixture
def proxy(s3_url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Yield a proxy between the client and the server; waits are short."""
    quick = {"max_retries": 6, "retry_timeout": timedelta(seconds=20)}
    quick["backoff"] = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=50), "base": 2}
    monkeypatch.setattr(bucket_client, "RETRIES", quick)
    monkeypatch.setattr(bucket_client, "FEW_RETRIES", quick)
    monkeypatch.setattr(bucket_client, "CUT_WAITS_S", (0.01, 0.01))
    made = Proxy(s3_url)
    with made.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "503", "silent", "lost", "cut", "slow", "late"])
def test_every_request_fails_once(fault: str, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation takes effect once, and its repetition is not mistaken for another client's."""
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 * 2**20)
    seen: set[tuple[str, str]] = set()
    for patience in ("PATIENT_TIMEOUT", "HASTY_TIMEOUT") if fault == "late" else ():
        monkeypatch.setattr(bucket_client, patience, "1s")

    def once(method: str, path: str, nth: int) -> str | None:
        begins_parts = method == "POST" and path.endswith("uploads=")  # whose answer obstore alone hears
        if (method, path) in seen or (fault == "slow" and method != "GET") or (fault == "cut" and begins_parts):
            return None
        seen.add((method, path))
        return None if fault == "late" and len(seen) % 4 else fault  # a second each

    proxy.spoil = once
    bucket = Bucket(bucket.at())
    large = bytes(range(256)) * (11 * 2**12)
    bucket.put_if_absent("a", b"one")
    with pytest.raises(FileExistsError):
        bucket.put_if_absent("a", b"one")
    bucket.replace("b", b"two")
    with bucket.writer("large") as file:
        file.write(large)
    bucket.link_or_copy("copy", bucket, "large")
    with bucket.reader("copy") as reader:
        assert reader.read(0, reader.size) == large
    held = bucket.hold("lock")
    assert held.is_ours()
    with pytest.raises(BlockingIOError):
        bucket.hold("lock")
    held.release()
    assert (bucket.read("a"), bucket.read("b"), bucket.read("large", -4)) == (b"one", b"two", large[-4:])
    assert bucket.names() == ["a", "b", "copy", "large", "lock"]
    bucket.delete(["a", "lock"])
    assert bucket.files() == ["b", "copy", "large"]
    assert len(seen) >= (5 if fault == "slow" else 12)
    assert sum(request[2] is not None for request in proxy.requests) == len(seen) // (4 if fault == "late" else 1)


@pytest.mark.slow
def test_of_racing_writers_one_wins_though_answers_are_lost(bucket: Bucket, proxy: Proxy) -> None:
    """Equal content is no proof: each write knows its own."""
    proxy.spoil = lambda method, path, nth: "lost" if method == "PUT" and nth % 3 == 0 else None
    ledger, won = Bucket(bucket.at("ledger")), []

    def race() -> None:
        with suppress(FileExistsError):
            ledger.put_if_absent("a", b"same")
            won.append(1)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1]


@pytest.mark.slow
def test_a_server_that_fails_for_good_is_named_without_a_key(bucket: Bucket, proxy: Proxy) -> None:
    proxy.spoil = lambda method, path, nth: "503"
    with pytest.raises(StorageError) as caught:
        Bucket(bucket.at()).replace("a", b"")
    said = str(caught.value)
    assert said.startswith(f"writing {bucket.at('a')}: 503 Service Unavailable: SlowDown: Please reduce")
    assert said.endswith("check network and endpoint, then run the same command again")
    proxy.spoil = lambda method, path, nth: "silent"
    with pytest.raises(StorageError) as caught:
        Bucket(bucket.at()).read("a")
    for value in (said, str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)):
        assert buckets.ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in value


@pytest.mark.slow
def test_a_lease_outlives_short_failures_and_not_long_ones(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Bucket(bucket.at()).hold("lock")
    proxy.spoil = lambda method, path, nth: "503"
    with pytest.raises(StorageError, match="SlowDown"):
        held.is_ours()
    proxy.spoil = lambda method, path, nth: None
    assert held.is_ours()
    proxy.spoil = lambda method, path, nth: "503"
    time.sleep(2.5)
    assert not held.is_ours(), "another may have taken it"
    proxy.spoil = lambda method, path, nth: None
    assert not held.is_ours(), "and it does not come back"


@pytest.mark.slow
def test_a_tensor_costs_its_bytes(bucket: Bucket, proxy: Proxy) -> None:
    """And opening a model its headers: what lies beside a tensor in its file is not read."""
    model = Bucket(bucket.at("model"))
    model.replace("config.json", b"{}")
    tensors = {name: torch.randn(1024, 300) for name in "abc"}
    write_shard(model, "model.safetensors", tensors)
    asked = len(proxy.requests)
    source = open_source(model.at())
    opening = sum(size for method, _, _, size in proxy.requests[asked:] if method == "GET")
    assert opening < FIRST_BYTES + 10_000
    asked = len(proxy.requests)
    assert torch.equal(source.read(["b"])["b"], tensors["b"])
    gets = [size for method, path, _, size in proxy.requests[asked:] if method == "GET"]
    assert gets == [source.tensors["b"].num_bytes]


@pytest.mark.slow
def test_a_node_fetches_a_tensor_once(
    s3_url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever worker asks, as long as it fits and is whole and the object is the same."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = [f"t{number}" for number in range(4)]
    write_shard(bucket, "model.safetensors", {name: torch.randn(100) for name in names})
    bucket.replace("config.json", b"{}")
    expected = open_source(bucket.at()).read(names)
    proxy = Proxy(s3_url)

    def read(wanted: list[str], cache_bytes: int = 10_000) -> int:
        """Another worker reads. Gives the bytes that came."""
        source = replace(pickle.loads(sent), cache_bytes=cache_bytes)
        proxy.requests.clear()
        found = source.read(wanted)
        assert all(torch.equal(found[name], expected[name]) for name in wanted)
        return sum(count for method, _, _, count in proxy.requests if method == "GET")

    with proxy.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        sent = pickle.dumps(open_source(bucket.at()))
        assert read(names[:3]) == 1200
        assert read(names) == 400
        assert read(names) == 0
        (folder,) = tmp_path.iterdir()
        ranges = sorted(folder.glob("*.range"), key=lambda path: path.stat().st_mtime_ns)
        ranges[0].write_bytes(ranges[0].read_bytes()[:-5])
        ranges[1].write_bytes(bytes(404))
        assert read(names) == 800, "damaged ones come again"
        assert read(names[:1], cache_bytes=900) == 0
        assert read(["t0", "t1", "t2", "t3"], cache_bytes=900) <= 1600
        assert sum(path.stat().st_size for path in folder.glob("*.range")) <= 10_000
        read([names[0]], cache_bytes=100)
        for path in folder.glob("*.range"):
            path.unlink()
        read(names, cache_bytes=900)
        assert len(list(folder.glob("*.range"))) == 2, "the others had to go"
        tensors = {name: torch.randn(100) for name in names}
        write_shard(bucket, "model.safetensors", tensors)
        expected |= tensors
        assert read(names) == 1600, "of what was replaced nothing is given"
