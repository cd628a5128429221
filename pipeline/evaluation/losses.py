"""Losses and perplexities as stored and as shown, and warnings about badly damaged models.

docs/formats.md#perplexities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manifests.errors import InputError
from manifests.records import INFINITY

MOST_LOSS = 1.05  # the largest loss of a dense model, in units of ln(vocabulary)
WARNED_NATS = 0.5  # rise of the loss per token over the dense model's


def perplexity_of(loss: float) -> float:
    """Return exp(loss), or infinity if float64 cannot represent it (from 709.78 nats per token on)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def json_perplexity(loss: float) -> float | str:
    """Return exp(loss) for JSON, with the string INFINITY for infinity."""
    perplexity = perplexity_of(loss)
    return perplexity if math.isfinite(perplexity) else INFINITY


def shown_perplexity(perplexity: float | str, loss: float | None = None) -> str:
    """Format a perplexity with four decimals. An infinite one is followed by the loss."""
    if math.isfinite(float(perplexity)):
        return f"{float(perplexity):.4f}"
    return "infinite" if loss is None else f"infinite (loss {loss:.1f} nats per token)"


def check_dense_loss(loss: float, vocab: int, text: str, remedy: str) -> None:
    """Raise InputError if a dense model's loss on a text shows that something was read wrongly.

    Its limit is MOST_LOSS times ln(vocab), in nats per token. `remedy`: what accepts such a loss.
    """
    limit = MOST_LOSS * math.log(vocab)
    if not loss <= limit:
        raise InputError(
            f"the dense model's loss on {text} is {loss:.4g} nats per token; equal probabilities for all {vocab:,} "
            f"tokens would cost {math.log(vocab):.4g}, and from {limit:.4g} on something was read wrongly: weights in "
            "another format than config.json names, damaged weights, the tokenizer of another model, or text that is "
            f"none; fetch the model again, or compare its loss in transformers; {remedy}"
        )


def score_extent(score: Mapping[str, Any]) -> str:
    """Return the tokens and windows of a score, such as `9,779 tokens, windows of 128 behind token 0`."""
    return f"{score['tokens']:,} tokens, windows of {score['window']}{prefix_part(score.get('prefix'))}"


def prefix_part(prefix: Sequence[int] | None) -> str:
    """Return what windows begin with, as a part of a line. None: a figure of a version that had no prefixes."""
    if prefix is None:
        return ""
    if not prefix:
        return ", no prefix"
    return f" behind {'token' if len(prefix) == 1 else 'tokens'} {' '.join(map(str, prefix))}"


def damage_warnings(summary: Mapping[str, Any]) -> list[str]:
    """Return a warning for each text on which the loss rises by more than WARNED_NATS over the dense model's.

    `summary`: `held_out` and `evaluation` (with `perplexity` and `dense`) of a job's summary.
    """
    return [
        f"WARNING: the compressed model is badly damaged: its loss on {text} is {loss:.3g} nats per token, {rise:.3g} "
        f"more than the dense model's {loss - rise:.3g} (a warning from {WARNED_NATS:g} on); keep more"
        for text, loss, rise in _rises(summary)
        if rise > WARNED_NATS
    ]


def texts_line(texts: Mapping[str, Any]) -> str:
    """Return a line with the dense model's perplexity on the calibration samples and on the evaluation text."""
    names = {"calibration": "calibration samples", "evaluation": "evaluation text"}
    parts = [
        f"{name} {shown_perplexity(perplexity_of(loss['loss']))} ({loss['tokens']:,} tokens)"
        for kind, name in names.items()
        if (loss := texts.get(kind))
    ]
    windows = f"in windows of {texts['window']} tokens{prefix_part(texts.get('prefix'))}"
    return f"dense perplexity, {windows}: {', '.join(parts)}"


def all_warnings(summary: Mapping[str, Any]) -> list[str]:
    """Return all warnings about the texts and the scores of a job's summary."""
    one_text = [summary["one_text"]] if summary.get("one_text") else []
    return [*one_text, *damage_warnings(summary)]


def _rises(summary: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield (text, loss, rise over the dense model's) if both were measured."""
    if held_out := summary.get("held_out"):
        loss = _loss(held_out)
        yield "held-out calibration text", loss, loss - _loss(held_out, "dense_")
    evaluation = summary.get("evaluation") or {}
    if evaluation.get("perplexity") and evaluation.get("dense"):
        loss = _loss(evaluation["perplexity"])
        yield "the evaluation text", loss, loss - _loss(evaluation["dense"])


def _loss(score: Mapping[str, Any], prefix: str = "") -> float:
    """Return a loss. Entries of older versions have only the perplexity."""
    loss = score.get(f"{prefix}loss")
    return math.log(float(score[f"{prefix}perplexity"])) if loss is None else float(loss)
