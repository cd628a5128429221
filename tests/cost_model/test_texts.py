"""Seconds for a job's texts before its passes, against hand-counted operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manifests.schema import Manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import WORKERS_SECONDS, Prices, prices_of
from pipeline.cost_model.rates import NOMINAL_CPU
from pipeline.cost_model.texts import amount_seconds, texts_seconds
from tests.families.geometries import llama, manifest

# D 48, N 80, six layers, four query heads and two of keys and values of 16 numbers, V 320.
LAYER = 2 * 48 + 2 * 64 * 48 + 2 * 32 * 48 + 3 * 80 * 48
GEOMETRY = llama()
RATES = replace(
    NOMINAL_CPU, single=1000.0, memory=100.0, disk=10.0, products=500.0, moments=250.0, factors=125.0, double=50.0
)


def job_of(**calibration: Any) -> Manifest:
    text = {"text": {"files": ["t"]}, "samples": 16, "sequence_length": 32, "shards": 4, "propagate": "dense"}
    return manifest(keep=0.8, calibration={**text, **calibration}, workers={"max": 1})


def prices_for(job: Manifest, *, importance: int = 0, **work: Any) -> Prices:
    """Return a job's prices, with layers that take no time to read and to build."""
    prices = prices_of(PlannedJob.of(job, GEOMETRY), RATES)
    own = replace(prices.work, **{"built_bytes": 0.0, "weight_bytes": 0, **work})
    return replace(prices, work=own, passes=replace(prices.passes, importance=importance))


def seconds(job: Manifest, evaluation: int = 0, **changes: Any) -> float:
    own = {name: changes.pop(name) for name in ("built_bytes", "weight_bytes", "held_out_flops") if name in changes}
    prices = prices_for(job, **own)
    prices = replace(prices, passes=replace(prices.passes, **changes))
    return texts_seconds(PlannedJob.of(job, GEOMETRY), prices, evaluation)


def flops(windows: int, length: int) -> float:
    """Return the operations of windows through all layers and the head: two for each weight, and attention over half a
    window on average, for its scores and for its values."""
    layers = 6 * (2 * LAYER + 2 * length * 64)
    return windows * length * (layers + 2 * 48 * 320)


@pytest.mark.parametrize(
    ("evaluation", "windows", "length"),
    [(0, 16, 32), (32, 17, 32), (100, 19, 32), (20, 17, 20), (5, 17, 5)],
    ids=["samples alone", "one window", "a rest", "shorter than a sample", "far shorter"],
)
def test_windows_of_both_texts_pass_the_model(evaluation: int, windows: int, length: int) -> None:
    """As long as a sample, or as the evaluation text if that is shorter; a rest is not scored."""
    assert seconds(job_of(), evaluation) == pytest.approx(flops(windows, length) / 500.0)


def test_at_most_so_many_tokens_of_each_text() -> None:
    """8,192 of each: 256 windows of 32 tokens."""
    many = job_of(samples=5000)
    assert seconds(many) == pytest.approx(flops(256, 32) / 500.0)
    assert seconds(many, 10**6) == pytest.approx(2 * flops(256, 32) / 500.0)


@pytest.mark.parametrize(("workers", "scorers"), [(1, 1), (2, 2), (8, 8), (100, 8)])
def test_the_workers_share_the_windows(workers: int, scorers: int) -> None:
    """No more than there are shards of both texts: twice four."""
    assert seconds(job_of(), workers=workers) == pytest.approx(flops(16, 32) / 500.0 / scorers)


def test_every_scorer_builds_every_layer() -> None:
    once = seconds(job_of())
    assert seconds(job_of(), built_bytes=200.0) == pytest.approx(once + 6 * 2.0)
    assert seconds(job_of(), built_bytes=200.0, workers=8) == pytest.approx(once / 8 + 6 * 2.0)


def test_reading_goes_on_beside_the_products() -> None:
    once = seconds(job_of())
    assert seconds(job_of(), weight_bytes=1) == once
    slow = round(100 * once)
    assert seconds(job_of(), weight_bytes=slow) == pytest.approx(6 * slow / 10.0)
    assert seconds(job_of(), weight_bytes=slow, cached=True) == once


def test_held_out_text_may_pass_the_model_with_both_texts() -> None:
    """All in float32, at a rate of its own."""
    with_it, without = (seconds(job_of(), held_out_flops=(5000.0, 7.0), joined=joined) for joined in (True, False))
    assert with_it - without / 2 == pytest.approx(6 * 5000.0 / 1000.0)


def test_a_job_without_statistics_reads_no_text() -> None:
    job, without = PlannedJob.of(job_of(), GEOMETRY), PlannedJob.of(manifest(keep=0.8), GEOMETRY)
    idle = {"moment_flops": 0.0, "sample_bytes": 0}
    assert texts_seconds(job, prices_for(job_of(), **idle), 100) == 0.0
    assert texts_seconds(job, prices_for(job_of(), importance=2, **idle), 100) > 0.0
    assert texts_seconds(without, prices_for(job_of()), 100) == 0.0


def test_the_amount_of_text_is_chosen_at_the_widest_point_of_the_first_layer() -> None:
    """512 tokens through the layer, for a moment of 80 x 80; three fits of half of its channels."""
    passing = 512 * ((2 * LAYER + 2 * 32 * 64) / 500.0 + 80**2 / 250.0)
    fits = 3 * (40**3 / 3 / 125.0 + 6 * 40**3 / 50.0)
    assert amount_seconds(PlannedJob.of(job_of(), GEOMETRY), RATES) == pytest.approx(WORKERS_SECONDS + passing + fits)
