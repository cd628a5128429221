"""Tokenizers become llama.cpp's vocabularies, or are refused by name.

In tests/end_to_end/test_export_gguf.py, llama.cpp itself cuts text with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import InputError
from pipeline.checkpoint.gguf_vocabulary import (
    BYTE_TOKEN,
    CONTROL,
    NORMAL,
    PATTERNS,
    SINGLE_DIGITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    vocabulary_of,
)

PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SINGLE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SIZE = 280


def added(token: str, index: int, special: bool = True) -> dict[str, Any]:
    return {"id": index, "content": token, "special": special}


def sentencepiece() -> dict[str, Any]:
    """A small tokenizer.json as transformers converts SentencePiece's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "ab", "▁ab", "▁a"]
    return {
        "model": {
            "type": "BPE", "byte_fallback": True, "unk_token": "<unk>",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [["a", "b"], ["▁", "ab"], ["▁a", "b"], ["▁", "a"]],
        },
        "normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]},
        "pre_tokenizer": None,
        "added_tokens": [added("<unk>", 0), added("<s>", 1), added("</s>", 2), added("<tool>", 266, special=False)],
    }  # fmt: skip


def byte_level(pattern: str = "", ignore_merges: bool = False) -> dict[str, Any]:
    """A small tokenizer.json of bytes; with a pattern as Llama 3's."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    pair = {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}
    if pattern == SINGLE_DIGITS:
        pair = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
    return {
        "model": {
            "type": "BPE", "ignore_merges": ignore_merges,
            "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"],
        },
        "normalizer": None,
        "pre_tokenizer": pair if pattern else BYTE_LEVEL,
        "added_tokens": [added("<s>", 0)],
    }  # fmt: skip


def converted(described: dict[str, Any], vocab_size: int = SIZE) -> Vocabulary:
    tokenizer: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: json.dumps(described)))
    return vocabulary_of(tokenizer, vocab_size)


def test_sentencepiece() -> None:
    """The earlier a merge, the higher the score of its token; ids without a token are filled up."""
    made = converted(sentencepiece())
    assert (made.kind, made.pre, made.space_first, made.single_spaces) == ("llama", "default", True, False)
    assert made.types[:4] == (UNKNOWN, CONTROL, CONTROL, BYTE_TOKEN)
    assert made.types[259:268] == (NORMAL,) * 7 + (USER_DEFINED, UNUSED)
    assert made.tokens[259:267] == ("▁", "a", "b", "c", "ab", "▁ab", "▁a", "<tool>")
    assert made.scores[263:266] == (0.0, -1.0, -3.0)
    assert len(made.tokens) == len(made.scores) == len(made.types) == SIZE


@pytest.mark.parametrize(
    ("changes", "first", "single"),
    [
        ({"normalizer": REPLACE}, False, False),
        ({"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "first"}}, True, False),
        ({"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "never"}}, False, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [SINGLE, PREPEND, REPLACE]}}, True, True),
    ],
)
def test_spaces(changes: dict[str, Any], first: bool, single: bool) -> None:
    made = converted({**sentencepiece(), **changes})
    assert (made.space_first, made.single_spaces) == (first, single)


@pytest.mark.parametrize(("key", "name"), PATTERNS.items(), ids=PATTERNS.values())
def test_byte_level(key: tuple[str, bool], name: str) -> None:
    made = converted(byte_level(*key), 5)
    assert (made.kind, made.pre, made.merges) == ("gpt2", name, ("a b",))
    assert made.tokens == ("<s>", "a", "b", "ab", "[PAD4]")
    assert made.types == (CONTROL, NORMAL, NORMAL, NORMAL, UNUSED)


def test_composed_text_is_accepted() -> None:
    """Qwen2's tokenizers compose text; most text is composed already."""
    assert converted({**byte_level(), "normalizer": {"type": "NFC"}}, 5).composed
    assert not converted(byte_level(), 5).composed


def _change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A function that sets or removes a field."""
    *parents, last = path.split(".")

    def change(described: dict[str, Any]) -> None:
        for parent in parents:
            described = described[parent]
        described[last] = value

    return change


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        (sentencepiece, _change("model.type", "Unigram"), "a Unigram model"),
        (sentencepiece, _change("model.merges", [["a", "b"], ["▁", "ab"], ["▁", "a"]]), "'▁a' and 'b', which are not"),
        (sentencepiece, _change("model.merges", [["▁", "ab"], ["a", "b"], ["▁a", "b"]]), "merges of '▁ab' at several"),
        (sentencepiece, _change("model.vocab.<0x00>", 999), "1000 tokens, but the model has 280"),
        (sentencepiece, _change("model.vocab", {"<unk>": 0, "a": 1}), "0 of 256 tokens for bytes"),
        (sentencepiece, _change("normalizer", {"type": "NFKC"}), "not SentencePiece's"),
        (byte_level, _change("normalizer", {"type": "NFKC"}), "the normalizer NFKC"),
        (byte_level, _change("pre_tokenizer", {"type": "Whitespace"}), "none of gpt-2, smollm, llama-bpe, qwen2"),
        (byte_level, _change("pre_tokenizer.add_prefix_space", True), "none of gpt-2"),
        (byte_level, _change("model.ignore_merges", True), "none of gpt-2"),
        (byte_level, _change("model.dropout", 0.1), "options of it that llama.cpp lacks"),
    ],
)
def test_refused_by_name(
    source: Callable[[], dict[str, Any]], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    described = source()
    change(described)
    with pytest.raises(InputError, match=message) as caught:
        converted(described)
    assert "--no-vocabulary" in str(caught.value)


def test_a_tokenizer_written_in_python() -> None:
    tokenizer: Any = SimpleNamespace()
    with pytest.raises(InputError, match="is written in Python"):
        vocabulary_of(tokenizer, SIZE)
