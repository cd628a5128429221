"""`plan` of every manifest and every sweep in `manifests/`, with and without `--gpu`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipeline.job.plan_report
from pipeline.cost_model.rates import NOMINAL_CPU
from pipeline.families.registry import geometry_of, standard_config
from pipeline.plan import main
from tests import factories

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


def check(found: dict[str, Any], shown: str) -> None:
    assert found["object_store_bytes"] > 0
    assert found["estimated_seconds"] == pytest.approx(sum(found["phases"].values()))
    assert found["fits"] == (not found["limits"])
    assert set(found["limits"]) <= set(found["remarks"])
    verdict = found["limits"][0] if found["limits"] else "fits, as far as this machine can tell"
    assert shown.startswith(f"{verdict}\n")
    line = next(line for line in shown.splitlines() if " about " in line)
    assert line.startswith("takes about " if found["fits"] else "would take about ")
    assert shown.index(line) < shown.index("layer bytes"), "before the table"


SIZES = {  # as published; a tied small one where the model is `make quickstart`'s
    "llama2-7b": (4096, 11008, 32, 32, 32),
    "llama2-7b-flat-joint": (4096, 11008, 32, 32, 32),
    "llama2-13b": (5120, 13824, 40, 40, 40),
    "llama2-70b": (8192, 28672, 80, 64, 8),
    "llama3-8b": (4096, 14336, 32, 32, 8),
    "llama3-70b": (8192, 28672, 80, 64, 8),
    "mistral-7b": (4096, 14336, 32, 32, 8),
    "gptj-6b": (4096, 16384, 28, 16, 16),
    "opt-30b": (7168, 28672, 48, 56, 56),
    "quickstart": (256, 704, 6, 8, 4),
}


def published_config(name: str) -> dict[str, Any]:
    hidden, intermediate, layers, heads, groups = SIZES[name]
    family = name.partition("-")[0]
    common = {"torch_dtype": "bfloat16", "vocab_size": 50400, "num_hidden_layers": layers, "hidden_size": hidden}
    common |= {"num_attention_heads": heads, "max_position_embeddings": 4096}
    if family == "opt":
        return {"model_type": "opt", **common, "ffn_dim": intermediate, "word_embed_proj_dim": hidden}
    if family == "gptj":
        own = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 4096, "rotary_dim": 64}
        return {"model_type": "gptj", **common, **own, "n_inner": intermediate}
    kind = "mistral" if family == "mistral" else "llama"
    return {"model_type": kind, **common, "intermediate_size": intermediate, "num_key_value_heads": groups}


@pytest.mark.sample(4)
@pytest.mark.parametrize("rates", RATES, ids=["here", "gpu"])
@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job(path: Path, rates: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published_config(path.stem)), encoding="utf-8")
    geometry = geometry_of(standard_config(published_config(path.stem)), 16)
    found, shown = planned(capsys, str(path), "--config", str(config), *rates)
    check(found, shown)
    assert found["layers"] == geometry.num_layers
    assert found["dense_numbers"] == geometry.model_numbers()


@pytest.mark.slow
@pytest.mark.parametrize("rates", RATES, ids=["here", "gpu"])
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep(path: Path, rates: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small model in place of its own."""
    model = factories.make_model(tmp_path / "model", hidden_size=64, intermediate_size=160)
    text = factories.write_text(tmp_path / "text.txt", 60_000)
    settings = {
        "model.source": model,
        "output": tmp_path / "output",
        "run_dir": tmp_path / "run",
        "calibration.text.files": f"[{text}]",
        "calibration.sequence_length": 64,
        "evaluation.perplexity.text.files": f"[{text}]",
        "evaluation.perplexity.window": 64,
    }
    options = [part for field, value in settings.items() for part in ("--set", f"{field}={value}")]
    found, shown = planned(capsys, str(path), *options, *rates)
    check(found, shown)
    assert all(row["point"] in shown for row in found["points"])
    assert {"layers_per_commit", "committed_bytes"} <= found.keys()
    assert not (tmp_path / "run").exists()


def test_every_shipped_file_has_its_case() -> None:
    assert {path.stem for path in JOBS} == set(SIZES)
    assert SWEEPS
