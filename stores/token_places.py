"""Finds the first token of a text that a model's embedding has no row for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from manifests.calibration import Text
from stores.corpus import encoded_pieces, placed_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenPlace(NamedTuple):
    """A token, and its place in a text: file and row, line and character of that document, from 1 on."""

    token: int
    place: str
    line: int
    character: int


def first_beyond(texts: Iterable[Text], tokenizer: PreTrainedTokenizerBase, vocab: int) -> TokenPlace | None:
    """Return the place of the first token id from `vocab` on; None if the texts have none.

    Raises InputError and StorageError, as `read_documents`.
    """
    for text in texts:
        for document in placed_documents(text, tokenizer):
            start = 0
            for piece, ids in encoded_pieces(document.text, tokenizer):
                index = next((index for index, token in enumerate(ids) if token >= vocab), None)
                if index is not None:
                    at = start + _character(tokenizer, piece, ids, index)
                    line_start = document.text.rfind("\n", 0, at) + 1
                    line = document.text.count("\n", 0, at) + 1
                    return TokenPlace(ids[index], document.place, line, at - line_start + 1)
                start += len(piece)
    return None


def _character(tokenizer: PreTrainedTokenizerBase, piece: str, ids: list[int], index: int) -> int:
    """Return the position in a text at which its token `index` begins."""
    if tokenizer.is_fast:
        spans = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return int(spans["offset_mapping"][index][0])
    spelled = str(tokenizer.convert_ids_to_tokens(ids[index]))
    return max(0, piece.find(spelled))
