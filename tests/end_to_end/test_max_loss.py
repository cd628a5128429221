"""A budget by loss: the smallest checkpoint within a limit, measured; killed between tries; refused where senseless."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.ranks.search import CLOSE
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import Job, file_digests

LAYERS = 3  # of the fixture `llama`
MakeJob = Callable[..., Job]
LIMIT = 0.05
WITHIN: dict[str, Any] = {
    "methods": [{"method": "loss_aware"}],
    "calibration.propagate": "dense",
    "budget": {"max_loss": LIMIT},
}


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory, llama: Any, text: Any) -> Job:
    made = Job(tmp_path_factory.mktemp("within"), llama, text, WITHIN).write()
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert child.said.count("phase statistics") == child.said.count("phase gradient: 3 layers") == 1
    return made


def test_the_smallest_size_within_the_limit(within: Job, job: MakeJob, inline: None) -> None:
    """The tries enclose it, and it is what that size gives when it is asked for by name."""
    summary = within.ledger("complete")["summary"]
    tries = {round(1000 * entry["keep"]): entry["divergence"] for entry in summary["tries"]}
    size = min(size for size, divergence in tries.items() if divergence <= LIMIT)
    short = max(other for other in tries if other < size)
    assert tries[short] > LIMIT
    assert size - short <= CLOSE
    assert len(tries) <= 12
    assert summary["held_out"]["divergence"] == tries[size]
    named = job(**{**WITHIN, "budget": {"keep": size / 1000}})
    assert named.run().json["held_out"]["divergence"] == tries[size]
    tensors = {name: digest for name, digest in file_digests(named.output).items() if name.endswith(".safetensors")}
    assert tensors == {name: digest for name, digest in file_digests(within.output).items() if name in tensors}


def test_both_models_are_compared_at_the_size_that_ships(within: Job) -> None:
    """A pass over both, side by side: no try needs it."""
    logs = [path.read_text().splitlines() for path in (within.run_dir / "logs").glob("*.units.jsonl")]
    units = [json.loads(line)["unit"] for lines in logs for line in lines]
    assert sum(unit.startswith("compare/") for unit in units) == 1
    assert units.count("write/0") > 1


@pytest.mark.nightly
def test_killed_between_tries_it_ends_the_same(within: Job, job: MakeJob) -> None:
    made = job(**WITHIN)
    kills = 0
    for match in ("target", "held_out", "tries/", "layer/00001", "held_out_score", "tries/"):
        child = Child("run", [str(made.manifest)], made.root / "log", Hook("commit", match=match, after=kills % 2 == 0))
        if child.end() == 0:
            break
        assert child.process.exitcode == -signal.SIGKILL, child.said
        kills += 1
    assert kills >= 4
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    assert file_digests(made.output) == file_digests(within.output)
    assert made.ledger("complete")["summary"]["tries"] == within.ledger("complete")["summary"]["tries"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [{"method": "flat_llm"}]}, "all methods must follow predicted loss"),
        ({"calibration.gradient": {"kind": "local"}}, "budget.max_loss"),
        ({"statistics": {"keep": False}}, "statistics.keep: false"),
        ({"budget": {"max_loss": 0.1, "keep": 0.5}}, "either `keep`, `bytes`, `max_loss` or `fit`"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str, job: MakeJob, no_ray: None) -> None:
    ended = job(**{**WITHIN, **changes}).run()
    assert (ended.code, said in ended.err) == (2, True), ended.err
