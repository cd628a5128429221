"""Texts: documents from every kind of file, deterministic samples, windows as transformers users cut them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from manifests.calibration import Text
from manifests.errors import InputError
from stores import corpus
from stores.corpus import draw_samples, evaluation_windows, load_tokenizer, read_documents

DOCUMENTS = ["w1 w2\nw3", "", "w4"]
BOS, EOS = 1, 2003


def make_tokenizer(bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """The word w<n> is token n + 2."""
    vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": EOS} | {f"w{n}": n + 2 for n in range(2000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    ends = {} if bos is None else {"bos_token": bos, "eos_token": "</s>"}
    return make(tokenizer_object=tokenizer, unk_token="<unk>", **ends)


def pack_samples(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, samples: int, sequence_length: int, seed: int
) -> torch.Tensor:
    return draw_samples([documents], tokenizer, samples, 0, sequence_length, seed).samples


def words(start: int, stop: int) -> str:
    return " ".join(f"w{n}" for n in range(start, stop))


def read(path: Path, field: str | None = None) -> list[str]:
    return list(read_documents(Text(files=(str(path),), field=field)))


def refused(path: Path, field: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        read(path, field)
    assert str(path) in str(caught.value)
    return str(caught.value)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_rows(tmp_path: Path, kind: str) -> None:
    rows = [{"text": text, "other": f"o{n}"} for n, text in enumerate(DOCUMENTS)]
    path = write(tmp_path / f"a{kind}", rows)
    assert read(path) == DOCUMENTS
    assert read(path, "other") == ["o0", "o1", "o2"]
    message = refused(path, "missing")
    assert "no field 'missing'" in message
    assert "'text', 'other'" in message
    assert "is int, expected text" in refused(write(tmp_path / f"b{kind}", [{"text": 3}]))
    assert "empty" in refused(write(tmp_path / f"c{kind}", [{"text": " \n"}]))


def test_list_of_strings(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DOCUMENTS))
    assert read(tmp_path / "a.json") == DOCUMENTS
    assert "expected an object with the field 'body'" in refused(tmp_path / "a.json", "body")


def test_txt_is_one_document_as_open_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("ä\r\nb\rc\n".encode())
    with open(path, encoding="utf-8") as file:
        assert read(path) == [file.read()]


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path) -> None:
    path, text = tmp_path / name, "so it begins"
    content = {".txt": text, ".json": json.dumps([text]), ".jsonl": json.dumps({"text": text})}[path.suffix]
    path.write_bytes(b"\xef\xbb\xbf" + content.encode() + b"\n")
    assert [document.strip() for document in read(path)] == [text]
    path.write_bytes(b"\xef\xbb\xbfabc\xff")
    assert "not UTF-8 at byte 6" in refused(path)


def test_one_elsewhere_is(tmp_path: Path) -> None:
    """As a text that was put together of others may have it: it is a letter there."""
    (tmp_path / "a.txt").write_text("a\ufeffb")
    (tmp_path / "a.jsonl").write_text('"a"\n"\ufeffb"\n')
    assert read(tmp_path / "a.txt") == ["a\ufeffb"]
    assert read(tmp_path / "a.jsonl") == ["a", "\ufeffb"]


def test_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert list(read_documents(Text(files=(str(tmp_path / "b.txt"), str(tmp_path / "a.txt"))))) == ["b", "a"]


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".json", ".parquet"])
def test_parts_are_the_whole_once(kind: str, tmp_path: Path) -> None:
    """Each line, item or row is in exactly one of two parts that meet."""
    lines = [f"line {number}, of {'many ' * (number % 7)}words\n" for number in range(100)]
    path = tmp_path / f"a{kind}"
    if kind == ".txt":
        path.write_text("".join(lines))
    else:
        write(path, [{"text": line} for line in lines])
    for share in (0.01, 0.5, 0.9, 0.987):
        first, second = (
            list(read_documents(Text(files=(str(path),), begin=begin, end=end)))
            for begin, end in ((0.0, share), (share, 1.0))
        )
        assert "".join([*first, *second]) == "".join(lines)
        assert "".join(first).count("\n") == pytest.approx(100 * share, abs=3)
        assert "".join(second).startswith("line")


def test_a_part_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one line\n")
    with pytest.raises(InputError, match=r"empty between 0.5 and 1 of its length"):
        list(read_documents(Text(files=(str(path),), begin=0.5)))
    path.write_text("one line without an end is cut anywhere")
    assert list(read_documents(Text(files=(str(path),), end=0.5))) == ["one line without an "]
    for fields, message in (({"begin": 0.5, "end": 0.5}, "0.5 is not below"), ({"end": 0.5}, "another `split`")):
        origin = {"files": (str(path),)} if "begin" in fields else {"dataset": "d"}
        with pytest.raises(ValueError, match=message):
            Text.model_validate({**origin, **fields})


def test_wrong_files(tmp_path: Path) -> None:
    assert "missing" in refused(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_text("a,b")
    assert "unknown kind '.csv'; known are .txt" in refused(tmp_path / "a.csv")
    (tmp_path / "e.txt").write_bytes(b"")
    assert "empty" in refused(tmp_path / "e.txt")
    (tmp_path / "u.txt").write_bytes(b"abc\xffdef")
    assert "not UTF-8 at byte 3" in refused(tmp_path / "u.txt")
    (tmp_path / "u.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "not UTF-8 at byte 24" in refused(tmp_path / "u.jsonl")
    (tmp_path / "j.jsonl").write_bytes(b'{"text": "a"}\n{"text"\n')
    assert "line 2 is not JSON" in refused(tmp_path / "j.jsonl")
    (tmp_path / "j.json").write_bytes(b'{"text": "a"}')
    assert "a JSON dict, expected a list" in refused(tmp_path / "j.json")
    (tmp_path / "j.parquet").write_bytes(b"PAR0")
    assert "not Parquet" in refused(tmp_path / "j.parquet")


@pytest.mark.slow
def test_dataset(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": text} for text in DOCUMENTS])
    assert list(read_documents(Text(dataset=str(tmp_path)))) == DOCUMENTS
    for text, message in (
        (Text(dataset=str(tmp_path), field="x"), "no field 'x'; set `field` .init: --field. to one of 'text'"),
        (Text(dataset=str(tmp_path), split="nope"), "split nope: cannot be loaded"),
        (Text(dataset=str(tmp_path / "none")), "cannot be loaded"),
    ):
        with pytest.raises(InputError, match=message):
            list(read_documents(text))


def test_samples_are_windows_of_the_tokens() -> None:
    documents = [words(0, 5), "", words(5, 8)]
    samples = pack_samples(documents, make_tokenizer(), 2, 5, seed=0)
    assert samples.dtype == torch.int64
    assert samples.tolist() == [[2, 3, 4, 5, 6], [EOS, 7, 8, 9, EOS]]
    assert pack_samples(documents, make_tokenizer(None), 2, 4, seed=0).tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]


def test_samples_begin_with_the_prefix() -> None:
    documents = [words(0, 5), "", words(5, 8)]
    drawn = draw_samples([documents], make_tokenizer(), 2, 1, 6, 0, prefix=(BOS, 9))
    assert drawn.samples.tolist() == [[BOS, 9, 2, 3, 4, 5], [BOS, 9, 6, EOS, 7, 8]]
    assert drawn.held_out.tolist() == []  # two tokens are left, and a window needs four
    with pytest.raises(InputError, match="10 tokens, but 3 samples of 5 need 12 besides the 1 that the tokenizer puts"):
        draw_samples([documents], make_tokenizer(), 3, 0, 5, 0, prefix=(BOS,))
    with pytest.raises(InputError, match="sequence_length: 2 leaves no room for text behind the 2 ids"):
        draw_samples([documents], make_tokenizer(), 3, 0, 2, 0, prefix=(BOS, 9))


def test_text_that_brings_the_prefix_gets_no_second_one() -> None:
    documents = [f"<s> {words(0, 3)}", f"<s> {words(3, 6)}", f"{words(6, 8)} </s>", words(8, 12)]
    drawn = draw_samples([documents], make_tokenizer(), 4, 0, 5, 0, prefix=(BOS,))
    ids = [[BOS, 2, 3, 4, EOS], [BOS, 5, 6, 7, EOS], [BOS, 8, 9, EOS, 10], [BOS, 11, 12, 13, EOS]]
    assert drawn.samples.tolist() == ids
    windows = evaluation_windows([f"<s> {words(0, 3)} <s> {words(3, 6)}"], make_tokenizer(), 4, (BOS,))
    assert windows.tolist() == [[BOS, 2, 3, 4], [BOS, 5, 6, 7]]


def test_windows_of_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [f"<s> {words(n, n + 7)}" if n % 3 else words(n, n + 5) for n in range(60)]
    documents = [document.replace(" ", "\n") for document in documents]  # places to cut
    whole = draw_samples([documents], make_tokenizer(), 40, 5, 6, 3, prefix=(BOS,))
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 30)
    pieces = draw_samples([documents], make_tokenizer(), 40, 5, 6, 3, prefix=(BOS,))
    assert torch.equal(whole.samples, pieces.samples)
    assert torch.equal(whole.held_out, pieces.held_out)
    assert not (whole.samples[:, :2] == BOS).all(dim=1).any()


def test_too_short_says_how_short() -> None:
    with pytest.raises(InputError, match="10 tokens, but 3 samples of 5 need 15; give"):
        pack_samples([words(0, 5), words(5, 8)], make_tokenizer(), 3, 5, seed=0)
    with pytest.raises(InputError, match="0 tokens"):
        pack_samples(iter([]), make_tokenizer(), 1, 5, seed=0)


@pytest.mark.slow
def test_the_choice_is_the_seeds_and_keeps_the_order() -> None:
    tokenizer = make_tokenizer(None)

    def starts(seed: int) -> list[int]:
        samples = pack_samples([words(0, 1000)], tokenizer, 10, 10, seed)
        assert all(row == list(range(row[0], row[0] + 10)) for row in samples.tolist())
        return [(row[0] - 2) // 10 for row in samples.tolist()]

    assert starts(3) == starts(3) == sorted(set(starts(3)))
    chosen = [starts(seed) for seed in range(200)]
    assert len({tuple(one) for one in chosen}) == 200
    counts = torch.bincount(torch.tensor(chosen).flatten(), minlength=100)
    assert counts.sum() == 2000
    assert counts.min() > 4  # expected 20 each, deviation 4.2: every window has its chance, the first and last too
    assert counts.max() < 42


@pytest.mark.slow
def test_windows_held_out_are_others_and_change_no_sample() -> None:
    tokenizer = make_tokenizer(None)
    documents = [words(0, 1000)]  # a hundred windows
    held_out_counts = torch.zeros(100)
    for seed in range(200):
        samples, held_out, *_ = draw_samples([documents], tokenizer, 10, 5, 10, seed)
        assert torch.equal(samples, pack_samples(documents, tokenizer, 10, 10, seed))
        starts = [(row[0] - 2) // 10 for row in held_out.tolist()]
        assert len(starts) == len(set(starts)) == 5
        assert starts == sorted(starts)
        assert not set(starts) & {(row[0] - 2) // 10 for row in samples.tolist()}
        held_out_counts[starts] += 1
    assert held_out_counts.sum() == 1000
    assert held_out_counts.min() > 1  # expected 10 each, deviation 3.1
    assert held_out_counts.max() < 24
    assert draw_samples([documents], tokenizer, 97, 5, 10, 0).held_out.shape == (3, 10)
    assert draw_samples([documents], tokenizer, 100, 5, 10, 0).held_out.shape == (0, 10)


def test_a_sample_belongs_to_the_source_of_its_first_token() -> None:
    tokenizer, ends = make_tokenizer(None), (333, 700, 1000)
    sources = [[words(begin, end)] for begin, end in zip((0, *ends), ends, strict=False)]
    drawn = draw_samples(sources, tokenizer, 60, 5, 10, seed=3)
    assert torch.equal(drawn.samples, pack_samples([text for texts in sources for text in texts], tokenizer, 60, 10, 3))
    firsts = (drawn.samples[:, 0] - 2).tolist()
    assert list(drawn.sources) == [sum(first >= end for end in ends) for first in firsts]
    assert len({*drawn.sources}) == 3


@pytest.mark.slow
def test_a_large_corpus_is_not_read_to_its_end() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield words(0, 1000)

    assert pack_samples(endless(), make_tokenizer(), 2, 10, seed=0).shape == (2, 10)


def test_pieces_give_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [words(0, 60).replace(" w7", "\nw7"), words(60, 100), "", words(100, 101)]
    whole = pack_samples(documents, make_tokenizer(), 10, 10, seed=0)
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 40)
    longest = max(len(piece) for piece, _ in corpus._pieces(documents))
    assert longest <= 40
    assert "".join(piece for piece, _ in corpus._pieces(documents)) == "".join(documents)
    lines = ["w1 w2 w3 w4\n" * 50, words(0, 3)]
    monkeypatch.undo()
    expected = pack_samples(lines, make_tokenizer(), 4, 50, seed=0)
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", 40)
    assert torch.equal(pack_samples(lines, make_tokenizer(), 4, 50, seed=0), expected)
    assert whole.shape == (10, 10)


def test_evaluation_windows() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(words(0, 4) + "\n\n" + words(4, 11), add_special_tokens=False)["input_ids"]
    assert evaluation_windows([words(0, 4), words(4, 11)], tokenizer, 3).tolist() == [ids[0:3], ids[3:6], ids[6:9]]
    with pytest.raises(InputError, match="11 tokens, one window has 12"):
        evaluation_windows([words(0, 11)], tokenizer, 12)
    behind = [[BOS, *ids[0:3]], [BOS, *ids[3:6]], [BOS, *ids[6:9]]]
    assert evaluation_windows([words(0, 4), words(4, 11)], tokenizer, 4, (BOS,)).tolist() == behind


def test_tokenizer_of_a_directory(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).bos_token_id == BOS
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="no usable tokenizer"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_real_text_is_tokenised_as_a_whole(tmp_path: Path) -> None:
    shared = Path(__file__).resolve().parents[2].parent / "shared"
    if not shared.is_dir():
        pytest.skip(f"no texts: {shared} is missing")
    tokenizer = load_tokenizer(shared / "models" / "babyllama-361")
    path = tmp_path / "a.txt"
    path.write_text((shared / "text" / "tinyshakespeare.txt").read_text()[:100_000])
    windows = evaluation_windows(read_documents(Text(files=(str(path),))), tokenizer, 256)
    ids = tokenizer(path.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    assert windows.flatten().tolist() == ids[: windows.numel()]
    assert len(ids) - windows.numel() < 256
