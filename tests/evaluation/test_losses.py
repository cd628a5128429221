"""Perplexities that no float holds, and when a model counts as damaged."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest

from manifests.entries import HeldOutScoreEntry
from manifests.errors import InputError
from manifests.records import INFINITY
from pipeline.evaluation.losses import (
    all_warnings,
    check_dense_loss,
    damage_warnings,
    json_perplexity,
    perplexity_of,
    shown_perplexity,
    texts_line,
)
from pipeline.reporting.summary import held_out_line, score_lines

SCORE = {"tokens": 10, "window": 5}


def scored(loss: float) -> dict[str, Any]:
    return {**SCORE, "perplexity": json_perplexity(loss), "loss": loss}


@pytest.mark.parametrize(("loss", "finite"), [(0.0, True), (709.7, True), (709.8, False), (1e5, False)])
def test_a_perplexity_is_a_number_or_infinity(loss: float, finite: bool) -> None:
    assert math.isfinite(perplexity_of(loss)) == finite
    assert (json_perplexity(loss) == INFINITY) != finite
    entry = HeldOutScoreEntry(divergence=1.0, dense_perplexity=2.0, perplexity=perplexity_of(loss), tokens=1, loss=loss)
    text = json.dumps(entry.as_json(), allow_nan=False)
    assert HeldOutScoreEntry.model_validate_json(text) == entry
    assert ("infinite" in held_out_line(entry.as_json())) != finite


def test_infinity_is_shown_with_the_loss_and_without_a_ratio() -> None:
    (line,) = score_lines({"perplexity": scored(812.34), "dense": scored(1.0)})
    assert line == "perplexity infinite (loss 812.3 nats per token), dense 2.7183 (10 tokens, windows of 5)"
    assert shown_perplexity(INFINITY) == "infinite"


@pytest.mark.parametrize(("rise", "warned"), [(-1.0, False), (0.0, False), (0.49, False), (0.51, True), (900.0, True)])
def test_a_rise_of_half_a_nat_is_warned_of(rise: float, warned: bool) -> None:
    held_out = {"dense_loss": 1.0, "loss": 1.0 + rise, "dense_perplexity": math.e, "perplexity": INFINITY}
    assert len(damage_warnings({"held_out": held_out})) == warned
    assert len(damage_warnings({"evaluation": {"perplexity": scored(1.0 + rise), "dense": scored(1.0)}})) == warned
    assert not damage_warnings({"evaluation": {"perplexity": scored(1.0 + rise)}, "held_out": None})


@pytest.mark.parametrize(("loss", "stops"), [(0.0, False), (6.05, False), (6.07, True), (1e5, True), (math.nan, True)])
def test_a_dense_loss_above_that_of_guessing_stops(loss: float, stops: bool) -> None:
    """1.05 ln(320) is 6.057."""
    with pytest.raises(InputError) if stops else nullcontext() as caught:
        check_dense_loss(loss, 320, "the text", "say yes")
    if stops:
        said = str(caught and caught.value)
        assert f"the dense model's loss on the text is {loss:.4g} nats per token" in said
        assert "for all 320 tokens would cost 5.768, and from 6.057 on something was read wrongly" in said
        assert said.endswith("; say yes")


def test_the_line_of_both_texts() -> None:
    texts: dict[str, Any] = {"window": 8, "calibration": {"loss": 2.0, "tokens": 7}, "evaluation": None}
    assert "evaluation" not in texts_line(texts)
    texts["evaluation"] = {"loss": 1.0, "tokens": 14}
    assert texts_line(texts).endswith(f"evaluation text {math.e:.4f} (14 tokens)")
    assert all_warnings({"texts": texts}) == []


def test_jobs_of_older_versions_scored_no_texts() -> None:
    assert all_warnings({}) == all_warnings({"texts": None}) == []


def test_entries_of_older_versions_have_perplexities_alone() -> None:
    (line,) = damage_warnings({"held_out": {"dense_perplexity": 2.18, "perplexity": 1962.0}})
    assert "is 7.58 nats per token, 6.8 more than the dense model's 0.779" in line
