"""A sweep: what a job of its own gives, for every point, from one pass over the text; killed, it goes on."""

from __future__ import annotations

import csv
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, command, file_digests

MakeJob = Callable[..., Job]
POINTS: list[dict[str, Any]] = [
    {"methods": [{"method": "flat_llm"}], "save": [0.6]},
    {"name": "loss", "methods": [{"method": "loss_aware"}], "quantize": [None, {"bits": 8}]},
    {"name": "joint", "methods": [{"method": "joint_rank_k"}]},
]


class Sweep:
    """A sweep on the model of a job, and where it works."""

    def __init__(self, job: Job, points: list[dict[str, Any]], **changes: Any) -> None:
        self.job = job
        document = job.document()
        del document["budget"], document["methods"]
        document["calibration"]["propagate"] = "dense"
        evaluation = {"perplexity": {"text": {"files": [str(job.text)]}, "window": 24}}
        self.document = {**document, "evaluation": evaluation, "keep": [0.8, 0.6], "points": points, **changes}
        self.path = job.root / "sweep.yaml"
        self.write()

    def write(self) -> Sweep:
        self.path.write_text(yaml.safe_dump(self.document))
        return self

    def run(self, *options: str) -> Any:
        return command("sweep", str(self.path), "--json", *options)

    def forwards(self) -> list[str]:
        """Shards of calibration text through the dense model, in all runs."""
        return [unit for unit in self.units() if unit.startswith(("forward/", "backward/"))]

    def units(self) -> list[str]:
        logs = sorted((self.job.run_dir / "logs").glob("*.units.jsonl"))
        return [json.loads(line)["unit"] for path in logs for line in path.read_text().splitlines()]


@pytest.fixture
def sweep(job: MakeJob) -> Callable[..., Sweep]:
    def make(*points: dict[str, Any], **changes: Any) -> Sweep:
        return Sweep(job(), list(points or POINTS), **changes)

    return make


def test_a_point_is_what_its_job_gives(sweep: Callable[..., Sweep], job: MakeJob, inline_everywhere: None) -> None:
    """The kept checkpoint byte for byte, the scores of the others to rounding; the text is gone through once."""
    made = sweep()
    found = made.run().json
    assert [row["point"] for row in found["points"]] == [
        "flat_llm-0.8", "flat_llm-0.6",
        "loss-0.8", "loss-0.8-int8", "loss-0.6", "loss-0.6-int8",
        "joint-0.8", "joint-0.6",
    ]  # fmt: skip
    assert not found["missing"]
    assert len(made.forwards()) == len(set(made.forwards()))
    rows = {row["point"]: row for row in found["points"]}
    dense = {"calibration.propagate": "dense", "evaluation": made.document["evaluation"]}
    single = job(**dense, **{"budget.keep": 0.6})
    summary = single.run().json
    assert summary["evaluation"]["perplexity"]["loss"] == pytest.approx(rows["flat_llm-0.6"]["loss"], rel=1e-6)
    assert summary["held_out"]["divergence"] == pytest.approx(rows["flat_llm-0.6"]["divergence"], rel=1e-6)
    assert summary["counts"] == rows["flat_llm-0.6"]["counts"]
    assert file_digests(single.output) == file_digests(made.job.output / "flat_llm-0.6")
    assert [path.name for path in made.job.output.iterdir()] == ["flat_llm-0.6"]
    other = job(**dense, methods=[{"method": "loss_aware"}], quantize={"bits": 8}, budget={"keep": 0.8})
    summary = other.run().json
    assert summary["evaluation"]["perplexity"]["loss"] == pytest.approx(rows["loss-0.8-int8"]["loss"], rel=1e-6)
    assert summary["counts"] == rows["loss-0.8-int8"]["counts"]
