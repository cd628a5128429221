"""The place of a token that the embedding has no row for: file, row, line and character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manifests.calibration import Text
from stores import corpus
from stores.token_places import TokenPlace, first_beyond
from tests.factories import make_tokenizer

VOCAB = 320
SPECIAL = "<|tool|>"


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
@pytest.mark.parametrize("piece", [1 << 20, 24])
def test_the_first_place_is_named(kind: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a document that is tokenised in pieces."""
    monkeypatch.setattr(corpus, "PIECE_CHARACTERS", piece)
    tokenizer, path = make_tokenizer(VOCAB), tmp_path / f"a{kind}"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|first|>", SPECIAL]})
    document = f"Once there was a dog.\nThe dog said {SPECIAL} twice: {SPECIAL}\n"
    path.write_text(document if kind == ".txt" else "\n".join(map(json.dumps, ["none here", document])))
    place = f"text file {path}{'' if kind == '.txt' else ', line 2'}"
    expected = TokenPlace(VOCAB + 1, place, 2, len("The dog said ") + 1)
    texts = [Text(files=(str(path),))]
    assert first_beyond(texts, tokenizer, VOCAB) == expected
    assert first_beyond(texts, tokenizer, VOCAB + 2) is None


def test_a_tokenizer_without_positions_finds_it_as_well(tmp_path: Path) -> None:
    class Slow:
        is_fast = False

        def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

        def convert_ids_to_tokens(self, token: int) -> str:
            return "seventh" if token == 7 else "?"

    (tmp_path / "a.txt").write_text("a bc\nthe seventh")
    tokenizer: object = Slow()
    found = first_beyond([Text(files=(str(tmp_path / "a.txt"),))], tokenizer, 7)  # type: ignore[arg-type] # a stand-in
    assert found == TokenPlace(7, f"text file {tmp_path / 'a.txt'}", 2, 5)
