"""Finds the special tokens that a tokenizer puts around a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from manifests.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = 256  # tokens of the vocabulary that are tried as a text


def text_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts before a text, none, one or several.

    They are read from a tokenized text. `bos_token_id` says nothing: many tokenizers name a BOS that they never use.

    Raises InputError: no text shows the ids, or the tokenizer fails.
    """
    around = _around(tokenizer)
    if around is None:
        raise InputError(
            "tokenizer: the ids that it puts before a text are unknown, because with special tokens it tokenizes the "
            "text itself differently; set prefix: none"
        )
    return around[0]


def text_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a document: those that the tokenizer puts after a text, or its EOS, if it has one.

    Raises InputError if the tokenizer fails.
    """
    around, end_id = _around(tokenizer), tokenizer.eos_token_id
    if around is not None and around[1]:
        return around[1]
    return () if end_id is None else (end_id,)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ids before and after a text; None if no text shows them."""
    for text in _probes(tokenizer):
        bare, whole = _ids(tokenizer, text, False), _ids(tokenizer, text, True)
        if not bare or not set(bare).isdisjoint(tokenizer.all_special_ids):
            continue  # these ids could not be told from the special ones
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return None
    return None


def _probes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield short texts: a letter, which most tokenizers know, and then words of the vocabulary."""
    yield "a"
    for index in range(min(PROBES, len(tokenizer))):
        text = tokenizer.decode([index])
        assert isinstance(text, str)
        yield text


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    try:
        return [*map(int, tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])]
    except Exception as error:  # settings of the wrong type fail only here
        raise InputError(f"tokenizer: fails on the text: {type(error).__name__}: {error}") from error
