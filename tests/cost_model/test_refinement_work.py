"""The plan of a refinement: steps, operations and memory follow from the manifest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.cost_model.passes import PlannedPasses
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.cost_model.prices import Prices
from pipeline.cost_model.rates import NOMINAL_CPU, Rates
from pipeline.cost_model.refinement_work import UNREFINED, RefineWork, refine_bytes, refine_work
from pipeline.cost_model.work import layer_work
from tests.families.geometries import llama, manifest

NODE = replace(NOMINAL_CPU, workers_per_node=8)
TEXT = {"text": {"files": ["a"]}, "samples": 64, "sequence_length": 256, "shards": 4}


def work(weighting: float = 0.0, **refine: Any) -> RefineWork:
    job = PlannedJob.of(manifest({"refine": refine or True}, calibration=TEXT), llama())
    found = refine_work(job, forward=100.0, packed=60.0, weighting=weighting)
    assert found.read_bytes == 2 * 64 * 256 * 48 * 2
    return replace(found, read_bytes=8192.0)  # so that passes are not negligible


def test_a_step_is_three_passes_of_its_samples() -> None:
    measured = 13 * 6 * 256 * 60.0  # errors of six held-out samples, and of six others
    assert work(steps=10).flops == 3 * 10 * 1024 * 60.0 + measured
    assert work(5.0, steps=10).flops == (3 * 10 * 1024 + 14 * 6 * 256) * 65.0
    assert (work().steps, work(steps=10, learning_rate=0.1).steps) == (200, 10)
    assert work().passing_flops == 64 * 256 * (100.0 + 60.0)


def prices(layer: RefineWork, workers: int = 1, layers: int = 1, rates: Rates = NODE) -> Prices:
    """Return the prices of eight shards, whose data remains in the page cache."""
    own = replace(layer_work(PlannedJob.of(manifest(calibration=TEXT), llama())), refinement=layer)
    return Prices(own, rates, PlannedPasses(layers, 8, workers, cached=True))


def passing_seconds(layer: RefineWork) -> float:
    """Return the seconds in which one worker passes a layer and writes its targets."""
    return layer.passing_flops / NOMINAL_CPU.products + layer.read_bytes / NOMINAL_CPU.disk


def test_a_disk_may_be_slower_than_the_workers() -> None:
    """Of eight workers on two nodes, each writes an eighth, and each node half of the targets."""
    slow = replace(NOMINAL_CPU, disk=1.0)
    found = prices(work(), 8, rates=replace(slow, workers_per_node=4))
    assert found.refine_seconds() == pytest.approx(found.training_seconds() + work().read_bytes / 2)


def test_one_worker_trains_and_all_go_through_the_layer() -> None:
    one, four = (prices(work(), workers).refine_seconds() for workers in (1, 4))
    assert one - four == pytest.approx(0.75 * passing_seconds(work()))
    assert four > prices(work()).training_seconds() > 0.0
    assert prices(UNREFINED).refine_seconds() == 0.0


def test_layers_are_trained_side_by_side_on_dense_inputs() -> None:
    apart = work(inputs="dense")
    assert apart.passing_flops == 64 * 256 * 100.0
    training, passing = prices(apart).training_seconds(), passing_seconds(apart)
    assert prices(apart, 4, layers=10).refine_seconds() == pytest.approx(3 * training + 2.5 * passing)
    assert prices(work(), 4, layers=10).refine_seconds() > 10 * training
    assert work(inputs="mixed") == replace(apart, passing_flops=64 * 256 * (100.0 + 60.0))


def test_memory_is_the_layers_and_a_steps() -> None:
    layer = llama("gqa").layers[0]
    short, long = (
        refine_bytes(manifest({"refine": True}, calibration={**TEXT, "sequence_length": length}), layer)
        for length in (256, 8192)
    )
    assert short > 20 * layer.numbers()
    assert long > 3 * 4 * layer.attention.heads * 8192**2
    assert refine_bytes(manifest({}, calibration=TEXT), layer) == 0
    assert refine_work(PlannedJob.of(manifest({}, calibration=TEXT), llama()), 1.0, 1.0) == UNREFINED
