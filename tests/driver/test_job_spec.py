"""The passes of a job, from its manifest and tasks."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.schema import Manifest
from pipeline.driver.job_spec import CalibrationPasses, passes_of
from tests.driver.simulation import make_tasks
from tests.families.geometries import manifest

CALIBRATION = {"text": {"files": ["a.txt"]}, "samples": 8, "sequence_length": 32, "shards": 4}


def asked(calibration: dict[str, Any] | None = None, **fields: Any) -> Manifest:
    method = "flat_llm" if calibration else "lorc"
    return manifest({"method": method}, keep=0.8, calibration=calibration, **fields)


def test_a_data_free_job() -> None:
    assert passes_of(asked(), (), make_tasks([0], ["free"]), hidden=8) == CalibrationPasses(keep_statistics=True)


def test_a_job_with_text() -> None:
    passes = passes_of(asked(CALIBRATION), (), make_tasks([0, 1]), hidden=8)
    assert passes == CalibrationPasses(shards=4, importance_shards=(0, 1, 2, 3), keep_statistics=True)


@pytest.mark.parametrize(("propagate", "keep", "kept"), [("compressed", None, False), ("compressed", True, True)])
def test_statistics_behind_compressed_layers_are_kept_on_request(propagate: str, keep: bool | None, kept: bool) -> None:
    job = asked({**CALIBRATION, "propagate": propagate}, statistics={"keep": keep})
    assert passes_of(job, (), make_tasks([0]), hidden=8).keep_statistics is kept


def test_samples_of_the_backward_pass_lie_in_its_shards() -> None:
    job = asked({**CALIBRATION, "gradient": {"samples": 2}})
    passes = passes_of(job, (), make_tasks([0], ["loss-mlp"]), hidden=8)
    assert (passes.gradient_samples, passes.gradient_shards) == (2, (1, 3))
    without = passes_of(job, (), make_tasks([0]), hidden=8)
    assert (without.gradient_samples, without.gradient_shards) == (0, ())
    assert passes_of(job, (), make_tasks([0]), hidden=8, gradients=True) == passes
