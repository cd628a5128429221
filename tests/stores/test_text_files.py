"""Files of documents: every kind, complete in any number of parts, and files that are no text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from manifests.calibration import Text
from manifests.errors import InputError
from stores.text_files import file_documents
from stores.text_rows import Reading, ReadText

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
    with pytest.raises(InputError, match=r"no field 'body'; set `field` .init: --field. to one of .*'text'"):
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
        ("a.jsonl", b'{"text": "a"}\n["b"]', "line 2: a JSON list, expected an object with the field 'text'"),
        ("a.json", b"[null]", "item 0: is null; .* 1 of 1 rows hold no text there, and at most 5% are skipped"),
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


ROWS = [".jsonl", ".json", ".parquet"]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text(json.dumps(rows))
    return path


def numbered(kind: str, number: int) -> str:
    """The name of a row, counted from 0."""
    return {".jsonl": f"line {number + 1}", ".json": f"item {number}", ".parquet": f"row {number}"}[kind]


@pytest.mark.parametrize("kind", ROWS)
def test_few_rows_without_text_are_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    """Empty texts are documents, as in WikiText."""
    rows: list[dict[str, Any]] = [{"text": f"Story {number}."} for number in range(400)]
    rows[7], rows[9] = {"text": None}, {"text": ""}
    if kind != ".parquet":
        rows[200] = {"other": "no text"}
    path, skipped = write_rows(tmp_path / f"a{kind}", rows), list[Reading]()
    found = [document.text for document in file_documents(Text(files=(str(path),)), skipped)]
    assert found == [row["text"] for row in rows if row.get("text") is not None]
    assert "" in found
    assert [(each.refused, each.empty, each.documents) for each in skipped] == [(len(rows) - len(found), 1, len(found))]
    assert len(found) == (399 if kind == ".parquet" else 398)
    (line,) = ReadText(tuple(skipped)).left_out()
    assert line.startswith(f"text file {path}: {len(rows) - len(found)} rows without text")


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("nulls", "count"), [(21, 400), (1, 19), (51, 5000)])
def test_many_rows_without_text_are_refused(kind: str, nulls: int, count: int, tmp_path: Path) -> None:
    """A long file is not read to its end first."""
    rows = [{"text": None if number < nulls else "Once."} for number in range(count)]
    path = write_rows(tmp_path / f"a{kind}", rows)
    of = nulls if count > 1000 else count
    first = f"{numbered(kind, 0)}: field 'text' is null; set `field` to another, or leave such rows out"
    with pytest.raises(InputError, match=rf"{first}; {nulls} of {of} rows hold no text there, and at most 5% are"):
        documents(path)


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_with_something_else_is_named(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / f"a{kind}", [{"text": "a", "n": 1}, {"text": "b", "n": 2}])
    with pytest.raises(InputError, match=rf"{numbered(kind, 0)}: field 'n' is int, expected text"):
        documents(path, field="n")


def test_text_of_parquet_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """Arrow itself does not look at the bytes of text."""
    content = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": content}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet, row 1: not UTF-8 at byte 0 \(invalid start byte\)"):
        documents(tmp_path / "a.parquet")


CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize("kind", ROWS)
def test_conversations_without_a_template_are_named(kind: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / f"a{kind}", [{"messages": CHAT}] * 3)
    with pytest.raises(InputError, match=r"field 'messages' holds conversations, but the tokenizer has no chat templ"):
        documents(path)
    with pytest.raises(InputError, match=r"field 'messages' is a chat, .*; set `messages` .* to one of 'messages'"):
        documents(path, field="messages")
    both = write_rows(tmp_path / f"b{kind}", [{"id": 1, "prompt": "Hello", "first": CHAT, "second": CHAT}])
    with pytest.raises(InputError, match=r"conversations in 'first', 'second'; set `messages` .* to one of them"):
        documents(both)
    with pytest.raises(
        InputError, match=r"no field 'x'; set `field` .* to one of 'prompt', or set `messages` .* to one of"
    ):
        documents(both, field="x")


@pytest.mark.parametrize("kind", ROWS)
def test_texts_of_several_fields_are_joined(kind: str, tmp_path: Path) -> None:
    """A null in one of them leaves the row out."""
    pairs: list[tuple[str, str | None]] = [("Who?", "I."), ("def f(", "\n  x)"), ("The ", "end"), ("", "a"), ("b", "")]
    rows = [{"prefix": first, "other": 1, "gold": second} for first, second in (*pairs * 20, ("Once", None))]
    path, readings = write_rows(tmp_path / f"a{kind}", rows), list[Reading]()
    text = Text(files=(str(path),), field=("prefix", "gold"))
    found = [document.text for document in file_documents(text, readings)]
    assert found == ["Who?\nI.", "def f(\n  x)", "The end", "a", "b"] * 20
    assert (readings[0].documents, readings[0].refused) == (100, 1)
    with pytest.raises(InputError, match="no field 'none'"):
        list(file_documents(Text(files=(str(path),), field=("prefix", "none"))))


def packed(path: Path, packing: str) -> Path:
    """Compress a file, in two members, as programs that compress in parallel do."""
    content, target = path.read_bytes(), path.with_name(path.name + packing)
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    pack = gzip.compress if packing == ".gz" else lambda data: pyarrow.compress(data, "zstd", asbytes=True)
    target.write_bytes(b"".join(map(pack, halves)))
    return target


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".json"])
def test_compressed_files_are_read_as_they_are_unpacked(kind: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"stories{kind}"
    KINDS[kind](path)
    small = packed(path, packing)
    for begin, end in ((0.0, 1.0), (0.3, 1.0), (0.0, 0.55), (0.2, 0.7)):
        texts = [Text(files=(str(each),), begin=begin, end=end) for each in (path, small)]
        plain, unpacked = ([document.text for document in file_documents(text)] for text in texts)
        assert plain == unpacked


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_damaged_compressed_files_are_named(packing: str, tmp_path: Path) -> None:
    path = tmp_path / "stories.jsonl"
    KINDS[".jsonl"](path)
    small = packed(path, packing)
    whole = small.read_bytes()
    for content in (whole[:-9], whole[:40], b"no such file"):
        small.write_bytes(content)
        for part in (0.0, 0.5):
            with pytest.raises(InputError, match=rf"{small}: not {packing[1:]}, or cut off or damaged: .*; fetch it"):
                documents(small, begin=part)
    for name, said in (("a.parquet", "is not read forward; unpack"), ("a.csv", "unknown kind '.csv' of unpacked")):
        (tmp_path / f"{name}{packing}").write_bytes(b"")
        with pytest.raises(InputError, match=said):
            documents(tmp_path / f"{name}{packing}")
