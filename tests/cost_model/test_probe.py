"""Measured rates of this machine, and the shape of the layer that is measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.cost_model import probe
from pipeline.cost_model.probe import ProbedShape, mean_rates, measured_rates
from pipeline.cost_model.rates import NOMINAL_CPU, OPERATIONS
from tests.families.geometries import llama, manifest


def test_rates_are_measured_on_this_machine() -> None:
    """The rates of the disk and of a node's workers are assumed."""
    rates = measured_rates(torch.device("cpu"), torch.float32, 1, 3, ProbedShape(300, 200, 64, 256, 128))
    measured = (*OPERATIONS, "memory", "link", "digest")
    assert min(getattr(rates, name) for name in measured) > 1e6
    assert (rates.disk, rates.workers_per_node) == (probe.DISK, 3)


def test_the_measured_layer_has_the_job_s_shape_or_a_narrower_one() -> None:
    asked = manifest(calibration={"text": {"files": ["text.txt"]}, "samples": 10, "sequence_length": 40, "shards": 4})
    assert ProbedShape.of(llama(), asked) == ProbedShape(48, 80, 40, 64, 32)
    assert ProbedShape(8192, 28672, 4096, 8192, 1024).at_most(2048, 512) == ProbedShape(2048, 7168, 512, 2048, 256)
    assert ProbedShape(1000, 10, 7, 1000, 200).at_most(2048, 512) == ProbedShape(960, 10, 7, 960, 192)
    assert ProbedShape(8, 10, 7, 8, 8).at_most(2048, 512) == ProbedShape(64, 10, 7, 64, 64)


def test_rates_of_workers_that_are_measured_at_the_same_time_are_averaged() -> None:
    fast, slow = replace(NOMINAL_CPU, products=3.0), replace(NOMINAL_CPU, products=1.0)
    assert mean_rates([fast, slow]) == replace(NOMINAL_CPU, products=2.0)
    assert isinstance(mean_rates([fast, slow]).workers_per_node, int)
