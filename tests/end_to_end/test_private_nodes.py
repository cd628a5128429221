"""A whole job on nodes that see nothing of the driver's but the job's own folders, and a head that does no work."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import factories
from tests.end_to_end.children import Child
from tests.end_to_end.clusters import head_node, private_node
from tests.end_to_end.jobs import Job, command, file_digests

pytestmark = pytest.mark.ray
WINDOW = 40


@pytest.fixture
def shared(tmp_path: Path, llama: Path) -> Path:
    """What all nodes see: the model, and where the job works. The texts are the driver's alone."""
    folder = tmp_path / "shared"
    shutil.copytree(llama, folder / "model")
    return folder


def test_run_and_evaluate(shared: Path, text: Path, tmp_path: Path, job: Callable[..., Job], inline: None) -> None:
    """Evaluation's tokens lay in the driver's temporary folder: all workers \"died\" when the layers were done."""
    scored = factories.write_text(tmp_path / "scored.txt", 6_000, seed=9)
    settings = {
        "calibration.shards": 4,
        "workers": {"min": 2, "max": 2, "activation_memory_gb": 1e-6},  # hidden states are spilled
        "evaluation": {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}},
    }
    alone = job(**settings)
    expected = alone.run().json["evaluation"]
    made = Job(shared / "job", shared / "model", text, settings).write()
    with (
        head_node(0, "--include-dashboard=false") as address,
        private_node(address, 1, shared),
        private_node(address, 1, shared),
    ):
        run = Child("run", [str(made.manifest), "--address", address, "--json"], made.root / "log", inline=False)
        assert run.end(240) == 0, run.said
        arguments = [str(made.output), "--text", str(scored), "--window", str(WINDOW), "--workers", "2"]
        arguments += ["--address", address, "--json"]
        evaluate = Child("evaluate", arguments, made.root / "evaluate.log", inline=False)
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
