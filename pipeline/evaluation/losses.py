"""Losses and perplexities as they are written and shown, and the warning where compression costs too much.

docs/formats.md#perplexities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from manifests.records import INFINITY

WARNED_NATS = 0.5  # more loss per token than the dense model's


def perplexity_of(loss: float) -> float:
    """exp(loss); infinity where that is beyond float64 (from 709.78 nats per token on)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def json_perplexity(loss: float) -> float | str:
    """exp(loss) as JSON has it: INFINITY, a string, in place of what no JSON number is."""
    perplexity = perplexity_of(loss)
    return perplexity if math.isfinite(perplexity) else INFINITY


def shown_perplexity(perplexity: float | str, loss: float | None = None) -> str:
    """With four decimals; where it is infinite, beside the loss."""
    if math.isfinite(float(perplexity)):
        return f"{float(perplexity):.4f}"
    return "infinite" if loss is None else f"infinite (loss {loss:.1f} nats per token)"


def damage_warnings(summary: Mapping[str, Any]) -> list[str]:
    """A line for each text on which the compressed model loses more than the dense one by WARNED_NATS.

    `summary`: `held_out` and `evaluation` (with `perplexity` and `dense`), as the summary of a job has them.
    """
    return [
        f"WARNING: the compressed model is badly damaged: its loss on {text} is {loss:.3g} nats per token, {rise:.3g} "
        f"more than the dense model's {loss - rise:.3g} (a warning from {WARNED_NATS:g} on); keep more"
        for text, loss, rise in _rises(summary)
        if rise > WARNED_NATS
    ]


def _rises(summary: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """(Text, loss, rise over the dense model's), where both were measured."""
    if held_out := summary.get("held_out"):
        loss, dense = _loss(held_out, ""), _loss(held_out, "dense_")
        yield "held-out calibration text", loss, loss - dense
    evaluation = summary.get("evaluation") or {}
    if evaluation.get("perplexity") and evaluation.get("dense"):
        loss, dense = _loss(evaluation["perplexity"], ""), _loss(evaluation["dense"], "")
        yield "the evaluation text", loss, loss - dense


def _loss(score: Mapping[str, Any], of: str) -> float:
    """Entries of older versions have the perplexity alone."""
    loss = score.get(f"{of}loss")
    return math.log(float(score[f"{of}perplexity"])) if loss is None else float(loss)
