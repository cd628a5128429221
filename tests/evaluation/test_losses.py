"""Perplexities that no float holds, and when a model counts as damaged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from manifests.entries import HeldOutScoreEntry
from manifests.records import INFINITY
from pipeline.evaluation.losses import (
    all_warnings,
    damage_warnings,
    json_perplexity,
    perplexity_of,
    shown_perplexity,
    text_warnings,
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


@pytest.mark.parametrize(
    ("calibration", "evaluation", "warned"),
    [(2.0, 2.0, 0), (2.0, 2.1, 0), (2.0, 2.11, 1), (2.11, 2.0, 1), (2.0, None, 0), (0.0, 0.0, 0), (0.0, 0.1, 1)],
)
def test_texts_that_differ_by_a_twentieth_of_their_loss_are_warned_of(
    calibration: float, evaluation: float | None, warned: int
) -> None:
    texts: dict[str, Any] = {"window": 8, "calibration": {"loss": calibration, "tokens": 7}, "evaluation": None}
    assert "evaluation" not in texts_line(texts)
    if evaluation is not None:
        texts["evaluation"] = {"loss": evaluation, "tokens": 14}
        assert texts_line(texts).endswith(f"evaluation text {math.exp(evaluation):.4f} (14 tokens)")
    assert len(text_warnings(texts)) == len(all_warnings({"texts": texts})) == warned


def test_jobs_of_older_versions_scored_no_texts() -> None:
    assert all_warnings({}) == all_warnings({"texts": None}) == []


def test_entries_of_older_versions_have_perplexities_alone() -> None:
    (line,) = damage_warnings({"held_out": {"dense_perplexity": 2.18, "perplexity": 1962.0}})
    assert "is 7.58 nats per token, 6.8 more than the dense model's 0.779" in line
