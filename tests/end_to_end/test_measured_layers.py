"""Ranks by measured losses of layers: what is measured, chosen and entered; kills in between; refusals."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests.entries import LossRatiosEntry
from manifests.loading import parse_manifest
from pipeline.driver.ledger_keys import HELD_OUT, LOSS_RATIOS
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs import job_inputs
from pipeline.inputs.job_inputs import MEASURED_FROM, fit_methods, measuring_layers
from pipeline.ranks.calibration import MOST
from stores.activations import ActivationStore
from stores.ledger import Ledger
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, command, weight_digests

pytestmark = pytest.mark.usefixtures("inline")

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
PLAIN: dict[str, Any] = {
    "methods": [{"method": "loss_aware"}],
    "calibration.propagate": "dense",
    "budget": {"keep": 0.8},
}
MEASURED = {**PLAIN, "budget": {"keep": 0.8, "measure_layers": True}}


def test_ranks_follow_the_measured_losses(job: MakeJob) -> None:
    plain, made = job(**PLAIN), job(**MEASURED)
    expected, summary = plain.run().json, made.run().json
    blocks = [made.ledger(f"block/{layer:05d}") for layer in range(LAYERS)]
    assert sum(block["measured"] for block in blocks) > 0.0
    assert sum(block["predicted"] for block in blocks) == pytest.approx(expected["prediction"]["predicted"])
    ratios = made.ledger("ratios")["ratios"]
    assert {*ratios} == {f"{layer}/0/mlp" for layer in range(LAYERS)}
    assert all(1 / MOST <= ratio <= MOST for ratio in ratios.values())
    assert made.ledger("ranks")["ranks"] != plain.ledger("ranks")["ranks"]
    assert (
        summary["counts"]["decoder_parameters"]["compressed"] <= 0.8 * summary["counts"]["decoder_parameters"]["dense"]
    )
    assert summary["prediction"]["predicted"] != expected["prediction"]["predicted"]
    again = made.run()
    assert again.json["already_finished"]


def test_layers_are_measured_before_they_are_rounded(job: MakeJob) -> None:
    """The losses that codes of given bits add are in no prediction."""
    plain, rounded = job(**MEASURED), job(**MEASURED, quantize={"bits": 3, "group": None})
    assert [each.run().code for each in (plain, rounded)] == [0, 0]
    assert rounded.ledger("ratios") == plain.ledger("ratios")
    layers = [rounded.ledger(f"layer/{layer:05d}") for layer in range(LAYERS)]
    assert all(layer["rounded"] for layer in layers)
    assert rounded.ledger("held_out_score")["divergence"] > plain.ledger("held_out_score")["divergence"]


def test_with_and_without_it_in_one_run_directory(job: MakeJob) -> None:
    """The statistics serve both; the other ranks are forgotten."""
    made, plain, measured = job(**MEASURED), job(**PLAIN), job(**MEASURED)
    assert [each.run().code for each in (made, plain, measured)] == [0, 0, 0]
    for setting, other in (("false", plain), ("true", measured)):
        again = made.run("--set", f"budget.measure_layers={setting}")
        assert "phase statistics" not in again.err
        assert weight_digests(made.output) == weight_digests(other.output)


def test_ranks_of_other_held_out_text_are_chosen_again(job: MakeJob) -> None:
    """The samples, and so the fingerprint, are the same."""
    made, clean = job(**MEASURED), job(**MEASURED)
    expected = clean.run().json["held_out"]
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="complete"))
    assert child.end() == -signal.SIGKILL, child.said
    ledger, store = Ledger(made.run_dir / "ledger"), ActivationStore(made.run_dir / "activations.zarr")
    entered, ratios = ledger.get(HELD_OUT), ledger.get(LOSS_RATIOS)
    assert entered is not None
    assert ratios is not None
    tokens = store.open(entered.tokens).read(0, entered.tokens.shape[0])
    others = store.write_tokens(tokens.flip(1).contiguous())
    ledger.commit(HELD_OUT, entered.model_copy(update={"tokens": others}))
    ledger.commit(LOSS_RATIOS, LossRatiosEntry(ratios=dict.fromkeys(ratios.ratios, 1.0)))
    assert made.run().json["held_out"] == expected
    assert weight_digests(made.output) == weight_digests(clean.output)


def test_other_sizes_are_predicted_with_the_same_corrections(job: MakeJob) -> None:
    """Both measurements in one job: the layers are those of the job without other sizes."""
    made, both = job(**MEASURED), job(**MEASURED, **{"evaluation.calibrate_prediction": True})
    expected, summary = made.run().json, both.run().json
    assert weight_digests(both.output) == weight_digests(made.output)
    figures = summary["prediction"]
    assert figures["predicted"] == expected["prediction"]["predicted"]
    tries = [both.ledger(f"tries/{size:04d}") for size in (900, 500)]
    predicted = {entry["keep"]: entry["predicted"] for entry in figures["sizes"]}
    assert [entry["predicted"] for entry in tries] == [predicted[0.9], predicted[0.5]]
    assert predicted[0.8] == figures["predicted"]


@pytest.mark.nightly
def test_killed_between_measurements_it_ends_the_same(job: MakeJob) -> None:
    made, clean = job(**MEASURED), job(**MEASURED)
    expected = clean.run().json
    for kill, match in enumerate(("layer/00001", "block/00000", "block/00002", "ratios", "ranks", "layer/00001")):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=kill % 2 == 0))
        assert child.end() == -signal.SIGKILL, child.said
    assert made.run().json["held_out"] == expected["held_out"]
    assert weight_digests(made.output) == weight_digests(clean.output)


def test_deep_models_are_measured_by_themselves(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except in a run directory that was begun without."""
    monkeypatch.setattr(job_inputs, "MEASURED_FROM", LAYERS)
    made, begun = job(**PLAIN), job(**PLAIN)
    assert made.run().code == 0
    assert len(made.ledger("ratios")["ratios"]) == LAYERS
    assert begun.run("--set", "budget.measure_layers=false").code == 0
    assert begun.run().json["already_finished"]
    again = begun.run("--set", "budget.keep=0.7")
    assert (again.code, "layer 0 " in again.err, "ratios" in again.err) == (0, True, False), again.err
    assert not any((begun.run_dir / "ledger").glob("ratios.*"))


