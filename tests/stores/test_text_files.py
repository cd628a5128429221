"""Files of documents: every kind, in parts that leave out nothing, and what is no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from manifests.calibration import Text
from manifests.errors import InputError
from stores.text_files import file_documents

DOCUMENTS = [f"Story {number}: über {'long ' * (number % 4)}roads." for number in range(17)]


def _txt(path: Path) -> None:
    path.write_text("\n".join(DOCUMENTS) + "\n", encoding="utf-8")


def _jsonl(path: Path) -> None:
    lines = [json.dumps({"text": document}, ensure_ascii=False) for document in DOCUMENTS]
    path.write_text("\n\n".join(lines), encoding="utf-8")


def _json(path: Path) -> None:
    path.write_text(json.dumps(DOCUMENTS))


def _parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"other": [1] * len(DOCUMENTS), "text": DOCUMENTS}), path)


KINDS: dict[str, Callable[[Path], None]] = {".txt": _txt, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}


def documents(path: Path, begin: float = 0.0, end: float = 1.0, field: str | None = None) -> list[str]:
    text = Text(files=(str(path),), begin=begin, end=end, field=field)
    found = [document.text for document in file_documents(text)]
    return [line for text in found for line in text.splitlines()] if path.suffix == ".txt" else found


@pytest.mark.parametrize("kind", KINDS)
def test_each_document_is_in_one_part(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"stories{kind}"
    KINDS[kind](path)
    assert documents(path) == DOCUMENTS
    for cut in (0.13, 0.5, 0.77):
        parts = documents(path, end=cut), documents(path, begin=cut)
        assert parts[0] + parts[1] == DOCUMENTS
        assert all(parts)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_a_missing_field_is_named_with_those_that_are_there(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"stories{kind}"
    KINDS[kind](path)
    if kind == ".json":
        path.write_text(json.dumps([{"text": document} for document in DOCUMENTS]))
    with pytest.raises(InputError, match=r"no field 'body'; set `field` to one of .*'text'"):
        documents(path, field="body")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"x", "unknown kind '.csv'; known are .txt, .jsonl, .json, .parquet"),
        ("a.txt", b"abc\xff", r"not UTF-8 at byte 3 \(invalid start byte\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "not UTF-8 at byte 24"),
        ("a.jsonl", b'{"text": "a"}\n{', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": 3}', "field 'text' is int, expected text"),
        ("a.json", b'{"text": "a"}', "a JSON dict, expected a list"),
        ("a.json", b'["\\ud800"]', "half a surrogate pair at character 0"),
        ("a.parquet", b"PAR1", "not Parquet, or damaged"),
        ("a.txt", b" \n", "empty"),
    ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        documents(tmp_path / name)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffOnce.\r\nTwice.".encode())
    assert documents(tmp_path / "a.txt") == ["Once.", "Twice."]
    with pytest.raises(InputError, match="missing; relative paths are relative"):
        documents(tmp_path / "b.txt")
