"""A node's cache of object ranges: damage, room, and disks that fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from manifests.errors import StorageError
from stores.backend import Readable
from stores.node_cache import NodeCache

DATA = bytes(range(256))


class Counted(Readable):
    """An object of 256 bytes, and how many of them were fetched."""

    size = len(DATA)

    def __init__(self) -> None:
        self.fetched = 0

    def read(self, begin: int, end: int) -> bytes:
        self.fetched += end - begin
        return DATA[begin:end]


def read(cache: NodeCache, spans: Sequence[tuple[int, int]], name: str = "object v1") -> int:
    """Reads spans (begin, length) through the cache. Returns the number of bytes that were fetched."""
    file = Counted()
    views = [(begin, memoryview(bytearray(length))) for begin, length in spans]
    assert cache.over(file, name).read_spans(views) == [length for _, length in spans]
    assert all(view == DATA[begin : begin + len(view)] for begin, view in views)
    return file.fetched


def test_each_range_of_a_version_is_fetched_once(tmp_path: Path) -> None:
    cache = NodeCache(1000, tmp_path)
    assert read(cache, [(0, 10), (50, 20)]) == 30
    assert read(NodeCache(1000, tmp_path), [(0, 10), (20, 5), (50, 20)]) == 5
    assert read(cache, [(0, 10)], "object v2") == 10


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: bytes(len(data))])
def test_a_damaged_range_is_fetched_again(tmp_path: Path, damage: object) -> None:
    cache = NodeCache(1000, tmp_path)
    read(cache, [(0, 10)])
    (path,) = tmp_path.glob("*.range")
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert read(cache, [(0, 10)]) == 10
    assert read(cache, [(0, 10)]) == 0


def test_the_range_that_was_read_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = NodeCache(3 * (10 + 4), tmp_path)
    for number, begin in enumerate((0, 10, 20)):
        read(cache, [(begin, 10)])
        newest = max(tmp_path.glob("*.range"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    assert read(cache, [(0, 10)]) == 0
    assert read(cache, [(30, 10)]) == 10
    assert read(cache, [(0, 10), (20, 10), (30, 10)]) == 0
    assert read(cache, [(10, 10)]) == 10
    assert read(cache, [(100, 100)]) == read(cache, [(100, 100)]) == 100, "a range that is larger than the cache"


def test_without_a_usable_folder_everything_is_fetched(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").touch()
    cache = NodeCache(1000, tmp_path / "file" / "folder")
    assert read(cache, [(0, 10), (50, 20)]) == read(cache, [(0, 10), (50, 20)]) == 30
    assert len(said) == 1


def test_the_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StorageError, match="another user's"):
        read(NodeCache(1000, tmp_path), [(0, 10)])
