"""Other ranks after a dense pass: solved from the stored statistics without a forward pass, to the same bytes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, file_digests

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
DENSE = {"calibration.propagate": "dense"}
METHODS = {
    "flat_llm": {"method": "flat_llm"},
    "lorc": {"method": "lorc", "cache_keep": 0.5, "weighting": "input"},
    "lestd": {"method": "lestd", "weighting": "input"},
    "joint_rank_k": {"method": "joint_rank_k", "weighting": "input"},
}


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("flat_llm", "budget.keep=0.5"),
        pytest.param("flat_llm", "methods.0.allocation=uniform", marks=pytest.mark.nightly),
        ("flat_llm", "methods.0.ranks={value: 9, mlp: 40}"),
        ("lorc", "methods.0.cache_keep=0.75"),
        pytest.param("lestd", "budget.keep=0.8", marks=pytest.mark.nightly),
        pytest.param("joint_rank_k", "budget.keep=0.9", marks=pytest.mark.nightly),
    ],
)
def test_other_ranks_need_no_forward_pass(method: str, change: str, job: MakeJob, inline: None) -> None:
    methods = [METHODS[method]]
    budget = None if method == "lorc" else {"keep": 0.7}
    made, clean = (job(**DENSE, methods=methods, budget=budget) for _ in range(2))
    assert made.run().code == 0
    first = file_digests(made.output)
    second = made.root / "second"
    ended = made.run("--set", change, "--set", f"output={second}")
    assert ended.json["seconds_saved"] > 0
    assert "phase statistics" not in ended.err
    assert "s of forward passes saved" in ended.err
    assert clean.run("--set", change).json["seconds_saved"] == 0
    assert file_digests(second) == file_digests(clean.output) != first
    assert file_digests(made.output) == first
    refused = made.run()
    assert (refused.code, "holds a checkpoint" in refused.err) == (2, True), refused.err
    assert made.run("--set", change, "--set", f"output={second}").json["already_finished"] is True
    third = made.root / "third"
    back = made.run("--set", f"output={third}")
    assert back.json["seconds_saved"] == ended.json["seconds_saved"]
    assert "phase statistics" not in back.err
    assert file_digests(third) == first


def test_killed_at_every_commit_of_solving_again(job: MakeJob) -> None:
    """The first budget's output stays until the second's takes its place."""
    made, clean = job(**DENSE), job(**DENSE, **{"budget.keep": 0.5})
    for ready in (made, clean):
        child = Child("run", [str(ready.manifest)], ready.root / "log")
        assert child.end() == 0, child.said
    first, wanted = file_digests(made.output), file_digests(clean.output)
    log = made.root / "log.units"
    log.unlink()
    arguments = [str(made.manifest), "--set", "budget.keep=0.5"]
    for runs in range(40):
        child = Child("run", arguments, made.root / "log", Hook("commit", nth=2, after=runs % 2 == 1))
        code = child.end()
        assert code in (0, -signal.SIGKILL), child.said
        if code == 0:
            break
        if (made.output / "model.safetensors.index.json").exists():
            found = file_digests(made.output)
            assert {name: found[name] for name in found if not name.startswith(".lamina.lock")} in (first, wanted)
    assert 3 < runs < 39
    assert file_digests(made.output) == wanted
    assert not log.exists(), log.read_text()


def test_the_dense_pass_may_be_half_done(job: MakeJob) -> None:
    made, clean = job(**DENSE), job(**DENSE, **{"budget.keep": 0.5})
    child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match="dense/00002"))
    assert child.end() == -signal.SIGKILL
    for ready, options in ((made, ["--set", "budget.keep=0.5"]), (clean, [])):
        child = Child("run", [str(ready.manifest), *options], ready.root / "log")
        assert child.end() == 0, child.said
    assert file_digests(made.output) == file_digests(clean.output)
    work = Path(made.root / "log.units").read_text().splitlines()
    assert sum(unit.startswith("forward/dense/0") for unit in work) == 2


def test_what_the_statistics_depend_on_is_refused(job: MakeJob, inline: None) -> None:
    made, walked = job(**DENSE), job()
    assert made.run().code == 0
    assert walked.run().code == 0
    before = file_digests(made.output)
    for change in ("methods.0.basis=value", "methods.0.layers=last:2", "seed=4", "calibration.samples=9"):
        ended = made.run("--set", change, "--set", "budget.keep=0.5")
        assert (ended.code, "holds another job's work" in ended.err) == (2, True), ended.err
    ended = walked.run("--set", "budget.keep=0.5")
    assert (ended.code, "manifest.budget.keep: 0.7 -> 0.5" in ended.err) == (2, True), ended.err
    assert made.run().json["already_finished"] is True
    assert file_digests(made.output) == before
