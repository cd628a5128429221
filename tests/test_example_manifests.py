"""Every manifest of manifests/ passes `plan` against the published geometry of its model."""

import json
from pathlib import Path

import pytest

from manifests.loading import load_manifest
from manifests.sweep import load_sweep
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.method import Scores
from pipeline.methods.registry import allocate_ranks, build_methods, claim_tasks, predict_tasks
from pipeline.plan import main as plan
from tests.published import CONFIGS, PARAMETERS, write_hollow_checkpoint

MANIFESTS = sorted(
    path for path in (Path(__file__).parents[1] / "manifests").glob("*.yaml") if path.stem != "quickstart"
)

LARGE = ("deepseek-v3", "kimi-k2", "glm-4.5", "qwen3-235b", "mixtures")  # tens of thousands of tensors


SWEEPS = sorted((Path(__file__).parents[1] / "manifests" / "sweeps").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] if path.stem in LARGE else []) for path in SWEEPS],
)
def test_sweeps_fit_a_model(path: Path) -> None:
    """Every point, against the geometry of a published model, whose headers say all that is asked."""
    sweep, points = load_sweep(path)
    geometry = geometry_of(standard_config(CONFIGS.get(sweep.model.source, CONFIGS["meta-llama/Llama-2-7b-hf"])))
    scores = Scores(dict.fromkeys(range(geometry.num_layers), 1.0))
    for point in (point for point in points if point.manifest.methods):
        methods = build_methods(point.manifest)
        claim_tasks(methods, geometry)
        by_loss = predict_tasks(methods, geometry)  # ranks follow curves, which nobody has computed
        assert bool(allocate_ranks(point.manifest, methods, geometry, scores)) != bool(by_loss)


def test_every_paper_has_its_manifests() -> None:
    methods = {entry.method for path in MANIFESTS for entry in load_manifest(path).methods}
    assert methods == {"flat_llm", "lorc", "lestd", "joint_rank_k", "loss_aware"}
    assert {load_manifest(path).model.source for path in MANIFESTS} == CONFIGS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_geometry_counts_the_published_parameters(name: str) -> None:
    geometry = geometry_of(standard_config(CONFIGS[name]))
    assert geometry.model_numbers() / 1e9 == pytest.approx(PARAMETERS[name], abs=6e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] if path.stem in LARGE else []) for path in MANIFESTS],
)
def test_plan(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = load_manifest(path)
    model = write_hollow_checkpoint(tmp_path / "model", manifest.model.source)
    assert plan([str(path), "--set", f"model.source={model}", "--tflops", "100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    geometry = geometry_of(standard_config(CONFIGS[manifest.model.source]))
    assert report["layers"] == geometry.num_layers
    assert report["dense_numbers"] == geometry.model_numbers()
    assert report["expected_numbers"] <= report["dense_numbers"] * 1.1
    assert report["worker_peak_bytes"] < 141e9  # an H200
    if manifest.budget is not None:
        experts = sum(layer.numbers(sorted(layer.routed_roles)) for layer in geometry.layers)
        counted = experts if manifest.budget.scope == "experts" else geometry.decoder_numbers()
        kept = report["expected_numbers"] - (geometry.model_numbers() - counted)
        assert kept / counted == pytest.approx(manifest.budget.keep, abs=2e-3)
