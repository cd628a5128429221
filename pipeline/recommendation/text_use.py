"""Divides a text into a part for calibration and a part for evaluation, and chooses length and number of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from manifests.calibration import Text
from manifests.errors import InputError
from pipeline.inputs.calibration import check_ids
from pipeline.units.sharding import HELD_OUT
from stores.corpus import count_tokens, read_documents
from stores.special_tokens import text_prefix
from stores.storage import open_file
from stores.text_rows import Reading, ReadText

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

COUNTED_TOKENS = 1 << 20  # a text with as many has enough for every setting below
EVALUATION_SHARE = 0.2  # enough of a short text for a reliable loss
EVALUATION_TOKENS = 65_536  # at most
TEXT_BYTES_PER_TOKEN = 4  # roughly, of a text that is too long to be counted
RAW_TEXT = (  # the cost: docs/results.md#raw-text-for-a-chat-model
    "text   plain, and the tokenizer has a chat template: give conversations (--messages) where it will chat; without "
    "them SmolLM2-135M at 3 bits has 1.6 times the divergence on chats"
)
LONGEST, SHORTEST = 2048, 32
SAMPLES, GOOD_SAMPLES, LEAST_SAMPLES = 256, 64, 16
LEAST_WINDOWS = 2
TOKENS_PER_CHANNEL = 8  # of the widest MLP, whose statistics would otherwise be noisy


@dataclass(frozen=True)
class TextUse:
    """The use of a text.

    Attributes:
        end: the share of the text that samples are drawn from; the model is evaluated on the rest.
        length: tokens of a sample, and of a window of the evaluation.
        samples: the number of calibration samples.
        available: tokens of the calibration part, counted up to a million.
        prefix: the number of a sample's tokens that the tokenizer puts before a text.
    """

    end: float
    length: int
    samples: int
    available: int
    prefix: int = 0


def choose_text_use(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    channels: int,
    vocab: int,
) -> tuple[TextUse, ReadText]:
    """Choose the use of a text by its tokens. `longest`: the model's longest sequence. `channels`: of its widest MLP.
    `vocab`: rows of its embedding. Also returns the counts of the text that was read, up to a million tokens.

    Chooses the greatest length, up to 2,048 tokens, at which the text has 64 samples, and enough samples for eight
    tokens per channel, or 256 if that is more. A fifth of the text, at most 65,536 tokens, is left for the evaluation.

    Raises InputError about the text, also if it is too short.
    """

    def check(ids: Tensor) -> None:
        """Raise InputError if the embedding has no row for one of the tokens."""
        check_ids(ids, vocab, tokenizer, [text])

    readings: list[Reading] = []
    total = count_tokens(read_documents(text, tokenizer, readings), tokenizer, COUNTED_TOKENS, check)
    prefix = len(text_prefix(tokenizer))
    counted = total < COUNTED_TOKENS
    length_of_text = total if counted else max(total, _file_bytes(text) // TEXT_BYTES_PER_TOKEN)
    end = 1 - min(EVALUATION_SHARE, EVALUATION_TOKENS / length_of_text) if length_of_text else 1 - EVALUATION_SHARE
    end = math.floor(end * 1e6) / 1e6
    available = round(end * total)
    if counted:
        first_part = text.model_copy(update={"end": end})
        available = count_tokens(read_documents(first_part, tokenizer), tokenizer, COUNTED_TOKENS)
    held_out = round((1 - end) * length_of_text)
    possible = [length for length in _lengths(longest) if length > prefix]
    lengths = [length for length in possible if held_out // (length - prefix) >= LEAST_WINDOWS]
    good = [length for length in lengths if available // (length - prefix) >= GOOD_SAMPLES]
    shortest = [length for length in lengths[-1:] if available // (length - prefix) >= LEAST_SAMPLES]
    if not (chosen := good[:1] or shortest):
        needed = math.ceil(LEAST_SAMPLES * _lengths(longest)[-1] / (1 - EVALUATION_SHARE))
        raise InputError(
            f"--text {', '.join(text.files or ())}: {total:,} tokens; with a fifth held out for the evaluation, "
            f"calibration needs about {needed:,}; give more text"
        )
    length = chosen[0]
    most = max(SAMPLES, TOKENS_PER_CHANNEL * channels // length)
    windows = available // (length - prefix)
    samples = min(most, max(LEAST_SAMPLES, windows * HELD_OUT // (HELD_OUT + 1)))
    return TextUse(end, length, samples, available, prefix), ReadText(tuple(readings), total)


def text_remarks(tokenizer: PreTrainedTokenizerBase, read: ReadText) -> list[str]:
    """Return the lines about skipped parts of a text, and a remark on text that is unlike the model's later input."""
    documents = sum(each.documents for each in read.readings)
    conversations = sum(each.conversations for each in read.readings)
    if not tokenizer.chat_template or 2 * conversations >= documents:
        return read.left_out()
    return [*read.left_out(), RAW_TEXT]


def shortened(use: TextUse, length: int) -> TextUse:
    """Return the use with samples of `length`, and with as many tokens in all, if the text has them."""
    samples = min(use.samples * use.length // length, use.available // (length - use.prefix))
    return TextUse(use.end, length, samples, use.available, use.prefix)


def _lengths(longest: int) -> list[int]:
    """Return the lengths to try, descending: the longest, then its halves."""
    first = min(LONGEST, longest)
    halves = list(takewhile(lambda length: length >= SHORTEST, (first >> step for step in range(12))))
    return halves or [first]


def _file_bytes(text: Text) -> int:
    places = [open_file(name) for name in text.files or ()]
    return sum(storage.size(name) for storage, name in places)
