"""Reads documents from .txt, .jsonl, .json and .parquet files, whole or a part of each file.

A .txt file is one document, read whole; a part of it begins and ends after a line break. The other kinds hold one
document in each line, item or row; a part has the documents that begin in it. All but .parquet may be compressed
(.jsonl.gz, .jsonl.zst), and are read forward then.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from manifests.calibration import Text
from manifests.errors import InputError, reason
from stores.backend import PIECE_BYTES
from stores.chats import ChatTemplate
from stores.compressed_text import UNPACKERS, UnpackedFile
from stores.storage import Readable, Storage, open_file
from stores.text_rows import (
    Document,
    Reading,
    Row,
    RowFields,
    RowTexts,
    documents_of,
    missing_field,
    missing_tools,
    presumed_fields,
    row_fields,
)

BYTE_ORDER_MARK = "\ufeff"
FIRST_ROWS = 16  # of a Parquet file, which show the fields to read


class FileSpan(NamedTuple):
    """A part of a file, between two shares of its length."""

    begin: float
    end: float

    @property
    def is_whole(self) -> bool:
        """True for a whole file."""
        return (self.begin, self.end) == (0.0, 1.0)

    def has(self, position: int, length: int) -> bool:
        """True if a document that begins at `position` of `length` is in this span."""
        return self.begin <= position / length < self.end


def file_documents(
    text: Text, readings: list[Reading] | None = None, template: ChatTemplate | None = None
) -> Iterator[Document]:
    """Yield the documents of `text.files` between `text.begin` and `text.end` of each file, in order.

    `readings`: gets the counts of each file. `template`: writes conversations; without one they are refused.

    Raises:
        InputError: a file is missing, damaged, of an unknown kind, not UTF-8, has no text in this span, or lacks the
            field.
        StorageError: a file cannot be read.
    """
    span = FileSpan(text.begin, text.end)
    where = "" if span.is_whole else f" between {span.begin:g} and {span.end:g} of its length"
    for name in text.files or ():
        storage, file_name = open_file(name)
        _check_exists(name, storage, file_name)
        reader, packing = _kind_of(name)
        reading = Reading(f"text file {name}{where}")
        if readings is not None:
            readings.append(reading)
        with storage.reader(file_name) as file:
            opened = _Packed(name, packing, file) if packing else _Plain(file)
            rows = reader(name, opened, text, span)
            plain = text.model_copy(update={"field": None}) if reader is _read_txt else text
            yield from documents_of(rows, RowTexts(plain, template), reading)
        if reading.documents == reading.empty:
            raise InputError(f"text file {name}: empty{where}")


def _kind_of(name: str) -> tuple[_Reader, str]:
    """Return the reader of a file, and how it is compressed: `.gz`, `.zst`, or an empty text. Raises InputError."""
    root, suffix = os.path.splitext(name)
    packing = suffix.lower() if suffix.lower() in UNPACKERS else ""
    kind = os.path.splitext(root)[1] if packing else suffix
    reader = READERS.get(kind.lower())
    if reader is None:
        inside = f" of unpacked text in a {packing} file" if packing else ""
        packed = f", and {' or '.join(UNPACKERS)} behind one of them"
        raise InputError(f"text file {name}: unknown kind {kind!r}{inside}; known are {', '.join(READERS)}{packed}")
    if packing and reader is _read_parquet:
        raise InputError(f"text file {name}: Parquet, which is not read forward; unpack it")
    return reader, packing


def _check_exists(path: str, storage: Storage, name: str) -> None:
    try:
        storage.size(name)
    except FileNotFoundError as error:
        hint = storage.fault() or "relative paths are relative to the working directory"
        raise InputError(f"text file {path}: missing; {hint}") from error
    except ValueError as error:
        raise InputError(f"text file {path}: {error}; give files of text") from error


class _Plain:
    """A file as it is."""

    def __init__(self, file: Readable) -> None:
        self.file = file
        self.size = file.size

    def whole(self) -> bytes:
        """Return all bytes."""
        return self.file.read(0, self.file.size)

    @contextmanager
    def stream(self) -> Iterator[io.BufferedIOBase]:
        """Open the bytes."""
        yield io.BufferedReader(_Stream(self.file), PIECE_BYTES)


class _Packed(UnpackedFile):
    """A compressed file."""

    def __init__(self, path: str, kind: str, file: Readable) -> None:
        super().__init__(path, kind, lambda: _Stream(file))

    def whole(self) -> bytes:
        """Return all unpacked bytes."""
        with self.stream() as stream:
            return stream.read()


_Reader = Callable[[str, "_Plain | _Packed", Text, FileSpan], Iterator[Row]]


def _read_txt(path: str, file: _Plain | _Packed, text: Text, span: FileSpan) -> Iterator[Row]:
    if text.has_conversations:
        raise InputError(f"text file {path}: plain text; conversations are read from .jsonl, .json and .parquet files")
    content = _decode(path, file.whole()).replace("\r\n", "\n").replace("\r", "\n")
    yield Row("", content[_line_end(content, span.begin) : _line_end(content, span.end)])


def _line_end(text: str, share: float) -> int:
    """Return the position after the first line break at or after this share of a text; without one, the share's."""
    position = round(share * len(text))
    return position if position in (0, len(text)) else text.find("\n", position) + 1 or position


