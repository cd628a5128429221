"""Faults of texts in a bucket are reported as on a disk, and so are faults of the bucket."""

from __future__ import annotations

import io
import json

import pyarrow
import pyarrow.parquet
import pytest

from manifests.calibration import Text
from manifests.errors import InputError, StorageError
from stores import bucket as bucket_module
from stores import text_files
from stores.bucket import Bucket
from stores.text_files import file_documents


def _parquet(texts: list[str | None]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


def _read(address: str, name: str) -> list[str]:
    return [document.text for document in file_documents(Text(files=(f"{address}/{name}",)))]


ROWS: list[str | None] = [f"Story {number}." for number in range(100)]
CASES = {
    "a.txt": (b"abc\xff", "not UTF-8 at byte 3"),
    "b.jsonl": (b'{"text": "a"}\n{"text": 3}', "line 2: field 'text' is int, expected text"),
    "c.json": (
        json.dumps([{"messages": [{"role": "user", "content": "a"}]}]).encode(),
        "'messages' holds",
    ),
    "d.parquet": (_parquet([*ROWS, *[None] * 30]), "row 100: field 'text' is null; .* 30 of 130 rows hold no text"),
    "e.parquet": (_parquet(ROWS)[:-20], "not Parquet, or damaged"),
    "f.parquet": (_parquet(ROWS)[:200] + bytes(200) + _parquet(ROWS)[400:], "not Parquet, or damaged"),
    "g.txt": (b"", "empty"),
    "h.csv": (b"a,b", "unknown kind '.csv'"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_text_is_said_with_its_address(name: str, s3_bucket: str) -> None:
    content, said = CASES[name]
    Bucket(s3_bucket).replace(name, content)
    with pytest.raises(InputError, match=rf"text file {s3_bucket}/{name}.*{said}"):
        _read(s3_bucket, name)


@pytest.mark.parametrize("name", ["none.txt", "folder", "folder/", "folder.txt"])
def test_a_text_that_is_not_there(name: str, s3_bucket: str) -> None:
    """Nor is a folder a text."""
    Bucket(s3_bucket).replace("folder/a.txt", b"a")
    Bucket(s3_bucket).replace("folder.txt/a.txt", b"a")
    with pytest.raises(InputError, match=rf"text file {s3_bucket}/{name}: "):
        _read(s3_bucket, name)


@pytest.mark.parametrize("fault", ["replaced", "deleted"])
def test_a_text_that_changes_while_it_is_read(fault: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would be of another text. It is no fault of the text, and the job can be run again."""
    monkeypatch.setattr(text_files, "PIECE_BYTES", 64)
    bucket, content = Bucket(s3_bucket), "\n".join(map(json.dumps, ROWS)).encode()
    bucket.replace("a.jsonl", content)
    documents = file_documents(Text(files=(f"{s3_bucket}/a.jsonl",)))
    assert next(documents).text == ROWS[0]
    if fault == "replaced":
        bucket.replace("a.jsonl", content + b" ")
    else:
        bucket.delete(["a.jsonl"])
    with pytest.raises(StorageError, match=rf"{s3_bucket}/a.jsonl"):
        list(documents)


def test_a_bucket_that_fails_is_no_damage_of_parquet(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pyarrow, which reads the file."""
    Bucket(s3_bucket).replace("a.parquet", _parquet(ROWS))
    calls = iter(range(100))

    def read_into(self: bucket_module._Object, begin: int, view: memoryview) -> int:
        if next(calls) < 1:
            return whole(self, begin, view)
        raise StorageError(f"{s3_bucket}/a.parquet: cannot be read (timeout)")

    whole = bucket_module._Object.read_into
    monkeypatch.setattr(bucket_module._Object, "read_into", read_into)
    with pytest.raises(StorageError, match=r"a.parquet: cannot be read \(timeout\)"):
        _read(s3_bucket, "a.parquet")
