"""Reads documents from .txt, .jsonl, .json and .parquet files, whole or a part of each file.

A .txt file is one document, read whole; a part of it begins and ends after a line break. The other kinds hold one
document in each line, item or row; a part has the documents that begin in it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

from manifests.calibration import Text
from manifests.errors import InputError, reason
from stores.backend import PIECE_BYTES
from stores.storage import Readable, Storage, open_file
from stores.text_rows import DEFAULT_FIELD, Document, Row, SkippedRows, documents_of, missing_field

BYTE_ORDER_MARK = "\ufeff"


class Part(NamedTuple):
    """The part of a file between two shares of its length."""

    begin: float
    end: float

    def has(self, position: int, length: int) -> bool:
        """True if a document that begins at `position` of `length` is in this part."""
        return self.begin <= position / length < self.end


def file_documents(text: Text, skipped: SkippedRows | None = None) -> Iterator[Document]:
    """Yield the documents of `text.files` between `text.begin` and `text.end` of each file, in order.

    `skipped`: gets the number of rows without text, as in `documents_of`.

    Raises:
        InputError: a file is missing, of an unknown kind, not UTF-8, has no text in this part, or lacks the field.
        StorageError: a file cannot be read.
    """
    part = Part(text.begin, text.end)
    where = "" if part == (0.0, 1.0) else f" between {part.begin:g} and {part.end:g} of its length"
    for name in text.files or ():
        storage, file_name = open_file(name)
        _check_exists(name, storage, file_name)
        suffix = os.path.splitext(name)[1]
        reader = READERS.get(suffix.lower())
        if reader is None:
            raise InputError(f"text file {name}: unknown kind {suffix!r}; known are {', '.join(READERS)}")
        has_text, field = False, None if reader is _read_txt else text.field
        with storage.reader(file_name) as file:
            for document in documents_of(reader(name, file, field, part), f"text file {name}{where}", field, skipped):
                has_text = has_text or bool(document.text.strip())
                yield document
        if not has_text:
            raise InputError(f"text file {name}: empty{where}")


def _check_exists(path: str, storage: Storage, name: str) -> None:
    try:
        storage.size(name)
    except FileNotFoundError as error:
        hint = storage.fault() or "relative paths are relative to the working directory"
        raise InputError(f"text file {path}: missing; {hint}") from error
    except ValueError as error:
        raise InputError(f"text file {path}: {error}; give files of text") from error


def _read_txt(path: str, file: Readable, _field: str | None, part: Part) -> Iterator[Row]:
    text = _decode(path, file.read(0, file.size)).replace("\r\n", "\n").replace("\r", "\n")
    yield Row("", text[_line_end(text, part.begin) : _line_end(text, part.end)])


def _line_end(text: str, share: float) -> int:
    """Return the position after the first line break at or after this share of a text; without one, the share's."""
    position = round(share * len(text))
    return position if position in (0, len(text)) else text.find("\n", position) + 1 or position


def _read_jsonl(path: str, file: Readable, _field: str | None, part: Part) -> Iterator[Row]:
    offset = 0
    for number, line in enumerate(io.BufferedReader(_Stream(file), PIECE_BYTES), start=1):
        where = f"line {number}"
        text = _decode(path, line, offset)
        begin, offset = offset, offset + len(line)
        if text.strip() and part.has(begin, file.size):
            yield Row(where, _parse(path, where, text))


def _read_json(path: str, file: Readable, _field: str | None, part: Part) -> Iterator[Row]:
    content = _parse(path, "the file", _decode(path, file.read(0, file.size)))
    if not isinstance(content, list):
        raise InputError(f"text file {path}: a JSON {type(content).__name__}, expected a list of strings or objects")
    for number, item in enumerate(content):
        if part.has(number, len(content)):
            yield Row(f"item {number}", item)


def _read_parquet(path: str, source: Readable, field: str | None, part: Part) -> Iterator[Row]:
    import pyarrow.parquet

    column = field or DEFAULT_FIELD
    try:
        with pyarrow.parquet.ParquetFile(_Stream(source)) as file:
            if column not in file.schema_arrow.names:
                first = next(file.iter_batches(batch_size=1), None)
                fields = first.to_pylist()[0] if first else dict.fromkeys(file.schema_arrow.names)
                raise missing_field(f"text file {path}", column, fields)
            rows = count()
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value, number in zip(batch.column(0), rows, strict=False):
                    if part.has(number, file.metadata.num_rows):
                        yield Row(f"row {number}", {column: _python_value(path, number, value)})
    except InputError:
        raise
    except (pyarrow.ArrowException, ValueError, OSError) as error:  # pyarrow raises OSError for a damaged page
        raise InputError(f"text file {path}: not Parquet, or damaged: {reason(error)}") from error


def _python_value(path: str, row: int, value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {path}, row {row}: not UTF-8 at byte {error.start} ({error.reason}); convert it to UTF-8"
        ) from error


class _Stream(io.RawIOBase):
    """A Python file object over a Readable."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._file.size - self._position)]
        count = self._file.read_into(self._position, view)
        self._position += count
        return count


def _decode(path: str, data: bytes, offset: int = 0) -> str:
    """Decode UTF-8 bytes that begin at `offset` of a file; drops a byte order mark."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {path}: not UTF-8 at byte {offset + error.start} ({error.reason}); convert it to UTF-8"
        ) from error
    return text if offset else text.removeprefix(BYTE_ORDER_MARK)


def _parse(path: str, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"text file {path}: {where} is not JSON: {error}") from error


READERS: dict[str, Callable[[str, Readable, str | None, Part], Iterator[Row]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