@pytest.mark.parametrize(
    ("family", "changes", "measures"),
    [
        ("llama", {}, True),
        ("llama", {"num_hidden_layers": MEASURED_FROM - 1}, False),
        ("llama", {"methods": [{"method": "flat_llm"}]}, False),
        ("llama", {"methods": [{"method": "flat_llm", "allocation": "loss"}]}, True),
        ("llama", {"methods": [{"method": "loss_aware", "correct": "output"}]}, False),
        ("llama", {"methods": [{"method": "loss_aware", "refine": True}]}, False),
        ("llama", {"budget": {"max_loss": 0.1}}, False),
        ("llama", {"budget": {"keep": 1.0}}, False),
        ("llama", {"budget": {"multiple": 8}, "methods": [{"method": "loss_aware", "keep": 0.8}]}, False),
        ("llama", {"budget": {"bytes": 0.3}, "quantize": {"bits": "auto"}}, True),
        ("llama", {"statistics": {"keep": False}}, False),
        ("mixtral", {}, False),
    ],
)
def test_which_jobs_measure_by_themselves(family: str, changes: dict[str, Any], measures: bool, job: MakeJob) -> None:
    layers = changes.get("num_hidden_layers", MEASURED_FROM)
    document = job(**{**PLAIN, **{name: value for name, value in changes.items() if name != "num_hidden_layers"}})
    manifest = parse_manifest(document.document())
    geometry = geometry_of(standard_config(factories.make_config(family, num_hidden_layers=layers).to_dict()))
    methods, tasks = fit_methods(manifest, geometry)
    assert measuring_layers(manifest, methods, geometry, tasks).measures_layers == measures
    assert not measuring_layers(manifest, methods, geometry, tasks, possible=False).measures_layers


def test_plan_counts_it(job: MakeJob) -> None:
    seconds = [
        json.loads(command("plan", str(job(**each).manifest), "--json", "--tflops", "1").out)["phases"]
        for each in (PLAIN, MEASURED)
    ]
    assert "measured layers" not in seconds[0]
    assert seconds[1]["measured layers"] >= seconds[1]["solve"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [{"method": "flat_llm"}]}, "budget.measure_layers: all methods must follow predicted loss"),
        ({"calibration.gradient": {"kind": "local"}}, "budget.measure_layers: needs calibration"),
        ({"statistics": {"keep": False}}, "budget.measure_layers: tries sizes from kept statistics"),
        ({"budget": {"max_loss": 0.1, "measure_layers": True}}, "give `keep`, `bytes` or `fit` beside it"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], said: str, job: MakeJob) -> None:
    ended = job(**{**MEASURED, **changes}).run()
    assert (ended.code, said in ended.err) == (2, True), ended.err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {}),
        ("gemma2", {}),
        ("llama", {"budget": {"bytes": 0.2, "measure_layers": True}, "quantize": {"bits": "auto"}}),
        ("llama", {"methods": [{"method": "loss_aware", "mlp": False}]}),
    ],
)
def test_other_jobs(family: str, changes: dict[str, Any], job: MakeJob, tmp_path: Path) -> None:
    """Experts, bits and ranks together, and attention alone."""
    source = factories.make_model(tmp_path / "source", family, hidden_size=64, intermediate_size=96)
    made = job(source, **{**MEASURED, **changes})
    ended = made.run()
    assert ended.code == 0, ended.err
    named = {task.split("/")[2].split(":")[0] for task in made.ledger("ratios")["ratios"]}
    assert ("query_key" in named) == ("methods" in changes)
    verified = command("verify", str(made.output), "--source", str(source))
    assert verified.code == 0, verified.out
