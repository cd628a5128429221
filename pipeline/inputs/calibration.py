"""Tokens of calibration and evaluation texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from manifests.calibration import Calibration, Prefix, Text
from manifests.errors import InputError
from manifests.evaluation import Perplexity
from manifests.records import Origin
from pipeline.families.foreign import sequence_limit
from pipeline.inputs.job_inputs import Inputs
from pipeline.methods.text_sources import TextSources
from pipeline.units.sharding import held_out_windows
from stores.corpus import cut_windows, draw_samples, evaluation_ids, load_tokenizer, read_documents
from stores.model_files import TOKENIZERS
from stores.special_tokens import text_prefix
from stores.storage import Place, matching, open_storage
from stores.text_rows import NOTHING_READ, Reading, ReadText
from stores.token_places import first_beyond

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_SHAPE = (2, 64)
PASSAGE = 32  # token ids; unrelated texts share no passage of this length by chance
HASH_BASE = 0x5851F42D4C957F2D


@dataclass(frozen=True)
class CalibrationTokens:
    """Token ids (int64) of the samples (samples, sequence) and of held-out windows (windows, sequence) of the same
    texts.

    There are a tenth as many windows as samples, at most 32,768 tokens, and fewer if the texts are short. `sources`
    names the source of each sample. All begin with the ids `prefix`. `read`: of the texts.
    """

    samples: torch.Tensor
    held_out: torch.Tensor
    sources: TextSources
    prefix: tuple[int, ...] = ()
    read: ReadText = NOTHING_READ


@dataclass(frozen=True)
class EvaluationTokens:
    """Token ids (windows, window) int64 of an evaluation text. Each window begins with the ids `prefix`, which are not
    scored. `read`: of the text."""

    ids: torch.Tensor
    prefix: tuple[int, ...] = ()
    read: ReadText = NOTHING_READ


def calibration_tokens(inputs: Inputs) -> CalibrationTokens | None:
    """Read the calibration texts; None for a data-free job. Raises InputError about the text."""
    calibration = inputs.manifest.calibration
    if calibration is None or not inputs.needs_calibration:
        return None
    return draw_calibration(inputs, calibration)


def draw_calibration(inputs: Inputs, calibration: Calibration) -> CalibrationTokens:
    """Read the calibration texts, also for a job that compresses without them. Raises InputError about the text."""
    tokenizer = load_tokenizer(inputs.source.storage, inputs.manifest.model.trust_remote_code)
    samples, length, seed = calibration.samples, calibration.sequence_length, inputs.manifest.seed
    prefix = prefix_ids(calibration.prefix, tokenizer)
    readings: list[Reading] = []
    drawn = [
        draw_samples(
            [read_documents(source, tokenizer, readings) for source in text.sources.values()],
            tokenizer,
            count,
            held_out_windows(count, samples, length),
            length,
            seed,
            prefix,
        )
        for text, count in calibration.texts
    ]
    of_samples = [
        [*text.sources][place]
        for (text, _), each in zip(calibration.texts, drawn, strict=True)
        for place in each.sources
    ]
    names = tuple(dict.fromkeys(name for text, _ in calibration.texts for name in text.sources))
    tokens = CalibrationTokens(
        torch.cat([each.samples for each in drawn]),
        torch.cat([each.held_out for each in drawn]),
        TextSources(names, tuple(map(names.index, of_samples)), length),
        prefix,
        ReadText(tuple(readings), sum(each.tokens for each in drawn)),
    )
    texts = [text for text, _ in calibration.texts]
    for ids in (tokens.samples, tokens.held_out):
        check_ids(ids, inputs.geometry.vocab, tokenizer, texts)
    return tokens


def prefix_ids(prefix: Prefix, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids at the beginning of a window, by a manifest's `prefix`. Raises InputError."""
    return text_prefix(tokenizer) if prefix == "tokenizer" else ()


def evaluation_tokens(inputs: Inputs) -> EvaluationTokens | None:
    """Return the tokens of the evaluation text; None if the manifest has none. Raises InputError about the text."""
    perplexity, model = inputs.manifest.evaluation.perplexity, inputs.manifest.model
    if perplexity is None:
        return None
    storage, vocab = inputs.source.storage, inputs.geometry.vocab
    return window_tokens(storage, perplexity, vocab, model.trust_remote_code)


