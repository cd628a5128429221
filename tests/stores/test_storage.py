"""One conformance suite for all storages, subclassed by each."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from manifests.errors import InputError
from stores.disk import Disk
from stores.durable import partial_path
from stores.storage import Storage, open_storage
from tests.memory_storage import Memory

KilledAnywhere = Callable[..., int]


class StorageConformance:
    """A subclass gives `storage`, empty."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        raise NotImplementedError

    def test_replace_and_read(self, storage: Storage) -> None:
        storage.replace("a/b", b"one")
        storage.replace("a/b", b"three")
        assert storage.read("a/b") == b"three"
        assert storage.size("a/b") == 5
        assert storage.names() == ["a/b"]

    @pytest.mark.parametrize(
        ("begin", "end", "expected"),
        [
            (0, None, b"012345"),
            (2, 4, b"23"),
            (4, 99, b"45"),
            (9, None, b""),
            (-2, None, b"45"),
            (-9, 2, b"01"),
            (3, 3, b""),
            (4, 2, b""),
        ],
    )
    def test_ranges(self, storage: Storage, begin: int, end: int | None, expected: bytes) -> None:
        storage.replace("a", b"012345")
        assert storage.read("a", begin, end) == expected

    @pytest.mark.parametrize(("begin", "end"), [(0, None), (1, 2**20 + 1), (2**21, 2**22), (7, 7), (2**22, None)])
    def test_digests_of_ranges(self, storage: Storage, begin: int, end: int | None) -> None:
        data = bytes(range(251)) * 10_000
        storage.replace("a", data)
        with storage.reader("a") as reader:
            assert reader.sha256(begin, end) == hashlib.sha256(data[begin:end]).hexdigest()

    def test_what_is_not_there(self, storage: Storage) -> None:
        storage.replace("folder/a", b"")
        for name in ("b", "folder/b", "nowhere/b", "folder/a/b"):
            with pytest.raises(FileNotFoundError):
                storage.read(name)
            with pytest.raises(FileNotFoundError):
                storage.size(name)
        storage.delete(["b", "nowhere/b"])
        storage.delete_folder("nowhere")
        assert storage.names("nowhere") == storage.folders("nowhere") == []
        assert storage.names() == ["folder/a"]

    def test_the_first_of_a_name_wins(self, storage: Storage) -> None:
        storage.put_if_absent("a/b", b"one")
        with pytest.raises(FileExistsError):
            storage.put_if_absent("a/b", b"two")
        assert storage.read("a/b") == b"one"
        storage.delete(["a/b"])
        storage.put_if_absent("a/b", b"two")
        assert storage.read("a/b") == b"two"

    def test_of_racing_writers_one_wins(self, storage: Storage) -> None:
        won: list[int] = []
        barrier = threading.Barrier(8)

        def race(number: int) -> None:
            barrier.wait()
            try:
                storage.put_if_absent("a", bytes([number]) * 1000)
            except FileExistsError:
                return
            won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read("a") == bytes(won) * 1000
        assert storage.names() == ["a"]

    def test_a_writer_publishes_at_its_end(self, storage: Storage) -> None:
        storage.replace("a", b"old")
        with storage.writer("a") as file:
            file.write(b"ne")
            assert (storage.read("a"), storage.names()) == (b"old", ["a"])
            file.write(memoryview(b"w"))
        assert storage.read("a") == b"new"
        for name in ("a", "b"):
            with suppress(KeyError), storage.writer(name) as file:
                file.write(b"half")
                raise KeyError
        assert (storage.read("a"), storage.names()) == (b"new", ["a"])

    def test_write_and_sync(self, storage: Storage) -> None:
        for name in ("a/1", "a/2", "b"):
            storage.write(name, memoryview(name.encode()))
        storage.sync(["a/1", "a/2", "b"])
        assert [storage.read(name) for name in storage.names()] == [b"a/1", b"a/2", b"b"]

    def test_lists(self, storage: Storage) -> None:
        for name in ("b", "a/2", "a/1/x", "a-b/c", "a/1/y"):
            storage.replace(name, b"")
        assert storage.names() == ["a-b/c", "a/1/x", "a/1/y", "a/2", "b"]
        assert storage.names("a") == ["a/1/x", "a/1/y", "a/2"]
        assert storage.folders() == ["a", "a-b"]
        assert storage.folders("a") == ["1"]

    def test_delete(self, storage: Storage) -> None:
        for name in ("a/1", "a/2/x", "a/2/y", "b"):
            storage.replace(name, b"")
        storage.delete_folder("a/2")
        assert storage.names() == ["a/1", "b"]
        assert storage.folders("a") == []
        storage.delete(["a/1", "b"])
        assert storage.names() == []

    def test_below(self, storage: Storage) -> None:
        inside = storage.below("a").below("b")
        inside.replace("c", b"1")
        storage.replace("a/bc", b"")
        assert storage.read("a/b/c") == b"1"
        assert inside.names() == ["c"]
        assert inside.at("c") == storage.at("a/b/c")
        inside.delete_folder("c")
        assert inside.names() == ["c"]

    def test_a_name_is_held_once(self, storage: Storage) -> None:
        assert not storage.is_held("lock")
        held = storage.hold("lock")
        assert held.is_ours()
        assert storage.is_held("lock")
        with pytest.raises(BlockingIOError):
            storage.hold("lock")
        held.release()
        assert not storage.is_held("lock")
        storage.hold("lock").release()

    def test_who_held_a_name_that_was_removed_has_lost_it(self, storage: Storage) -> None:
        held = storage.hold("a/lock")
        storage.delete(["a/lock"])
        assert not held.is_ours()
        second = storage.hold("a/lock")
        assert second.is_ours()
        assert not held.is_ours()
        held.release()
        assert second.is_ours()
        with pytest.raises(BlockingIOError):
            storage.hold("a/lock")
        second.release()