def _read_jsonl(path: str, file: _Plain | _Packed, _text: Text, span: FileSpan) -> Iterator[Row]:
    offset, size = 0, 0 if span.is_whole else file.size
    with file.stream() as stream:
        for number, line in enumerate(stream, start=1):
            where = f"line {number}"
            text = _decode(path, line, offset)
            begin, offset = offset, offset + len(line)
            if text.strip() and (span.is_whole or span.has(begin, size)):
                yield Row(where, _parse(path, where, text))


def _read_json(path: str, file: _Plain | _Packed, _text: Text, span: FileSpan) -> Iterator[Row]:
    content = _parse(path, "the file", _decode(path, file.whole()))
    if not isinstance(content, list):
        raise InputError(f"text file {path}: a JSON {type(content).__name__}, expected a list of strings or objects")
    for number, item in enumerate(content):
        if span.has(number, len(content)):
            yield Row(f"item {number}", item)


def _read_parquet(path: str, source: _Plain | _Packed, text: Text, span: FileSpan) -> Iterator[Row]:
    import pyarrow.parquet

    assert isinstance(source, _Plain)
    try:
        with pyarrow.parquet.ParquetFile(_Stream(source.file)) as file:
            columns = _columns(path, file, text)
            rows = count()
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for place, number in zip(range(batch.num_rows), rows, strict=False):
                    if span.has(number, file.metadata.num_rows):
                        values = zip(batch.schema.names, batch.columns, strict=True)
                        item = {name: _python_value(path, number, column[place]) for name, column in values}
                        yield Row(f"row {number}", item, null_filled=True)
    except InputError:
        raise
    except (pyarrow.ArrowException, ValueError, OSError) as error:  # pyarrow raises OSError for a damaged page
        raise InputError(f"text file {path}: not Parquet, or damaged: {reason(error)}") from error


def _columns(path: str, file: Any, text: Text) -> list[str]:
    """Return the columns of a Parquet file that are read. Raises InputError if there are none."""
    import pyarrow

    schema, types = file.schema_arrow, pyarrow.types
    lists = [field.name for field in schema if types.is_list(field.type) or types.is_large_list(field.type)]
    fields = row_fields(text, dict.fromkeys(schema.names)) or _fields_of_first(file, text, lists)
    fields = fields or presumed_fields(text, dict.fromkeys(schema.names))
    wanted = (*fields.texts, *filter(None, [fields.messages])) if fields else ()
    absent = [name for name in wanted if name not in schema.names]
    if fields is None or absent:
        (*_, first), name = _first_rows(file, schema.names, 1), absent[0] if absent else None
        raise missing_field(f"text file {path}", text, first, name)
    if text.tools is not None and text.tools not in schema.names:
        raise missing_tools(f"text file {path}", text, schema.names)
    return [*wanted, *([fields.tools] if fields.messages and fields.tools in schema.names else [])]


def _fields_of_first(file: Any, text: Text, columns: list[str]) -> RowFields | None:
    """Return the fields that the first rows of these columns show."""
    return next(filter(None, (row_fields(text, row) for row in _first_rows(file, columns, FIRST_ROWS))), None)


def _first_rows(file: Any, columns: list[str], most: int) -> list[dict[str, Any]]:
    """Return the first rows of a Parquet file, one without values if there are none."""
    batch = next(file.iter_batches(batch_size=most, columns=columns), None) if columns else None
    rows: list[dict[str, Any]] = batch.to_pylist() if batch is not None else []
    return rows or [dict.fromkeys(columns)]


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


READERS: dict[str, _Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
