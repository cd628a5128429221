"""Reads texts from files or a dataset, and cuts them into calibration samples and evaluation windows of token ids."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from manifests.calibration import Text
from manifests.errors import InputError
from stores.chats import ChatTemplate, Conversation
from stores.model_files import CONFIG_FILE, TOKENIZERS, companions
from stores.special_tokens import text_end
from stores.storage import Place, matching, on_this_machine, open_storage
from stores.text_files import file_documents
from stores.text_rows import Document, Reading, Row, RowTexts, documents_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 1 << 20
POOL_FACTOR = 32
TRUST_ADVICE = (
    "if it needs Python code of a checkpoint that you trust, set model.trust_remote_code: true in the manifest, or "
    "--trust-remote-code of `evaluate`"
)


def read_documents(
    text: Text, tokenizer: PreTrainedTokenizerBase | None = None, readings: list[Reading] | None = None
) -> Iterator[str]:
    """Yield the documents of a manifest's `text`, in order; empty ones too, whose separators count in an evaluation.

    `tokenizer`: its chat template writes conversations; without one they are refused. `readings`: gets the counts of
    each file or dataset.

    Raises:
        InputError: as `file_documents`; no such dataset.
        StorageError: a file cannot be read.
    """
    return (document.text for document in placed_documents(text, tokenizer, readings))


def placed_documents(
    text: Text, tokenizer: PreTrainedTokenizerBase | None = None, readings: list[Reading] | None = None
) -> Iterator[Document]:
    """Yield the documents as `read_documents` does, each with its place."""
    template = None if tokenizer is None else ChatTemplate(tokenizer, text.template)
    read = _dataset_documents if text.dataset else file_documents
    return read(text, readings, template)


def load_tokenizer(place: Place, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved beside a model, without the hub. Raises InputError and StorageError.

    `trust_remote_code`: its code may be run.
    """
    with on_this_machine(place, lambda storage: [CONFIG_FILE, *companions(storage, trust_remote_code)]) as folder:
        return open_tokenizer(folder, open_storage(place).at(), trust_remote_code, local_files_only=True)


def tokenizer_class(place: Place, trust_remote_code: bool = False) -> str | None:
    """Return the transformers class of the tokenizer beside a model; None without one, or if its class is custom code.

    The class may follow from the model's type in config.json. In OUTPUT the type is another, so the tokenizer's
    settings there must name the class.
    """
    if not matching(open_storage(place), TOKENIZERS):
        return None  # for some models transformers would create an empty one
    try:
        loaded = type(load_tokenizer(place, trust_remote_code))
    except InputError:
        return None
    return loaded.__name__ if loaded.__module__.startswith("transformers.") else None


