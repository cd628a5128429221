"""The bound on a checkpoint's size follows the budget, and counts all that the budget leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.schema import Manifest
from pipeline.cost_model.bounds import Size, bounded_by, size_bound
from pipeline.cost_model.planned_job import PlannedJob
from tests.families.geometries import llama, manifest

WHERE = llama(num_hidden_layers=2, hidden_size=64, intermediate_size=96)


def bound(job: Manifest, unused: int = 0) -> Size:
    return size_bound(PlannedJob.of(job, WHERE), WHERE.model_bytes() + unused)


@pytest.mark.parametrize("keep", [0.9, 0.5])
def test_a_share_of_the_decoder(keep: float) -> None:
    job = manifest(keep=keep)
    decoder = WHERE.scope_numbers("decoder")
    size = bound(job)
    assert bounded_by(PlannedJob.of(job, WHERE)) == "budget.keep"
    assert abs(size.numbers - (WHERE.model_numbers() - (1 - keep) * decoder)) <= 1
    assert size.num_bytes == 2 * size.numbers, "16 bits each"


def test_tensors_that_the_model_does_not_use_are_copied() -> None:
    job = manifest(keep=0.5)
    assert bound(job, unused=1000).num_bytes == bound(job).num_bytes + 1000


def test_entries_with_sizes_of_their_own_bound_themselves() -> None:
    fields: dict[str, Any] = {"ranks": {"value": 4, "mlp": 20}}
    job = manifest(fields)
    assert bounded_by(PlannedJob.of(job, WHERE)) == "methods"
    assert bound(job).numbers < WHERE.model_numbers()


def test_fewer_bits_are_fewer_bytes_of_as_many_numbers() -> None:
    plain = manifest(keep=0.5)
    rounded = manifest(keep=0.5, quantize={"bits": 4, "group": 32, "feedback": False})
    assert bound(rounded).numbers == bound(plain).numbers
    assert bound(rounded).num_bytes < 0.7 * bound(plain).num_bytes