class TestDisk(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return Disk(tmp_path / "root")

    def test_plain_files(self, tmp_path: Path) -> None:
        storage = open_storage(tmp_path)
        storage.replace("a/b", b"1")
        assert (tmp_path / "a" / "b").read_bytes() == b"1"
        assert storage.at("a/b") == str(tmp_path / "a" / "b")
        assert pickle.loads(pickle.dumps(storage)) == storage == open_storage(str(tmp_path))

    def test_what_holds_no_bytes(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        os.mkfifo(tmp_path / "pipe")
        for name, words in {"folder": "a directory", "pipe": "not a regular", "link": "a link to nothing"}.items():
            with pytest.raises(ValueError, match=words):
                Disk(tmp_path).read(name)

    def test_sweep(self, tmp_path: Path) -> None:
        storage = Disk(tmp_path)
        storage.replace("a/b", b"")
        strays = [partial_path(tmp_path / "c"), partial_path(tmp_path / "a" / "b")]
        for path in strays:
            path.write_bytes(b"half")
        assert storage.names() == ["a/b"]
        assert storage.sweep(below=False) == 1
        assert [path.exists() for path in strays] == [False, True]
        assert storage.sweep() == 1
        assert Disk(tmp_path / "nowhere").sweep() == 0

    def test_killed_anywhere_it_is_old_or_new(self, killed_anywhere: KilledAnywhere) -> None:
        def act(directory: Path) -> None:
            storage = Disk(directory)
            storage.put_if_absent("a/b", b"one")
            storage.replace("a/b", b"two")
            with storage.writer("a/b") as file:
                file.write(b"three")
            storage.write("c", b"four")
            storage.sync(["c"])
            storage.delete(["a/b"])
            storage.delete_folder("a")

        seen = []

        def check(directory: Path) -> None:
            storage = Disk(directory)
            seen.append({name: storage.read(name) for name in storage.names()})
            storage.sweep()
            assert {name: storage.read(name) for name in storage.names()} == seen[-1]

        assert killed_anywhere(act, check) >= 15
        states: list[dict[str, bytes]] = []
        for state in seen:
            if not states or states[-1] != state:
                states.append(state)
        three = {"a/b": b"three", "c": b"four"}
        assert states == [{}, {"a/b": b"one"}, {"a/b": b"two"}, {"a/b": b"three"}, three, {"c": b"four"}]


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return Memory()


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    disk = Disk(tmp_path / "a" / "b")
    assert disk.address == str(tmp_path / "a" / "b")
    with pytest.raises(InputError, match="symbolic links there lead in a circle"):
        disk.prepare(("x",))