def open_tokenizer(
    model: str, where: str, trust_remote_code: bool = False, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or a hub id; errors name `where`. Raises InputError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, local_files_only=local_files_only, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # for damaged files, transformers and tokenizers raise plain Exception
        trust = "" if trust_remote_code else f"; {TRUST_ADVICE}"
        raise InputError(
            f"{where}: no usable tokenizer: {type(error).__name__}: {error}; "
            f"the tokenizer files (tokenizer.json, tokenizer_config.json) belong beside the weights{trust}"
        ) from error
    return tokenizer


class Drawn(NamedTuple):
    """Calibration samples and other windows of the same text.

    Attributes:
        samples: (samples, sequence_length) int64.
        held_out: (at most `held_out`, sequence_length) int64.
        sources: the index of each sample's source.
        tokens: the number that was read of the text.
    """

    samples: torch.Tensor
    held_out: torch.Tensor
    sources: tuple[int, ...]
    tokens: int


def draw_samples(
    sources: Sequence[Iterable[str]],
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    held_out: int,
    sequence_length: int,
    seed: int,
    prefix: Sequence[int] = (),
) -> Drawn:
    """Draw calibration samples, and up to `held_out` other windows.

    All are disjoint windows of the tokenised documents of the sources, concatenated in order. Each window begins with
    the ids of `prefix`, which count in its length. Each non-empty document ends as the tokenizer ends a text, or with
    its EOS, if it has one. The seed chooses among the first 32 * samples windows (all, in most corpora), and the choice
    keeps their order; the rest of the corpus is not read. The samples do not depend on `held_out`. A sample belongs to
    the source of its first token behind the prefix. Conversations end as their template ends them.

    Raises InputError: fewer tokens than the samples need, or a tokenizer that fails on the text.
    """
    chosen, others = _Reservoir(samples, seed), _Reservoir(held_out, f"held out {seed}")
    room = _room("calibration.sequence_length", sequence_length, prefix)
    num_tokens, read, begins, ends = 0, 0, list[int](), list[int]()

    def pieces() -> Iterator[torch.Tensor]:
        nonlocal read
        for documents in sources:
            for piece in _token_pieces(documents, tokenizer):
                read += len(piece)
                yield piece
            ends.append(read)

    for position, (begin, window) in enumerate(_windows(pieces(), sequence_length, prefix)):
        num_tokens += len(window) - len(prefix)
        if len(window) < sequence_length or position == POOL_FACTOR * samples:
            break
        begins.append(begin)
        rejected = chosen.offer((position, window))
        if rejected is not None:
            others.offer(rejected)
    if len(chosen.windows) < samples:
        raise InputError(
            f"calibration text: {num_tokens} tokens, but {samples} samples of {sequence_length} need {samples * room}"
            f"{_beside(prefix)}; give more text, or lower calibration.samples or sequence_length"
        )
    places = tuple(
        bisect_right(ends, begins[position]) for position in sorted(position for position, _ in chosen.windows)
    )
    return Drawn(chosen.stacked(sequence_length), others.stacked(sequence_length), places, read)


def count_tokens(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    check: Callable[[torch.Tensor], None] = lambda ids: None,
) -> int:
    """Count the tokens that `draw_samples` cuts into windows, and `check` their ids. Stops reading at `most`.

    Raises InputError if the tokenizer fails on the text.
    """
    count = 0
    for piece in _token_pieces(documents, tokenizer):
        check(piece)
        count += len(piece)
        if count >= most:
            break
    return count


class _Reservoir:
    """Reservoir sampling (Vitter's algorithm R): each window offered so far is equally likely to be in the sample."""

    def __init__(self, size: int, seed: int | str) -> None:
        self.size = size
        self.generator = random.Random(seed)
        self.windows: list[tuple[int, torch.Tensor]] = []
        self.offered = 0

    def offer(self, item: tuple[int, torch.Tensor]) -> tuple[int, torch.Tensor] | None:
        """Offer a window with its position; return the rejected or replaced one, if any."""
        self.offered += 1
        if len(self.windows) < self.size:
            self.windows.append((item[0], item[1].clone()))  # a view would keep its whole piece in memory
            return None
        slot = self.generator.randrange(self.offered)
        if slot >= self.size:
            return item
        replaced, self.windows[slot] = self.windows[slot], (item[0], item[1].clone())
        return replaced

    def stacked(self, length: int) -> torch.Tensor:
        """Return the sample in the order of the text."""
        windows = [window for _, window in sorted(self.windows, key=lambda item: item[0])]
        return torch.stack(windows) if windows else torch.empty(0, length, dtype=torch.int64)


def evaluation_windows(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, window: int, prefix: Sequence[int] = ()
) -> torch.Tensor:
    """Return the windows (n, window) int64 of `evaluation_ids`, as `cut_windows`."""
    return cut_windows(evaluation_ids(documents, tokenizer), window, prefix)


def evaluation_ids(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the ids (T,) int64 of the documents, joined by blank lines and tokenised without special tokens.

    This is the usual text of perplexity scores: a .txt file unchanged, or a dataset's rows joined by two newlines.
    Conversations follow each other as their template ends them.
    """
    texts: list[str] = []
    for document in documents:
        if texts and not isinstance(document, Conversation):
            texts.append("\n\n")
        texts.append(document)
    return torch.tensor(_encode(tokenizer, ["".join(texts)])[0], dtype=torch.int64)


def cut_windows(ids: torch.Tensor, window: int, prefix: Sequence[int] = ()) -> torch.Tensor:
    """Return the complete windows (n, window) of an evaluation text's ids (T,) int64, behind `prefix`, whose ids count
    in their length. The last incomplete window is dropped.

    Raises InputError if the text is shorter than one window.
    """
    room = _room("window", window, prefix)
    complete = [each for _, each in _windows([ids], window, prefix) if len(each) == window]
    if not complete:
        raise InputError(
            f"evaluation text: {len(ids)} tokens, one window has {room}{_beside(prefix)}; "
            "give more text or lower window"
        )
    return torch.stack(complete)


def _room(name: str, length: int, prefix: Sequence[int]) -> int:
    """Return the number of the text's tokens in a window. Raises InputError if the prefix leaves none."""
    if length <= len(prefix):
        raise InputError(
            f"{name}: {length} leaves no room for text behind the {len(prefix)} ids that the tokenizer puts before a "
            f"text; raise it to {len(prefix) + 2} or more, or set prefix: none"
        )
    return length - len(prefix)


def _beside(prefix: Sequence[int]) -> str:
    """Return a part of a message: the tokens that a window has besides those of the text."""
    return f" besides the {len(prefix)} that the tokenizer puts before each" if prefix else ""


def _windows(
    pieces: Iterable[torch.Tensor], length: int, prefix: Sequence[int] = ()
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield consecutive windows behind the prefix, also the incomplete last one, each with the index of its first token
    of the text. A text that brings the prefix itself where a window begins, as a chat template does, gets no second
    one."""
    first = torch.tensor(prefix, dtype=torch.int64)
    room = length - len(first)
    rest, begin = torch.empty(0, dtype=torch.int64), 0
    for piece in chain(pieces, (None,)):
        rest = rest if piece is None else torch.cat([rest, piece])
        at = 0
        while len(rest) - at >= (length if piece is not None else 1):
            if len(first) and torch.equal(rest[at : at + len(first)], first):
                at += len(first)
            text = rest[at : at + room]
            if len(text):
                yield begin + at, torch.cat((first, text))
            at += room
        begin, rest = begin + at, rest[at:]


def _token_pieces(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[torch.Tensor]:
    """Yield token ids in batches of about PIECE_CHARACTERS, for which a fast tokenizer uses all cores."""
    end = [*text_end(tokenizer)]
    batch: list[tuple[str, bool]] = []
    num_characters = 0
    for item in _pieces(documents):
        batch.append(item)
        num_characters += len(item[0])
        if num_characters >= PIECE_CHARACTERS:
            yield _encode_batch(tokenizer, batch, end)
            batch, num_characters = [], 0
    if batch:
        yield _encode_batch(tokenizer, batch, end)


def _encode_batch(tokenizer: PreTrainedTokenizerBase, batch: list[tuple[str, bool]], end: list[int]) -> torch.Tensor:
    """Return the ids of pieces of documents. A document gets the ids `end` behind it, unless it has them itself."""
    ids: list[int] = []
    for (_, ends_document), piece_ids in zip(batch, _encode(tokenizer, [text for text, _ in batch]), strict=True):
        ids += piece_ids
        if ends_document and piece_ids[len(piece_ids) - len(end) :] != end:
            ids += end
    return torch.tensor(ids, dtype=torch.int64)


def encoded_pieces(document: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int]]]:
    """Yield the pieces of a document as they are tokenised, with their ids. Raises InputError as `draw_samples`."""
    for piece, _ in _pieces([document]):
        yield piece, _encode(tokenizer, [piece])[0]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    try:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # settings of the wrong type fail only here
        raise InputError(f"tokenizer: fails on the text: {type(error).__name__}: {error}") from error
    return ids


def _pieces(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (text, ends a document that needs an end); long documents are cut after a newline, or, without one,
    anywhere. Conversations need none."""
    for document in documents:
        start, ended = 0, isinstance(document, Conversation)
        while start < len(document):
            stop = start + PIECE_CHARACTERS
            if stop < len(document):
                stop = document.rfind("\n", start, stop) + 1 or stop
            yield document[start:stop], stop >= len(document) and not ended
            start = stop


def _dataset_documents(text: Text, readings: list[Reading] | None, template: ChatTemplate | None) -> Iterator[Document]:
    import datasets

    origin = f"dataset {text.dataset}{f' ({text.name})' if text.name else ''}, split {text.split}"
    reading = Reading(origin)
    if readings is not None:
        readings.append(reading)
    try:
        rows = iter(datasets.load_dataset(text.dataset, text.name, split=text.split, streaming=True))
        first = next(rows, None)
        if first is None:
            raise InputError(f"{origin}: empty")
        numbered = (Row(f"row {number}", row, null_filled=True) for number, row in enumerate(chain([first], rows)))
        yield from documents_of(numbered, RowTexts(text, template, objects=True), reading)
    except InputError:
        raise
    except Exception as error:  # datasets, its readers and its network clients have no common error
        raise InputError(
            f"{origin}: cannot be loaded: {type(error).__name__}: {error}; "
            "check the names and the network, or give `files`"
        ) from error
