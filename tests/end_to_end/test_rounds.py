"""Jobs of two rounds: killed again and again, on several workers, at another size, on every family."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stores.ledger import Ledger
from tests.end_to_end.children import Child, Hook, killed_again_and_again
from tests.end_to_end.jobs import Job, file_digests, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import FAMILIES, make_source

MakeJob = Callable[..., Job]
ROUNDS: dict[str, Any] = {
    "methods": [{"method": "loss_aware", "rounds": 2}],
    "calibration.propagate": "dense",
    "budget.keep": 0.6,
}
LAYERS, SHARDS, MOST_RUNS = 3, 3, 80
SMALL = {"calibration.shards": 2, "calibration.samples": 8}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> dict[str, str]:
    """The output of one run without an interruption."""
    made = Job(tmp_path_factory.mktemp("clean"), llama, text, ROUNDS).write()
    child = Child("run", [str(made.manifest)], made.root / "log")
    assert child.end() == 0, child.said
    kinds = Counter(unit.partition("/")[0] for unit in units_of(made))
    assert kinds["backward"] == 2 * LAYERS * SHARDS
    assert kinds["predict"] == kinds["solve"] == 2 * 3 * LAYERS
    assert len([unit for unit in units_of(made) if unit.startswith("windowforward/draft/")]) == LAYERS * SHARDS
    assert len(list((made.run_dir / "staged").iterdir())) == LAYERS, "the draft is left"
    ledger = Ledger(made.run_dir / "ledger")
    assert {key.rpartition("/")[0] for key in ledger.keys("draft/")} == {"draft", "draft/curves"}
    return file_digests(made.output)


def units_of(made: Job) -> list[str]:
    lines = [line for log in (made.run_dir / "logs").glob("*.units.jsonl") for line in log.read_text().splitlines()]
    return [json.loads(line)["unit"] for line in lines]


@pytest.mark.parametrize(("every", "after"), [(1, False), (2, True)])
def test_killed_again_and_again_it_ends_the_same(
    every: int, after: bool, job: MakeJob, reference: dict[str, str]
) -> None:
    made = job(**ROUNDS, **{"resume.every": every})
    runs = list(killed_again_and_again(made, Hook("commit", after=after), MOST_RUNS))
    assert runs[-1] >= 3
    assert file_digests(made.output) == reference


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_bytes_for_any_number_of_workers(job: MakeJob, reference: dict[str, str]) -> None:
    made = job(**ROUNDS, **{"workers.max": 3})
    assert made.run().code == 0
    assert file_digests(made.output) == reference


@pytest.mark.usefixtures("inline")
def test_one_round_of_two_is_that_of_one(job: MakeJob, reference: dict[str, str]) -> None:
    """The first ends where a job of one round does; the second chooses otherwise, from the same statistics."""
    made = job(**ROUNDS)
    one = made.run("--set", "methods.0.rounds=1")
    assert one.code == 0
    ended = made.run("--set", f"output={made.root / 'second'}")
    assert ended.code == 0, ended.err
    assert file_digests(made.root / "second") == reference != file_digests(made.output)
    ledger = Ledger(made.run_dir / "ledger")
    assert made.compression()["layers"] is not None
    curves = [ledger.get(f"{kind}curves/00001") for kind in ("", "draft/")]
    assert curves[0] != curves[1]


@pytest.mark.usefixtures("inline")
def test_another_budget_makes_another_draft(job: MakeJob, reference: dict[str, str]) -> None:
    made = job(**ROUNDS)
    assert made.run("--set", "budget.keep=0.8").code == 0
    ended = made.run("--set", f"output={made.root / 'second'}")
    assert "phase statistics" not in ended.err
    assert "phase draft: 3 layers" in ended.err
    assert file_digests(made.root / "second") == reference


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [0.6, 1.0])
def test_every_family(family: str, keep: float, tmp_path: Path, job: MakeJob, inline: None) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    made = job(source, **{**ROUNDS, **SMALL, "budget.keep": keep})
    ended = made.run()
    assert ended.code == 0, ended.err
    dense, compressed = load(source), load(made.output)
    ids = some_tokens(dense.config.vocab_size)
    error = relative_error(logits_of(compressed, ids), logits_of(dense, ids))
    assert error < 1e-5 if keep == 1.0 else 0 < error < 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [{"method": "loss_aware", "rounds": 2, "mlp": False}, {"method": "flat_llm", "attention": False}]},
         "all methods need it"),
        ({"budget": {"max_loss": 0.1}}, "give keep"),
        ({"calibration.gradient": {"kind": "local"}}, "gradient.kind: local"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str, job: MakeJob, no_ray: None) -> None:
    ended = job(**{**ROUNDS, **({"budget.keep": None} if "budget" in changes else {}), **changes}).run()
    assert (ended.code, said in ended.err) == (2, True), ended.err
