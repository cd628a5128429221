"""A job with `budget.fit`: its output fits beside cache, activations and engine, and its run directory is its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.fit import Fit
from manifests.loading import load_manifest
from pipeline.cost_model.serving_memory import serving_memory
from pipeline.families.registry import geometry_of, standard_config
from tests.end_to_end.jobs import Job, command

MakeJob = Callable[..., Job]


@pytest.mark.usefixtures("inline")
def test_weights_take_what_serving_leaves(llama: Path, job: MakeJob) -> None:
    config = standard_config(json.loads((llama / "config.json").read_text()))
    geometry, served = geometry_of(config, 32), {"context": 48, "sequences": 3, "device": "cpu"}
    beside = serving_memory(Fit(memory=1, **served), config, geometry, ()).beside_weights
    memory = beside + round(0.8 * geometry.model_bytes())
    made = job(llama, **{"budget": {"fit": {"memory": memory, **served}}, "calibration.propagate": "dense"})
    planned = command("plan", str(made.manifest), "--tflops", "1", "--json").json["serving"]
    assert planned["total"] <= memory
    written = made.run().json["counts"]["bytes"]["compressed"]
    assert 0.75 * geometry.model_bytes() < written <= planned["weights"] <= memory - beside
    budget = load_manifest(made.run_dir / "manifest.yaml").budget
    assert budget is not None
    assert (budget.fit, budget.scope) == (None, "model")
    assert budget.bytes == pytest.approx(0.8, abs=1e-5)
    assert made.run().json["already_finished"]
    smaller = made.run("--set", f"budget.fit.memory={memory - round(0.1 * geometry.model_bytes())}").json
    assert smaller["counts"]["bytes"]["compressed"] < written
    assert smaller["seconds_saved"] > 0  # of the same statistics
