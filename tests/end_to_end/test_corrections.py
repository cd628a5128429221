"""Jobs with `correct: output`: killed at every commit, on several workers and at another size, where what is solved is
rounded as well; on every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.children import Child, Hook, killed_again_and_again
from tests.end_to_end.jobs import Job, file_digests, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import FAMILIES, make_source

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
CORRECTED: dict[str, Any] = {
    "methods": [{"method": "loss_aware", "correct": "output"}],
    "calibration.propagate": "dense",
    "budget.keep": 0.6,
}
ROUNDED = {**CORRECTED, "quantize": {"bits": 4, "group": None}}
SHARDS, POINTS, MOST_RUNS = 2, 4, 60
SMALL = {"calibration.shards": 2, "calibration.samples": 8}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> dict[str, str]:
    """The output of one run without an interruption."""
    made = Job(tmp_path_factory.mktemp("clean"), llama, text, ROUNDED).write()
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert len(list((made.run_dir / "staged").iterdir())) <= LAYERS, "drafts are left"
    lines = [line for log in (made.run_dir / "logs").glob("*.units.jsonl") for line in log.read_text().splitlines()]
    done = [json.loads(line)["unit"] for line in lines]
    pairs = [
        f"pair/{layer}/{step}/{shard}" for layer in range(LAYERS) for step in range(POINTS) for shard in range(SHARDS)
    ]
    onward = [f"pair/{layer}/{POINTS}/{shard}" for layer in range(LAYERS - 1) for shard in range(SHARDS)]
    assert sorted(unit for unit in done if unit.startswith("pair/")) == sorted(pairs + onward)
    return file_digests(made.output)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("every", "hook"), [pytest.param(1, Hook("commit"), marks=pytest.mark.nightly), (2, Hook("commit", after=True))]
)
def test_killed_again_and_again_it_ends_the_same(
    every: int, hook: Hook, job: MakeJob, reference: dict[str, str]
) -> None:
    made = job(**ROUNDED, **{"resume.every": every})
    runs = list(killed_again_and_again(made, hook, MOST_RUNS))
    assert runs[-1] >= 3
    assert file_digests(made.output) == reference


@pytest.mark.nightly  # `test_job_variants.py` has two workers
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_for_any_number_of_workers(workers: int, job: MakeJob, reference: dict[str, str]) -> None:
    made = job(**ROUNDED, **{"workers.max": workers})
    assert made.run().code == 0
    assert file_digests(made.output) == reference


@pytest.mark.nightly
def test_another_budget_walks_again(job: MakeJob, inline: None, reference: dict[str, str]) -> None:
    """What came of the layers at one size is no input at another."""
    made = job(**ROUNDED)
    assert made.run("--set", "budget.keep=0.8").code == 0
    second = made.root / "second"
    ended = made.run("--set", f"output={second}")
    assert "phase statistics" not in ended.err
    assert "compress layer 0 committed" in ended.err
    assert file_digests(second) == reference


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_source_at_full_size(family: str, tmp_path: Path, job: MakeJob, inline: None) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    made = job(source, **{**CORRECTED, **SMALL, "budget.keep": 1.0})
    assert made.run().code == 0
    dense, compressed = load(source), load(made.output)
    ids = some_tokens(dense.config.vocab_size)
    assert relative_error(logits_of(compressed, ids), logits_of(dense, ids)) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path, job: MakeJob, inline: None) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    made = job(source, **CORRECTED, **SMALL)
    ended = made.run()
    assert ended.code == 0
    assert 0 < ended.json["held_out"]["divergence"] < 1.0
    dense, compressed = load(source), load(made.output)
    ids = some_tokens(dense.config.vocab_size)
    assert 0 < relative_error(logits_of(compressed, ids), logits_of(dense, ids)) < 1.3
