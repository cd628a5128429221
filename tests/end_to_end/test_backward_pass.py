"""Jobs with a backward pass: killed at every commit, damaged, on several workers, solved again, on every family."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pipeline.methods.loss_aware import mlp_solver
from tests.end_to_end.children import Child, Hook, killed_again_and_again
from tests.end_to_end.jobs import Job, file_digests, load, logits_of, relative_error, some_tokens, work_done
from tests.end_to_end.sources import FAMILIES, make_source
from tests.failing_disk import flip

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
LOSS: dict[str, Any] = {"methods": [{"method": "loss_aware"}], "calibration.propagate": "dense"}
SHARDS, MOST_RUNS = 2, 60
SMALL = {"calibration.shards": 2, "calibration.samples": 8}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> dict[str, str]:
    """The output of one run without an interruption."""
    made = Job(tmp_path_factory.mktemp("clean"), llama, text, LOSS).write()
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert sorted(work_done(made)) == sorted(
        [f"forward/dense/{layer}/{shard}/dense" for layer in range(LAYERS) for shard in range(SHARDS)]
        + [f"backward/{layer}/{shard}" for layer in range(LAYERS) for shard in range(SHARDS)]
    )
    return file_digests(made.output)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("every", "hook"),
    [
        pytest.param(1, Hook("commit"), marks=pytest.mark.nightly),
        (2, Hook("commit", after=True)),
        (1, Hook("remove", nth=3)),
    ],
)
def test_killed_again_and_again_it_ends_the_same(
    every: int, hook: Hook, job: MakeJob, reference: dict[str, str]
) -> None:
    made = job(**LOSS, **{"resume.every": every})
    before: list[str] = []
    for run in killed_again_and_again(made, hook, MOST_RUNS):
        repeated = [unit for unit in work_done(made)[len(before) :] if unit in before]
        assert len(repeated) <= SHARDS * every, (run, repeated)
        before = work_done(made)
    assert run >= 3
    assert file_digests(made.output) == reference


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["statistics.zarr/layer-00001/gradient-*", "activations.zarr/inputs/layer-00001"])
@pytest.mark.nightly
def test_damage_is_repaired(kind: str, job: MakeJob, reference: dict[str, str]) -> None:
    """Stopped in the middle of the backward pass; then a sum of gradients, or a layer's stored input, is damaged."""
    made = job(**LOSS)
    hook = Hook("commit", match="curves/00000" if "statistics" in kind else "gradient/00002")
    assert Child("run", [str(made.manifest)], made.root / "log", hook).end() == -signal.SIGKILL
    for path in made.run_dir.glob(f"{kind}/**/c*"):
        if path.is_file():  # names of arrays are random, and begin with a c at times
            flip(path)
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert "repairing:" in child.said
    assert file_digests(made.output) == reference


@pytest.mark.nightly  # `test_job_variants.py` has two workers
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_for_any_number_of_workers(workers: int, job: MakeJob, reference: dict[str, str]) -> None:
    made = job(**LOSS, **{"workers.max": workers})
    assert made.run().code == 0
    assert file_digests(made.output) == reference


@pytest.mark.parametrize("correct", ["none", "output"])
def test_the_channels_of_an_mlp_are_eliminated_once(
    correct: str, job: MakeJob, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its curve; what solves and corrects it is told which of them stay."""
    eliminated: list[int] = []
    real = mlp_solver.eliminate

    def counted(moment: Tensor, *others: Any) -> Any:
        eliminated.append(len(moment))
        return real(moment, *others)

    monkeypatch.setattr(mlp_solver, "eliminate", counted)
    made = job(**{**LOSS, "methods": [{"method": "loss_aware", "correct": correct}]}, **{"budget.keep": 0.5})
    assert made.run().code == 0
    layers = made.compression()["layers"]
    assert any(layer["groups"]["mlp"]["ranks"]["width"] < eliminated[0] for layer in layers)
    assert len(eliminated) == len(layers)


@pytest.mark.nightly
def test_another_budget_takes_no_pass(job: MakeJob, inline: None) -> None:
    """Neither forwards nor backwards; an allocation is a budget, too."""
    made, clean = (job(**LOSS) for _ in range(2))
    assert made.run().code == 0
    second = made.root / "second"
    ended = made.run("--set", "budget.keep=0.85", "--set", f"output={second}")
    assert ended.json["seconds_saved"] > 0
    assert "phase gradient" not in ended.err
    assert "phase statistics" not in ended.err
    assert "curves layer" not in ended.err
    assert clean.run("--set", "budget.keep=0.85").code == 0
    assert file_digests(second) == file_digests(clean.output)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "model") for family in FAMILIES), *((family, "local") for family in ("qwen3", "opt", "gptj"))],
)
def test_every_family(family: str, kind: str, tmp_path: Path, job: MakeJob, inline: None) -> None:
    """Near the source where almost everything is kept, by either kind of gradients."""
    source = make_source(tmp_path / "source", family, layers=2)
    made = job(source, **LOSS, **SMALL, **{"budget.keep": 0.97, "calibration.gradient": {"kind": kind, "samples": 5}})
    ended = made.run()
    assert "gradient layer 0 committed" in ended.err
    dense, compressed = load(source), load(made.output)
    ids = some_tokens(dense.config.vocab_size)
    error = relative_error(logits_of(compressed, ids), logits_of(dense, ids))
    assert 0 < error < 1.0
    assert ended.json["held_out"]["divergence"] < 0.5
