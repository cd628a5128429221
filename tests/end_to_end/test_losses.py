"""Models that lose too much: perplexities beyond float64, and a damage that every command says."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from manifests.records import INFINITY
from pipeline.checkpoint.publishing import card_metadata
from tests import factories
from tests.end_to_end.jobs import Job, command

pytestmark = pytest.mark.usefixtures("inline")
MakeJob = Callable[..., Job]


def strict(text: str) -> Any:
    """JSON as its standard has it."""

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """A model whose logits are so large that it loses thousands of nats per token."""
    source = factories.make_model(tmp_path / "source", tie_word_embeddings=False)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float32) * 1e5
            save_file(tensors, path, {"format": "pt"})
    return source


def scored_on(text: Path) -> dict[str, Any]:
    return {"perplexity": {"text": {"files": [str(text)]}, "window": 16, "dense": True}}


def test_an_infinite_perplexity_is_said_with_its_loss(loud: Path, scored: Path, job: MakeJob) -> None:
    made = job(loud, evaluation=scored_on(scored))
    ended = made.run()
    assert ended.code == 0, ended.err
    summary = strict(ended.out)
    for found in (summary["held_out"], summary["evaluation"]["perplexity"], summary["evaluation"]["dense"]):
        assert found["perplexity"] == INFINITY
        assert found["loss"] > 709.8
        assert float(found["perplexity"]) == float("inf")
    assert summary["held_out"]["dense_perplexity"] == INFINITY
    assert "perplexity infinite (loss " in ended.err
    again = command("run", str(made.manifest))
    assert again.code == 0, again.err
    assert again.out.count("infinite (loss ") == 4
    assert "times" not in again.out
    for path in (made.run_dir / "ledger").glob("*.json"):
        strict(path.read_text())
    strict(command("status", str(made.run_dir), "--json").out)
    strict(command("report", str(made.run_dir), "--json").out)
    page = (made.run_dir / "report.html").read_text()
    assert "infinite" in page
    assert "Infinity" not in page
    strict((made.output / "compression.json").read_text())
    metadata = card_metadata(made.compression(), "user/name", None, summary["evaluation"], "text")
    results = metadata["model-index"][0]["results"]
    assert {metric["type"] for result in results for metric in result["metrics"]} == {"loss"}
    assert all(metric["value"] > 709.8 for result in results for metric in result["metrics"])


def test_evaluate_says_infinity(loud: Path, scored: Path) -> None:
    asked = ["evaluate", str(loud), "--text", str(scored), "--window", "16"]
    found = strict(command(*asked, "--json").out)
    assert (found["perplexity"], found["loss"] > 709.8) == (INFINITY, True)
    assert "perplexity infinite (loss " in command(*asked).out


def test_a_sweep_of_infinite_points(loud: Path, text: Path, scored: Path, tmp_path: Path) -> None:
    document = Job(tmp_path, loud, text, {"calibration.propagate": "dense", "evaluation": scored_on(scored)}).document()
    del document["budget"], document["methods"]
    points = [{"methods": [{"method": "svd"}], "keep": [0.8, 0.6]}]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**document, "points": points}))
    ended = command("sweep", str(tmp_path / "sweep.yaml"), "--plots", str(tmp_path))
    assert ended.code == 0, ended.err
    found = strict((tmp_path / "run" / "sweep.json").read_text())
    assert [row["perplexity"] for row in found["points"]] == [INFINITY, INFINITY]
    assert found["dense"]["perplexity"] == INFINITY
    rows = list(csv.DictReader((tmp_path / "run" / "sweep.csv").read_text().splitlines()))
    assert [float(row["perplexity"]) for row in rows] == [float("inf")] * 2
    assert "inf" in ended.out
    assert not list(tmp_path.glob("perplexity-*.svg"))  # no axis holds them
    assert list(tmp_path.glob("loss_over_dense-*.svg"))


def test_a_damaged_model_is_said_to_be_so(shared_dir: Path, job: MakeJob, scored: Path) -> None:
    """By the summary, `status`, the log and the report, where a person reads and in JSON; not of a sound one."""
    source = shared_dir / "models" / "babyllama-361"
    methods = [{"method": "asvd"}]
    damaged, sound = (job(source, methods=methods, budget={"keep": keep}) for keep in (0.05, 1.0))
    for made, expected in ((damaged, 1), (sound, 0)):
        summary = strict(made.run().out)
        assert len(summary["warnings"]) == expected
        if expected:
            rise = summary["held_out"]["loss"] - summary["held_out"]["dense_loss"]
            assert f"{rise:.3g} more than the dense model's" in summary["warnings"][0]
        said = "WARNING: the compressed model is badly damaged: its loss on held-out calibration text is"
        assert command("run", str(made.manifest)).out.count(said) == expected
        assert command("status", str(made.run_dir)).out.count(said) >= expected
        assert strict(command("status", str(made.run_dir), "--json").out)["warnings"] == summary["warnings"]
        log = "".join(path.read_text() for path in (made.run_dir / "logs").glob("*.log"))
        assert log.count(said) == expected
        assert command("report", str(made.run_dir)).code == 0
        assert ("<b>WARNING" in (made.run_dir / "report.html").read_text()) == bool(expected)


def test_a_damaged_point_of_a_sweep_is_named(shared_dir: Path, text: Path, tmp_path: Path) -> None:
    source = shared_dir / "models" / "babyllama-361"
    document = Job(tmp_path, source, text, {"calibration.propagate": "dense"}).document()
    del document["budget"], document["methods"]
    points = [{"methods": [{"method": "svd"}], "keep": [1.0, 0.05]}]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**document, "points": points}))
    ended = command("sweep", str(tmp_path / "sweep.yaml"))
    assert ended.code == 0, ended.err
    assert "WARNING: 1 of 2 points are badly damaged" in ended.out
    assert "dense model's: svd-0.05" in ended.out
    found = strict((tmp_path / "run" / "sweep.json").read_text())
    assert [row["damaged"] for row in found["points"]] == [False, True]
    assert "1 of 2 points are badly damaged" in (tmp_path / "run" / "sweep.html").read_text()
