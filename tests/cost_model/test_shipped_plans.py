"""`plan` of every manifest and every sweep in `manifests/`, with and without `--gpu`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import pipeline.job.plan_report
from manifests.loading import load_manifest
from pipeline.cost_model.rates import NOMINAL_CPU
from pipeline.families.registry import geometry_of, standard_config
from pipeline.plan import main
from tests import factories
from tests.published import CONFIGS

ROOT = Path(__file__).resolve().parents[2] / "manifests"
JOBS, SWEEPS = sorted(ROOT.glob("*.yaml")), sorted((ROOT / "sweeps").glob("*.yaml"))
RATES = [(), ("--gpu", "H200")]


@pytest.fixture(autouse=True)
def _not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.job.plan_report, "measured_rates", lambda *_: NOMINAL_CPU)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The plan as JSON, and as it is shown."""
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert main(list(arguments)) == 0
    return found, capsys.readouterr().out


def without_free_space(text: str) -> str:
    """Drop what is free on disks, which other processes change between two plans."""
    return re.sub(r"[\d.,]+ are free", "are free", text)


def check(found: dict[str, Any], shown: str) -> None:
    assert found["object_store_bytes"] > 0
    assert found["estimated_seconds"] == pytest.approx(sum(found["phases"].values()))
    assert found["fits"] == (not found["limits"])
    assert set(found["limits"]) <= set(found["remarks"])
    verdict = found["limits"][0] if found["limits"] else "fits, as far as this machine can tell"
    assert without_free_space(shown).startswith(without_free_space(f"{verdict}\n"))
    line = next(line for line in shown.splitlines() if " about " in line)
    assert line.startswith("takes about " if found["fits"] else "would take about ")
    assert shown.index(line) < shown.index("layer bytes"), "before the table"


QUICKSTART = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTURES = ("deepseek-v3", "kimi-k2", "glm-4.5", "qwen3-235b")  # each plan takes up to minutes


def published_config(path: Path) -> dict[str, Any]:
    config = QUICKSTART if path.stem == "quickstart" else CONFIGS[load_manifest(path).model.source]
    return {**config, "torch_dtype": "bfloat16"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("rates", RATES, ids=["here", "gpu"])
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem in MIXTURES)) for path in JOBS],
)
def test_a_job(path: Path, rates: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published_config(path)), encoding="utf-8")
    geometry = geometry_of(standard_config(published_config(path)), 16)
    found, shown = planned(capsys, str(path), "--config", str(config), *rates)
    check(found, shown)
    assert found["layers"] == geometry.num_layers
    assert found["dense_numbers"] == geometry.model_numbers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "rates"),
    [
        pytest.param(path, rates, id=f"{path.stem}-{name}", marks=[pytest.mark.nightly] * ((row + column) % 2))
        for row, path in enumerate(SWEEPS)
        for column, (name, rates) in enumerate(zip(("here", "gpu"), RATES, strict=True))
    ],
)
def test_a_sweep(path: Path, rates: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small model in place of its own."""
    if path.stem == "mixtures":
        model = factories.make_model(tmp_path / "model", "qwen3_moe", num_experts=8, num_experts_per_tok=2)
    else:
        model = factories.make_model(tmp_path / "model", hidden_size=64, intermediate_size=160)
    text = factories.write_text(tmp_path / "text.txt", 60_000)
    settings = {
        "model.source": model,
        "output": tmp_path / "output",
        "run_dir": tmp_path / "run",
        "calibration.text": f"{{files: [{text}]}}",
        "calibration.sequence_length": 64,
        "evaluation.perplexity.text": f"{{files: [{text}]}}",
        "evaluation.perplexity.window": 64,
    }
    options = [part for field, value in settings.items() for part in ("--set", f"{field}={value}")]
    found, shown = planned(capsys, str(path), *options, *rates)
    check(found, shown)
    assert all(row["point"] in shown for row in found["points"])
    assert {"layers_per_commit", "committed_bytes"} <= found.keys()
    assert not (tmp_path / "run").exists()


def test_jobs_and_sweeps_are_shipped() -> None:
    assert JOBS
    assert SWEEPS
