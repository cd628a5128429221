"""A whole job on nodes that see nothing of the driver's but the job's own folders, and a head that does no work."""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import workers.pools
from tests import factories
from tests.end_to_end.children import Child
from tests.end_to_end.clusters import head_node, loopback, private_node
from tests.end_to_end.jobs import Job, command, file_digests
from workers.config import WorkerConfig
from workers.in_process_pool import InProcessPool

LAYERS = 3  # of the fixture `llama`
WINDOW = 40


@pytest.fixture
def shared(tmp_path: Path, llama: Path) -> Path:
    """What all nodes see: the model, and where the job works. The texts are the driver's alone."""
    folder = tmp_path / "shared"
    shutil.copytree(llama, folder / "model")
    return folder


class ElsewherePool(InProcessPool):
    """A worker to which a setup has travelled, and which finds nothing in the folder that evaluation made."""

    folder: Path

    def __init__(self, setup: WorkerConfig, *rest: Any) -> None:
        setup = pickle.loads(pickle.dumps(setup))
        super().__init__(setup if setup.manifest else replace(setup, run_dir=self.folder), *rest)


def test_evaluation_brings_its_tokens(
    tmp_path: Path, job: Callable[..., Job], inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a private temporary folder comes to, without a cluster: `run` and `evaluate` score the same."""
    scored = factories.write_text(tmp_path / "scored.txt", 6_000, seed=9)
    settings = {
        "workers": {"max": 1, "activation_memory_gb": 1e-6},
        "evaluation": {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}},
    }
    alone, made = job(**settings), job(**settings)
    expected = _losses(alone.run().json["evaluation"])
    ElsewherePool.folder = tmp_path / "elsewhere"
    monkeypatch.setattr(workers.pools, "InProcessPool", ElsewherePool)
    assert _losses(made.run().json["evaluation"]) == expected
    options = ("--text", str(scored), "--window", str(WINDOW), "--json")
    assert command("evaluate", str(made.output), *options).json["loss"] in expected


@pytest.mark.nightly
@pytest.mark.ray
def test_run_and_evaluate(shared: Path, text: Path, tmp_path: Path, job: Callable[..., Job], inline: None) -> None:
    """Evaluation's tokens lay in the driver's temporary folder: all workers \"died\" when the layers were done.

    The job goes forth and back through the model, and is scored on held-out text, too.
    """
    scored = factories.write_text(tmp_path / "scored.txt", 6_000, seed=9)
    settings = {
        "calibration.shards": 4,
        "calibration.propagate": "dense",
        "methods": [{"method": "loss_aware"}],
        "workers": {"min": 2, "max": 2, "activation_memory_gb": 1e-6},  # hidden states are spilled
        "evaluation": {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}},
    }
    alone = job(shared / "model", **{**settings, "workers": {"max": 1, "activation_memory_gb": 1e-6}})
    expected = alone.run().json["evaluation"]
    made = Job(shared / "job", shared / "model", text, settings).write()
    with (
        head_node(0, "--include-dashboard=false") as address,
        private_node(address, 1, shared),
        private_node(address, 1, shared),
    ):
        run = Child(
            "run",
            [str(made.manifest), "--address", address, "--json"],
            made.root / "log",
            inline=False,
            prepare=loopback,
        )
        assert run.end(240) == 0, run.said
        arguments = [str(made.output), "--text", str(scored), "--window", str(WINDOW)]
        arguments += ["--address", address, "--workers", "1", "--json"]
        evaluate = Child("evaluate", arguments, made.root / "evaluate.log", inline=False, prepare=loopback)
        assert evaluate.end(240) == 0, evaluate.said
    assert " died" not in run.said
    assert file_digests(made.output) == file_digests(alone.output)
    found = command("status", str(made.run_dir), "--json").json["summary"]["evaluation"]
    assert found == expected
    (loss,) = _losses(found)
    assert f'"loss": {loss}' in evaluate.said
    assert math.isfinite(loss)
    assert not list(made.run_dir.glob("evaluation-*"))


def _losses(found: object) -> list[float]:
    """Every `loss` in nested results."""
    if isinstance(found, dict):
        own = [found["loss"]] if isinstance(found.get("loss"), float) else []
        return own + [loss for value in found.values() for loss in _losses(value)]
    return []
