"""Sizes within a loss, sizes by measured layers, and the work that another size repeats."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from manifests.entries import LossRatiosEntry
from manifests.loading import parse_manifest
from pipeline.cost_model.planned_job import PlannedJob
from pipeline.driver.ledger_keys import HELD_OUT, LOSS_RATIOS
from pipeline.families.registry import geometry_of, standard_config
from pipeline.inputs import job_inputs
from pipeline.inputs.job_inputs import MEASURED_FROM, fit_methods, measuring_layers
from pipeline.ranks.calibration import MOST
from pipeline.ranks.search import CLOSE
from stores.activations import ActivationStore
from stores.ledger import Ledger
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, MakeJob, command, file_digests, weight_digests

LAYERS = 3  # of the fixture `llama`
LIMIT = 0.05
WITHIN: dict[str, Any] = {
    "methods": [{"method": "loss_aware"}],
    "calibration.propagate": "dense",
    "budget": {"max_loss": LIMIT},
}


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory, llama: Any, text: Any) -> Job:
    made = Job(tmp_path_factory.mktemp("within"), llama, text, WITHIN).write()
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert child.said.count("phase statistics") == child.said.count("phase gradient: 3 layers") == 1
    return made


def test_the_smallest_size_within_the_limit(within: Job, job: MakeJob, inline: None) -> None:
    """The tries enclose it, and it is what that size gives when it is asked for by name."""
    summary = within.ledger("complete")["summary"]
    tries = {round(1000 * entry["keep"]): entry["divergence"] for entry in summary["tries"]}
    size = min(size for size, divergence in tries.items() if divergence <= LIMIT)
    short = max(other for other in tries if other < size)
    assert tries[short] > LIMIT
    assert size - short <= CLOSE
    assert len(tries) <= 12
    assert summary["held_out"]["divergence"] == tries[size]
    named = job(**{**WITHIN, "budget": {"keep": size / 1000}})
    assert named.run().json["held_out"]["divergence"] == tries[size]
    tensors = {name: digest for name, digest in file_digests(named.output).items() if name.endswith(".safetensors")}
    assert tensors == {name: digest for name, digest in file_digests(within.output).items() if name in tensors}


def test_both_models_are_compared_at_the_size_that_ships(within: Job) -> None:
    """A pass over both, side by side: no try needs it."""
    logs = [path.read_text().splitlines() for path in (within.run_dir / "logs").glob("*.units.jsonl")]
    units = [json.loads(line)["unit"] for lines in logs for line in lines]
    assert sum(unit.startswith("compare/") for unit in units) == 1
    assert units.count("write/0") > 1


@pytest.mark.nightly
def test_killed_between_tries_it_ends_the_same(within: Job, job: MakeJob) -> None:
    made = job(**WITHIN)
    kills = 0
    for match in ("target", "held_out", "tries/", "layer/00001", "held_out_score", "tries/"):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=kills % 2 == 0))
        if child.end() == 0:
            break
        assert child.process.exitcode == -signal.SIGKILL, child.said
        kills += 1
    assert kills >= 4
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert file_digests(made.output) == file_digests(within.output)
    assert made.ledger("complete")["summary"]["tries"] == within.ledger("complete")["summary"]["tries"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [{"method": "flat_llm"}]}, "all methods must follow predicted loss"),
        ({"calibration.gradient": {"kind": "local"}}, "budget.max_loss"),
        ({"statistics": {"keep": False}}, "statistics.keep: false"),
        ({"budget": {"max_loss": 0.1, "keep": 0.5}}, "either `keep`, `bytes`, `max_loss` or `fit`"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str, job: MakeJob, no_ray: None) -> None:
    ended = job(**{**WITHIN, **changes}).run()
    assert (ended.code, said in ended.err) == (2, True), ended.err


PLAIN: dict[str, Any] = {
    "methods": [{"method": "loss_aware"}],
    "calibration.propagate": "dense",
    "budget": {"keep": 0.8},
}
MEASURED = {**PLAIN, "budget": {"keep": 0.8, "measure_layers": True}}
CORRECTED = {"method": "loss_aware", "correct": "output"}
WITHOUT_MLP = {"method": "loss_aware", "mlp": False}


@pytest.mark.usefixtures("inline")
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


@pytest.mark.usefixtures("inline")
def test_layers_are_measured_before_they_are_rounded(job: MakeJob) -> None:
    """The losses that codes of given bits add are in no prediction."""
    plain, rounded = job(**MEASURED), job(**MEASURED, quantize={"bits": 3, "group": None})
    assert plain.run().code == 0
    made = rounded.run()
    assert [made.code, made.err.count(", before rounding")] == [0, 1]
    assert rounded.ledger("ratios") == plain.ledger("ratios")
    layers = [rounded.ledger(f"layer/{layer:05d}") for layer in range(LAYERS)]
    assert all(layer["rounded"] for layer in layers)
    assert rounded.ledger("held_out_score")["divergence"] > plain.ledger("held_out_score")["divergence"]
    assert "inputs" not in plain.ledger("held_out")


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("further", [{"correct": "output"}, {"refine": {"steps": 2}}], ids=["corrected", "refined"])
@pytest.mark.sample(1)
def test_layers_are_measured_before_they_follow_others(further: dict[str, Any], job: MakeJob) -> None:
    """Among dense layers, a layer that makes up for the errors of compressed ones would add errors."""
    plain, made = job(**MEASURED), job(**{**MEASURED, "methods": [{"method": "loss_aware", **further}]})
    assert [each.run().code for each in (plain, made)] == [0, 0]
    assert made.ledger("ratios") == plain.ledger("ratios")
    assert made.ledger("ranks")["ranks"] == plain.ledger("ranks")["ranks"]
    layers = [made.ledger(f"layer/{layer:05d}") for layer in range(LAYERS)]
    assert all("refined" in layer for layer in layers) == ("refine" in further)
    assert (weight_digests(made.output) != weight_digests(plain.output)) == ("correct" in further)


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
def test_with_and_without_it_in_one_run_directory(job: MakeJob) -> None:
    """The statistics serve both; the other ranks are forgotten."""
    made, plain, measured = job(**MEASURED), job(**PLAIN), job(**MEASURED)
    assert [each.run().code for each in (made, plain, measured)] == [0, 0, 0]
    for setting, other in (("false", plain), ("true", measured)):
        again = made.run("--set", f"budget.measure_layers={setting}")
        assert "phase statistics" not in again.err
        assert weight_digests(made.output) == weight_digests(other.output)


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
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


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
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


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [{}, {"quantize": {"bits": 3, "group": None}}, {"methods": [CORRECTED]}],
    ids=["ranks", "ranks-and-codes", "corrected"],
)
def test_killed_between_measurements_it_ends_the_same(changes: dict[str, Any], job: MakeJob) -> None:
    made, clean = job(**{**MEASURED, **changes}), job(**{**MEASURED, **changes})
    expected = clean.run().json
    for kill, match in enumerate(("layer/00001", "block/00000", "block/00002", "ratios", "ranks", "layer/00001")):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=kill % 2 == 0))
        assert child.end() == -signal.SIGKILL, child.said
    assert made.run().json["held_out"] == expected["held_out"]
    assert weight_digests(made.output) == weight_digests(clean.output)


@pytest.mark.usefixtures("inline")
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


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("family", "changes", "measures"),
    [
        ("llama", {}, True),
        ("llama", {"num_hidden_layers": MEASURED_FROM - 1}, False),
        ("llama", {"methods": [{"method": "flat_llm"}]}, False),
        ("llama", {"methods": [{"method": "flat_llm", "allocation": "loss"}]}, True),
        ("llama", {"methods": [CORRECTED]}, True),
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
    planned = PlannedJob(manifest, geometry, *fit_methods(manifest, geometry))
    assert measuring_layers(planned).measures_layers == measures
    assert not measuring_layers(planned, possible=False).measures_layers


@pytest.mark.usefixtures("inline")
def test_plan_counts_it(job: MakeJob) -> None:
    codes: dict[str, Any] = {"quantize": {"bits": 4, "group": None}}
    trained = {"method": "loss_aware", "refine": True}
    plain, measured, corrected, *others = (
        json.loads(command("plan", str(job(**each).manifest), "--json", "--tflops", "1").out)["phases"]
        for each in (
            PLAIN,
            MEASURED,
            {**MEASURED, "methods": [CORRECTED]},
            {**MEASURED, "methods": [CORRECTED], **codes},
            {**MEASURED, "methods": [trained]},
        )
    )
    assert "measured layers" not in plain
    assert measured["measured layers"] >= measured["solve"]
    assert corrected["measured layers"] == pytest.approx(measured["measured layers"], rel=0.2)
    assert corrected["correct"] > 0.0
    for each in others:
        assert each["measured layers"] == pytest.approx(measured["measured layers"], rel=0.2)


@pytest.mark.usefixtures("inline")
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


@pytest.mark.usefixtures("inline")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {}),
        ("gemma2", {}),
        ("llama", {"budget": {"bytes": 0.2, "measure_layers": True}, "quantize": {"bits": "auto"}}),
        (
            "llama",
            {
                "budget": {"bytes": 0.2, "measure_layers": True},
                "quantize": {"bits": "auto"},
                "methods": [CORRECTED],
            },
        ),
        ("llama", {"methods": [WITHOUT_MLP]}),
    ],
)
def test_other_jobs(family: str, changes: dict[str, Any], job: MakeJob, tmp_path: Path) -> None:
    """Experts, bits and ranks together without and with corrections, and attention alone."""
    source = factories.make_model(tmp_path / "source", family, hidden_size=64, intermediate_size=96)
    made = job(source, **{**MEASURED, **changes})
    ended = made.run()
    assert ended.code == 0, ended.err
    named = {task.split("/")[2].split(":")[0] for task in made.ledger("ratios")["ratios"]}
    assert ("query_key" in named) == (changes.get("methods") == [WITHOUT_MLP])
    verified = command("verify", str(made.output), "--source", str(source))
    assert verified.code == 0, verified.out


DENSE = {"calibration.propagate": "dense"}
METHODS = {
    "flat_llm": {"method": "flat_llm"},
    "lorc": {"method": "lorc", "cache_keep": 0.5, "weighting": "input"},
    "lestd": {"method": "lestd", "weighting": "input"},
    "joint_rank_k": {"method": "joint_rank_k", "weighting": "input"},
}


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("flat_llm", "budget.keep=0.5"),
        pytest.param("flat_llm", "methods.0.allocation=uniform", marks=pytest.mark.nightly),
        ("flat_llm", "methods.0.ranks={value: 9, mlp: 40}"),
        ("lorc", "methods.0.cache_keep=0.75"),
        pytest.param("lestd", "budget.keep=0.8", marks=pytest.mark.nightly),
        pytest.param("joint_rank_k", "budget.keep=0.9", marks=pytest.mark.nightly),
    ],
)
def test_other_ranks_need_no_forward_pass(method: str, change: str, job: MakeJob, inline: None) -> None:
    methods = [METHODS[method]]
    budget = None if method == "lorc" else {"keep": 0.7}
    made, clean = (job(**DENSE, methods=methods, budget=budget) for _ in range(2))
    assert made.run().code == 0
    first = file_digests(made.output)
    second = made.root / "second"
    ended = made.run("--set", change, "--set", f"output={second}")
    assert ended.json["seconds_saved"] > 0
    assert "phase statistics" not in ended.err
    assert "s of forward passes saved" in ended.err
    assert clean.run("--set", change).json["seconds_saved"] == 0
    assert file_digests(second) == file_digests(clean.output) != first
    assert file_digests(made.output) == first
    refused = made.run()
    assert (refused.code, "holds a checkpoint" in refused.err) == (2, True), refused.err
    assert made.run("--set", change, "--set", f"output={second}").json["already_finished"] is True
    third = made.root / "third"
    back = made.run("--set", f"output={third}")
    assert back.json["seconds_saved"] == ended.json["seconds_saved"]
    assert "phase statistics" not in back.err
    assert file_digests(third) == first


def test_killed_at_every_commit_of_solving_again(job: MakeJob) -> None:
    """The first budget's output stays until the second's takes its place."""
    made, clean = job(**DENSE), job(**DENSE, **{"budget.keep": 0.5})
    for ready in (made, clean):
        child = Child("run", [str(ready.manifest)], ready.root / "log")
        assert child.end() == 0, child.said
    first, wanted = file_digests(made.output), file_digests(clean.output)
    log = made.root / "log.units"
    log.unlink()
    arguments = [str(made.manifest), "--set", "budget.keep=0.5"]
    for runs in range(40):
        child = Child("run", arguments, made.root / "log", Hook("commit", nth=2, after=runs % 2 == 1))
        code = child.end()
        assert code in (0, -signal.SIGKILL), child.said
        if code == 0:
            break
        if (made.output / "model.safetensors.index.json").exists():
            found = file_digests(made.output)
            assert {name: found[name] for name in found if not name.startswith(".lamina.lock")} in (first, wanted)
    assert 3 < runs < 39
    assert file_digests(made.output) == wanted
    assert not log.exists(), log.read_text()


def test_the_dense_pass_may_be_half_done(job: MakeJob) -> None:
    made, clean = job(**DENSE), job(**DENSE, **{"budget.keep": 0.5})
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="dense/00002"))
    assert child.end() == -signal.SIGKILL
    for ready, options in ((made, ["--set", "budget.keep=0.5"]), (clean, [])):
        child = Child("run", [str(ready.manifest), *options], ready.root / "log")
        assert child.end() == 0, child.said
    assert file_digests(made.output) == file_digests(clean.output)
    work = Path(made.root / "log.units").read_text().splitlines()
    assert sum(unit.startswith("forward/dense/0") for unit in work) == 2


def test_what_the_statistics_depend_on_is_refused(job: MakeJob, inline: None) -> None:
    made, walked = job(**DENSE), job()
    assert made.run().code == 0
    assert walked.run().code == 0
    before = file_digests(made.output)
    for change in ("methods.0.basis=value", "methods.0.layers=last:2", "seed=4", "calibration.samples=9"):
        ended = made.run("--set", change, "--set", "budget.keep=0.5")
        assert (ended.code, "holds another job's work" in ended.err) == (2, True), ended.err
    ended = walked.run("--set", "budget.keep=0.5")
    assert (ended.code, "manifest.budget.keep: 0.7 -> 0.5" in ended.err) == (2, True), ended.err
    assert made.run().json["already_finished"] is True
    assert file_digests(made.output) == before
