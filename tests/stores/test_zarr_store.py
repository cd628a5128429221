"""Zarr's keys are the names of a storage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer.core import default_buffer_prototype

from stores.zarr_store import ZarrStore
from tests.memory_storage import Memory


@pytest.fixture
def store() -> ZarrStore:
    storage = Memory()
    storage.write("a/zarr.json", b"0123456789")
    storage.write("a/c.0", b"chunk")
    return ZarrStore(storage)


def content(store: ZarrStore, key: str, part: Any = None) -> bytes | None:
    buffer = asyncio.run(store.get(key, None, part))
    return None if buffer is None else buffer.to_bytes()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (None, b"0123456789"),
        (RangeByteRequest(2, 5), b"234"),
        (OffsetByteRequest(7), b"789"),
        (SuffixByteRequest(3), b"789"),
    ],
)
def test_ranges(part: Any, expected: bytes, store: ZarrStore) -> None:
    assert content(store, "a/zarr.json", part) == expected


def test_a_missing_key_is_none(store: ZarrStore) -> None:
    assert content(store, "a/c.1") is None
    values = store.get_partial_values(default_buffer_prototype(), [("a/c.0", RangeByteRequest(0, 2)), ("b", None)])
    first, second = asyncio.run(values)
    assert first is not None
    assert (first.to_bytes(), second) == (b"ch", None)


def test_listings(store: ZarrStore) -> None:
    async def listed(keys: Any) -> list[str]:
        return sorted([key async for key in keys])

    assert asyncio.run(listed(store.list())) == ["a/c.0", "a/zarr.json"]
    assert asyncio.run(listed(store.list_prefix("a/c"))) == ["a/c.0"]
    assert asyncio.run(listed(store.list_dir("a/"))) == ["c.0", "zarr.json"]


def test_a_read_only_store_refuses_to_write(store: ZarrStore) -> None:
    locked = store.with_read_only(True)
    with pytest.raises(ValueError, match="read-only"):
        asyncio.run(locked.delete("a/c.0"))
    asyncio.run(store.delete("a/c.0"))
    assert not asyncio.run(store.exists("a/c.0"))