def window_tokens(
    place: Place,
    perplexity: Perplexity,
    vocab: int,
    trust_remote_code: bool = False,
) -> EvaluationTokens:
    """Return the tokens of an evaluation text, by the tokenizer beside a model. Raises InputError about the text."""
    tokenizer = load_tokenizer(place, trust_remote_code)
    prefix = prefix_ids(perplexity.prefix, tokenizer)
    readings: list[Reading] = []
    ids = evaluation_ids(read_documents(perplexity.text, tokenizer, readings), tokenizer)
    windows = cut_windows(ids, perplexity.window, prefix)
    check_ids(windows, vocab, tokenizer, [perplexity.text])
    return EvaluationTokens(windows, prefix, ReadText(tuple(readings), len(ids)))


def tokens_digest(tokens: torch.Tensor | None) -> str | None:
    """Return the hex SHA-256 of the shape and the ids; None for None."""
    if tokens is None:
        return None
    return hashlib.sha256(str(tuple(tokens.shape)).encode() + tokens.to(torch.int64).numpy().tobytes()).hexdigest()


def sample_tokens(
    calibration: torch.Tensor | None, config: Mapping[str, Any], place: Place, trust_remote_code: bool = False
) -> tuple[Origin, torch.Tensor]:
    """Return the token ids (batch, length) on which `verify` compares models, and their origin: the beginnings of the
    first calibration samples, or random ids in a data-free job, behind the prefix of the tokenizer at `place`, if the
    model has one."""
    batch, length = SAMPLE_SHAPE
    if calibration is not None:
        return "calibration", calibration[:batch, :length]
    length = min(length, sequence_limit(config)[1])
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, config["vocab_size"], (batch, length), generator=generator)
    prefix = torch.tensor(_prefix_beside(place, trust_remote_code)[: length - 1], dtype=torch.int64)
    if len(prefix) and int(prefix.max()) < config["vocab_size"]:
        ids_BS[:, : len(prefix)] = prefix
    return "random", ids_BS


def _prefix_beside(place: Place, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the prefix of the tokenizer beside a model; none if it has no usable tokenizer, which copies need not."""
    if not matching(open_storage(place), TOKENIZERS):
        return ()
    try:
        return text_prefix(load_tokenizer(place, trust_remote_code))
    except InputError:
        return ()


def seen_share(calibration: torch.Tensor, evaluation: torch.Tensor, length: int = PASSAGE) -> float:
    """Return the share of the passages of `length` ids in the windows (n, window) that also occur in the samples (m,
    sequence)."""
    length = max(1, min(length, calibration.shape[1] // 2, evaluation.shape[1] // 2))
    passages = _passage_hashes(evaluation, length)
    return torch.isin(passages, _passage_hashes(calibration, length).unique()).double().mean().item()


def _passage_hashes(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return a hash of each run of `length` ids inside a row, by Horner's rule modulo 2^64."""
    count = tokens.shape[1] - length + 1
    hashes = torch.zeros(len(tokens), count, dtype=torch.int64)
    for offset in range(length):
        hashes = hashes * HASH_BASE + tokens[:, offset : offset + count].to(torch.int64) + 1
    return hashes.flatten()


def check_ids(tokens: torch.Tensor, vocab: int, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> None:
    """Raise InputError, with the first place in the texts, if the model's embedding has no row for one of the tokens.

    The tokenizer then belongs to another model, or a text spells one of its special tokens.
    """
    if not tokens.numel() or (largest := int(tokens.max())) < vocab:
        return
    place = first_beyond(texts, tokenizer, vocab)
    token = place.token if place else largest
    spelled, where = str(tokenizer.convert_ids_to_tokens(token)), "puts before a text or behind it"
    if place:
        where = f"finds in {place.place}, line {place.line}, character {place.character}"
    remedy = "give the tokenizer that belongs to the model"
    if place and token in tokenizer.added_tokens_decoder:
        remedy = f"leave {spelled!r} out of the text, or {remedy}"
    raise InputError(
        f"tokenizer: it {where} the token {spelled!r} with id {token}, but the model's vocabulary has {vocab}; {remedy}"
    )
