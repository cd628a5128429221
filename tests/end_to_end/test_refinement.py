"""Jobs with `refine`: killed at every commit, on several workers, by every method and family."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import factories
from tests.end_to_end.children import Child, Hook, killed_again_and_again
from tests.end_to_end.jobs import Job, MakeJob, command, file_digests, source_error
from tests.end_to_end.sources import FAMILIES, make_source
from workers.refining import TrainedLayer

LOSS_AWARE = {"method": "loss_aware", "refine": {"steps": 15}}
REFINED: dict[str, Any] = {"methods": [LOSS_AWARE], "calibration.propagate": "dense", "budget.keep": 0.6}
ROUNDED = {**REFINED, "calibration.samples": 40, "calibration.shards": 5, "quantize": {"bits": 4, "group": None}}
APART, MIXED = (
    {**ROUNDED, "methods": [{"method": "loss_aware", "refine": {"steps": 15, "inputs": inputs}}]}
    for inputs in ("dense", "mixed")
)
LAYERS, MOST_RUNS = 2, 60
SMALL = {"calibration.shards": 2, "calibration.samples": 40}
METHODS: dict[str, dict[str, Any]] = {
    "loss_aware": {"method": "loss_aware"},
    "flat_llm": {"method": "flat_llm"},
    "joint_rank_k": {"method": "joint_rank_k", "query_key": "separate"},
    "lorc": {"method": "lorc"},
    "magnitude": {"method": "magnitude"},
    "lestd": {"method": "lestd"},
    "svd_llm": {"method": "svd_llm"},
}


KINDS = {"compressed": ROUNDED, "dense": APART, "mixed": MIXED}  # by the inputs on which layers are trained


def kinds(*nightly: str) -> pytest.MarkDecorator:
    """All kinds of inputs, some of them only at night."""
    marks = {name: pytest.mark.nightly if name in nightly else () for name in KINDS}
    each = [pytest.param(value, id=name, marks=marks[name]) for name, value in KINDS.items()]
    return pytest.mark.parametrize("changes", each, indirect=True)


@pytest.fixture(scope="module")
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    changes: dict[str, Any] = request.param
    return changes


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path, changes: dict[str, Any]
) -> dict[str, str]:
    """The output of one run without an interruption."""
    made = Job(tmp_path_factory.mktemp("clean"), llama, text, changes).write()
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert len(list((made.run_dir / "staged").iterdir())) <= LAYERS, "drafts are left"
    targets = (made.run_dir / "activations.zarr").glob("targets/*/*/*")
    assert not [path for path in targets if path.is_dir()], "targets are left"
    figures = [layer["refined"] for layer in made.compression()["layers"]]
    assert all(layer["after"] <= layer["before"] for layer in figures)
    assert any(layer["kept"] for layer in figures)
    return file_digests(made.output)


@kinds()
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("every", "hook"),
    [
        pytest.param(1, Hook("commit"), marks=pytest.mark.nightly),
        (2, Hook("commit", after=True)),
    ],
)
def test_killed_again_and_again_it_ends_the_same(
    every: int, hook: Hook, job: MakeJob, changes: dict[str, Any], reference: dict[str, str]
) -> None:
    made = job(**changes, **{"resume.every": every})
    runs = list(killed_again_and_again(made, hook, MOST_RUNS))
    assert runs[-1] >= 3
    assert file_digests(made.output) == reference


def killed_in_training(made: Job, kills: int) -> dict[str, str]:
    """The output after so many kills: half in the first layer in training, then half in the second."""
    made.write()
    for number in range(kills):
        step = 1 + 5 * number % 7 + (15 if number == kills // 2 else 0)
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("step", step))
        assert child.end() == -signal.SIGKILL, child.said
    assert Child("run", [str(made.manifest)], made.root / "log").end() == 0
    return file_digests(made.output)


@kinds("dense", "mixed")
def test_killed_in_training_it_ends_the_same(job: MakeJob, changes: dict[str, Any], reference: dict[str, str]) -> None:
    assert killed_in_training(job(**changes), 3) == reference


@kinds()
@pytest.mark.nightly
def test_killed_fifty_times_in_training_it_ends_the_same(
    job: MakeJob, changes: dict[str, Any], reference: dict[str, str]
) -> None:
    assert killed_in_training(job(**changes), 50) == reference


@kinds()
@pytest.mark.nightly  # `test_job_variants.py` has two workers
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_bytes_on_three_workers(job: MakeJob, changes: dict[str, Any], reference: dict[str, str]) -> None:
    made = job(**changes, **{"workers.max": 3})
    assert made.run().code == 0
    assert file_digests(made.output) == reference


@kinds()
@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bytes_for_any_number_of_workers(
    workers: int, job: MakeJob, changes: dict[str, Any], reference: dict[str, str]
) -> None:
    made = job(**changes, **{"workers.max": workers})
    assert made.run().code == 0
    assert file_digests(made.output) == reference


@pytest.mark.parametrize("inputs", ["dense", "mixed"])
def test_a_correction_needs_the_layers_before(inputs: str, job: MakeJob) -> None:
    entry = {"method": "loss_aware", "correct": "output", "refine": {"inputs": inputs}}
    ended = job(**{**REFINED, "methods": [entry]}).run()
    assert ended.code == 2
    assert f"refine: inputs: {inputs} trains each layer independently" in ended.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_refined_and_verified(method: str, job: MakeJob, inline: None) -> None:
    made = job(**{**REFINED, **SMALL, "methods": [{**METHODS[method], "refine": {"steps": 8}}], "budget.keep": 0.8})
    assert made.run().code == 0
    figures = [layer["refined"] for layer in made.compression()["layers"]]
    assert any(layer["kept"] for layer in figures)
    assert "refined layer by layer" in (made.output / "README.md").read_text()
    page = made.root / "page.html"
    assert command("report", str(made.run_dir), "--output", str(page)).code == 0
    assert "rates and their held-out errors" in page.read_text()
    assert command("verify", str(made.output), "--source", str(made.source)).code == 0


@pytest.mark.parametrize(("method", "weighed"), [("loss_aware", LAYERS), ("magnitude", 0)])
def test_errors_are_weighed_by_the_gradient_if_a_method_sums_it(
    method: str, weighed: int, job: MakeJob, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics: list[Any] = []
    measure = TrainedLayer._metric

    def kept(*arguments: Any) -> Any:
        metrics.append(measure(*arguments))
        return metrics[-1]

    monkeypatch.setattr(TrainedLayer, "_metric", kept)
    made = job(**{**REFINED, **SMALL, "methods": [{"method": method, "refine": {"steps": 2}}]})
    assert made.run().code == 0
    assert len(metrics) == weighed
    for metric_DD in metrics:
        assert torch.equal(metric_DD, metric_DD.T)
        assert torch.linalg.eigvalsh(metric_DD.double()).min() > 0.49, "half of the square error, and more"


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_at_full_size(family: str, tmp_path: Path, job: MakeJob, inline: None) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    made = job(source, **{**REFINED, **SMALL, "budget.keep": 1.0})
    assert made.run().code == 0
    assert source_error(made.output, source) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "method"), list(zip(factories.MIXTURES, ("loss_aware", "magnitude", "flat_llm"), strict=False))
)
@pytest.mark.nightly
def test_experts_are_refined(family: str, method: str, tmp_path: Path, job: MakeJob, inline: None) -> None:
    """Some experts see no token of a step; routers stay."""
    source = make_source(tmp_path / "source", family, layers=2)
    entries = [{**METHODS[method], "refine": {"steps": 8, "learning_rate": 1e-3}}]
    made = job(source, **{**REFINED, **SMALL, "methods": entries, "budget.keep": 0.8})
    assert made.run().code == 0
    figures = [layer["refined"] for layer in made.compression()["layers"]]
    assert any(layer["kept"] for layer in figures)
    assert command("verify", str(made.output), "--source", str(source), "--bound", "10").code == 0


@pytest.mark.nightly
def test_a_limit_of_the_loss_counts_refined_layers(tmp_path: Path, job: MakeJob, inline: None) -> None:
    source = make_source(tmp_path / "source", "llama", layers=1)
    refined = {**REFINED, **SMALL, "methods": [{"method": "loss_aware", "refine": {"steps": 5}}]}
    budget = {"budget": {"max_loss": 0.01}}
    made = job(source, **{name: value for name, value in refined.items() if name != "budget.keep"}, **budget)
    summary = made.run().json
    assert summary["held_out"]["divergence"] <= 0.01
    single = job(source, **{**refined, "budget.keep": summary["tries"][0]["keep"]})
    tried = {entry["keep"]: entry["divergence"] for entry in summary["tries"]}
    assert single.run().json["held_out"]["divergence"] == tried[summary["tries"][0]["keep"]]


def test_only_entries_that_ask_are_trained(job: MakeJob, inline: None) -> None:
    """The attention's tensors are those of a job without refinement."""
    attention = {"method": "joint_rank_k", "mlp": "none"}
    entries = [attention, {"method": "magnitude", "refine": {"steps": 8}}]
    made = job(**{**REFINED, **SMALL, "methods": entries})
    assert made.run().code == 0
    plain = job(**{**REFINED, **SMALL, "methods": [attention, {"method": "magnitude"}]})
    assert plain.run().code == 0
    ours, theirs = (each.compression()["tensors"] for each in (made, plain))
    changed = {name for name in ours if ours[name]["sha256"] != theirs[name]["sha256"]}
    assert changed
    assert {ours[name]["origin"] for name in changed} == {"magnitude"}
