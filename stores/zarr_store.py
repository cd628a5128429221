"""Zarr's store interface on top of a storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.buffer.core import default_buffer_prototype

from stores.storage import Storage


class ZarrStore(Store):
    """Keys are the names of `storage`. A key that was set is durable only after `storage.sync`.

    Errors of the storage pass unchanged; a missing key is None, as Zarr expects.
    """

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(self, storage: Storage, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self.storage = storage

    def with_read_only(self, read_only: bool = False) -> ZarrStore:
        return ZarrStore(self.storage, read_only=read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrStore) and other.storage == self.storage

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        begin, end = _range(byte_range)
        try:
            data = await asyncio.to_thread(self.storage.read, key, begin, end)
        except FileNotFoundError:
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self.storage.has, key)

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        await asyncio.to_thread(self.storage.write, key, value.as_buffer_like())

    async def delete(self, key: str) -> None:
        self._check_writable()
        await asyncio.to_thread(self.storage.delete, [key])

    async def list(self) -> AsyncIterator[str]:
        for name in await asyncio.to_thread(self.storage.names):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for name in self.list():
            if name.startswith(prefix):
                yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await asyncio.to_thread(self.storage.children, prefix.rstrip("/")):
            yield name


def _range(byte_range: ByteRequest | None) -> tuple[int, int | None]:
    match byte_range:
        case RangeByteRequest(start, end):
            return start, end
        case OffsetByteRequest(offset):
            return offset, None
        case SuffixByteRequest(suffix):
            return -suffix, None
    return 0, None
