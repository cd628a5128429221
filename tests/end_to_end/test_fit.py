"""Sizes by the memory of an engine, sizes of each layer, and calibrated predictions."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from manifests.fit import Fit
from manifests.loading import load_manifest
from pipeline.cost_model.serving_memory import serving_memory
from pipeline.families.registry import geometry_of, standard_config
from pipeline.ranks.calibration import CalibratedLoss
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import MakeJob, command, weight_digests


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


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("entry", "budget"),
    [
        ({"method": "flat_llm", "keep": 0.9}, "keep"),
        ({"method": "flat_llm", "ranks": {"value": 12, "mlp": 70}}, "keep"),
        ({"method": "lorc", "cache_keep": 0.3}, "keep"),
        ({"method": "lestd", "keep": 0.7}, "bytes"),
    ],
    ids=["keep", "ranks", "cache_keep", "bytes"],
)
def test_the_share_that_is_said_is_what_is_stored(job: MakeJob, entry: dict[str, Any], budget: str) -> None:
    made = job(methods=[entry], budget={budget: 0.5})
    for ended in (command("plan", str(made.manifest), "--gpu", "H200"), made.run()):
        assert ended.code == 2, ended.out
        found = re.search(rf"budget\.{budget}: 0\.5 is out of reach: the stored tensors take (0\.\d+)", ended.err)
        assert found, ended.err
    assert not made.run_dir.exists()
    counts = job(methods=[entry], budget={budget: float(found[1])}).run().json["counts"]
    of = counts["decoder_parameters"]
    assert float(found[1]) - 0.02 < of["compressed"] / of["dense"] <= float(found[1])


PLAIN: dict[str, Any] = {
    "methods": [{"method": "loss_aware"}],
    "calibration.propagate": "dense",
    "budget": {"keep": 0.8},
}
CALIBRATED = {**PLAIN, "evaluation": {"calibrate_prediction": True}}


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
def test_two_other_sizes_calibrate_the_prediction(job: MakeJob) -> None:
    plain, made, smaller = job(**PLAIN), job(**CALIBRATED), job(**{**PLAIN, "budget": {"keep": 0.5}})
    expected, summary = plain.run().json, made.run().json
    assert "sizes" not in expected["prediction"]
    assert expected["prediction"]["measured"] == expected["held_out"]["divergence"]
    assert weight_digests(made.output) == weight_digests(plain.output)
    assert (summary["held_out"], summary["tries"]) == (expected["held_out"], [])
    tries = {size: made.ledger(f"tries/{size:04d}") for size in (900, 500)}
    assert tries[500]["divergence"] == smaller.run().json["held_out"]["divergence"]
    own = (summary["prediction"]["predicted"], summary["held_out"]["divergence"])
    calibrated = CalibratedLoss([own, *((entry["predicted"], entry["divergence"]) for entry in tries.values())])
    sizes = {entry["keep"]: entry for entry in summary["prediction"]["sizes"]}
    assert [*sizes] == [0.9, 0.8, 0.7, 0.6, 0.5]
    assert all(entry["expected"] == calibrated(entry["predicted"]) for entry in sizes.values())
    assert sizes[0.8]["expected"] == pytest.approx(summary["held_out"]["divergence"])
    assert sizes[0.5]["expected"] == pytest.approx(tries[500]["divergence"])
    assert "expected at other sizes" in command("run", str(made.manifest)).out
    assert command("report", str(made.run_dir)).code == 0
    assert "expected, nats per token" in (made.run_dir / "report.html").read_text()


@pytest.mark.usefixtures("inline")
def test_another_size_measures_nothing_twice(job: MakeJob) -> None:
    """The first job's tries serve the second, which needs neither a pass nor another try."""
    made, plain = job(**CALIBRATED), job(**{**PLAIN, "budget": {"keep": 0.7}})
    assert made.run().code == 0
    again = made.run("--set", "budget.keep=0.7")
    assert "phase statistics" not in again.err
    assert "nats per token, predicted" not in again.err
    assert len(again.json["prediction"]["sizes"]) == 5
    assert plain.run().code == 0
    assert weight_digests(made.output) == weight_digests(plain.output)


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
def test_killed_between_sizes_it_ends_the_same(job: MakeJob) -> None:
    """Also if the option is switched off meanwhile, with the layers of another size in the run directory."""
    made, clean = job(**CALIBRATED), job(**CALIBRATED)
    expected = clean.run().json
    for kill, match in enumerate(("tries/", "target", "layer/00001", "tries/")):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=kill % 2 == 0))
        assert child.end() == -signal.SIGKILL, child.said
    kept = made.root.with_name("kept")
    made.keep()
    assert made.run().json["prediction"] == expected["prediction"]
    assert weight_digests(made.output) == weight_digests(clean.output)
    made.put_back()
    assert kept.exists()
    summary = made.run("--set", "evaluation.calibrate_prediction=false").json
    assert summary["held_out"] == expected["held_out"]
    assert weight_digests(made.output) == weight_digests(clean.output)


@pytest.mark.usefixtures("inline")
def test_plan_counts_the_other_sizes(job: MakeJob) -> None:
    seconds = [
        json.loads(command("plan", str(job(**each).manifest), "--json", "--tflops", "1").out)["phases"]
        for each in (PLAIN, CALIBRATED)
    ]
    assert "other sizes" not in seconds[0]
    assert seconds[1]["other sizes"] >= 2 * seconds[1]["solve"]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [{"method": "flat_llm"}]}, "all methods must follow predicted loss"),
        ({"calibration.gradient": {"kind": "local"}}, "predict no loss in nats"),
        ({"statistics": {"keep": False}}, "statistics.keep: false"),
        ({"budget": {"bytes": 0.5}}, "give budget.keep"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(changes: dict[str, Any], said: str, job: MakeJob) -> None:
    ended = job(**{**CALIBRATED, **changes}).run()
    assert (ended.code, said in ended.err) == (2, True), ended.err
    assert "evaluation.calibrate_prediction: " in ended.err
