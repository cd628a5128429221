"""Reads compressed files of text forward: gzip by the standard library, Zstandard by Arrow."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from manifests.errors import InputError, reason
from stores.backend import PIECE_BYTES


class UnpackedFile:
    """The unpacked bytes of a compressed file, which are read forward from the first.

    `open_packed` opens the compressed bytes; errors name `path`.
    """

    def __init__(self, path: str, kind: str, open_packed: Callable[[], io.RawIOBase]) -> None:
        self._path, self._kind, self._open_packed = path, kind, open_packed

    @contextmanager
    def stream(self) -> Iterator[io.BufferedIOBase]:
        """Open the unpacked bytes. Inside, faults of the file raise InputError."""
        try:
            with UNPACKERS[self._kind](self._open_packed()) as stream:
                yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error, _ArrowError) as error:
            raise InputError(
                f"text file {self._path}: not {self._kind[1:]}, or cut off or damaged: {reason(error)}; fetch it again"
            ) from error

    @cached_property
    def size(self) -> int:
        """The number of unpacked bytes, counted by reading them all."""
        with self.stream() as stream:
            return sum(map(len, iter(lambda: stream.read(PIECE_BYTES), b"")))


class _ArrowError(Exception):
    """A fault of a file that Arrow reports as an OSError, as it also reports faults of the disk."""


class _Unpacked(io.RawIOBase):
    """The bytes of a Zstandard file."""

    def __init__(self, packed: io.RawIOBase) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except OSError as error:
            raise _ArrowError(str(error)) from error
        view[: len(data)] = data
        return len(data)


def _gunzip(packed: io.RawIOBase) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=io.BufferedReader(packed, PIECE_BYTES))


def _unzstd(packed: io.RawIOBase) -> io.BufferedIOBase:
    return io.BufferedReader(_Unpacked(packed), PIECE_BYTES)


UNPACKERS: dict[str, Callable[[io.RawIOBase], io.BufferedIOBase]] = {".gz": _gunzip, ".zst": _unzstd}
