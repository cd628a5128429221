"""Healing in a sweep: each saved point as its own job would be healed; killed, it goes on."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeline.sweeping.point_healing
from pipeline.console.eta import Eta
from pipeline.console.progress import JobObserver
from tests.end_to_end.jobs import Job, command, file_digests, load

MakeJob = Callable[..., Job]
HEAL = {"epochs": 8, "learning_rate": 0.003}
POINT: dict[str, Any] = {"methods": [{"method": "flat_llm"}], "save": [0.7]}
ROUNDED: dict[str, Any] = {"methods": [], "keep": [], "quantize": [{"bits": 3}], "save": "all"}


class Sweep:
    """A sweep of three points, two of them saved and healed."""

    def __init__(self, job: Job, scored: Path) -> None:
        self.job = job
        document = job.document()
        del document["budget"], document["methods"]
        document["calibration"]["propagate"] = "dense"
        self.evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": 24}}
        self.document = {**document, "evaluation": self.evaluation, "heal": HEAL, "keep": [0.7, 0.5]}
        self.document["points"] = [POINT, ROUNDED]
        self.path = job.root / "sweep.yaml"

    def run(self) -> Any:
        self.path.write_text(json.dumps(self.document))
        return command("sweep", str(self.path), "--json")


@pytest.fixture
def sweep(job: MakeJob, scored: Path, small_steps: None) -> Sweep:
    return Sweep(job(), scored)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobObserver, Eta]]:
    """Return the growing list of estimates of the remaining time."""
    etas: list[tuple[JobObserver, Eta]] = []
    expect = JobObserver.expect

    def kept(self: JobObserver, eta: Eta) -> None:
        expect(self, eta)
        etas.append((self, eta))

    monkeypatch.setattr(JobObserver, "expect", kept)
    return etas


def assert_phases_came_as_expected(expected: list[tuple[JobObserver, Eta]], etas: int) -> None:
    """Assert that the first estimate has all phases, and the last one those of the scores after the healing."""
    assert len(expected) == etas
    (observer, first), (_, last) = expected[0], expected[-1]
    assert {phase.phase for phase in first.planned} == set(observer.seconds) - {"checks", "verify"}
    assert last.begun == len(last.planned), last.planned
    assert all(phase.seconds > 0 for phase in first.planned)
    expected.clear()


def test_a_saved_point_is_healed_as_its_job_is(
    sweep: Sweep, job: MakeJob, expected: list[tuple[JobObserver, Eta]]
) -> None:
    sweep.document["points"] = [POINT]
    ended = sweep.run()
    found = ended.json
    assert_phases_came_as_expected(expected, etas=2)
    assert ended.err.count("phase score teacher") == 1
    rows = {row["point"]: row for row in found["points"]}
    assert not found["missing"]
    assert [name for name, row in rows.items() if row.get("healed")] == ["flat_llm-0.7"]
    row = rows["flat_llm-0.7"]
    single = job(heal=HEAL, evaluation=sweep.evaluation, **{"calibration.propagate": "dense", "budget.keep": 0.7})
    summary = single.run().json
    assert_phases_came_as_expected(expected, etas=3)
    assert file_digests(single.output) == file_digests(Path(row["output"]))
    assert row["healed"]["loss"] == pytest.approx(summary["evaluation"]["perplexity"]["loss"], rel=1e-6)
    assert row["healed"]["divergence"] == pytest.approx(summary["held_out"]["divergence"], rel=1e-6)
    assert row["healed"]["divergence"] < row["divergence"]
    assert row["divergence"] == pytest.approx(single.ledger("held_out_score")["divergence"], rel=1e-6)
    load(Path(row["output"]))
    assert command("verify", row["output"], "--source", str(sweep.job.source)).code == 0
    lines = (sweep.job.run_dir / "sweep.csv").read_text().splitlines()
    by_point = {row["point"]: row for row in csv.DictReader(lines)}
    assert float(by_point["flat_llm-0.7"]["healed_divergence"]) == row["healed"]["divergence"]
    assert by_point["flat_llm-0.5"]["healed_divergence"] == ""
    assert "healed divergence" in (sweep.job.run_dir / "sweep.html").read_text()
    assert len([*sweep.job.run_dir.glob("staged/*")]) == 2, "the healed layers stay"
    again = sweep.run()
    assert again.json["points"] == found["points"]
    assert "heal" not in again.err
    refused = command("heal", str(sweep.job.run_dir))
    assert (refused.code, "add `heal: {}` to the sweep" in refused.err) == (2, True), refused.err


@pytest.mark.nightly
def test_killed_it_goes_on_and_trains_nothing_twice(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    del sweep.document["heal"]
    sweep.run()
    sweep.document["heal"] = HEAL
    said = list[str]()
    for name, calls, done in (("train_layers", 2, 1), ("assemble_output", 1, 1), ("forget_work", 1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline.sweeping.point_healing, name, _dying(name, calls))
            ended = sweep.run()
            said.append(ended.err)
            assert ended.code == 75
            state = command("status", str(sweep.job.run_dir), "--json").json
            assert (state["points"], state["state"]) == ({"done": done, "of": 3}, "interrupted")
    ended = sweep.run()
    said.append(ended.err)
    assert "".join(said).count("heal step 16 of 16") == 2
    assert [bool(row.get("healed")) for row in ended.json["points"]] == [True, False, True]
    assert ended.json["points"][0]["healed"]["best_step"]
    sweep.document["evaluation"] = {"perplexity": {**sweep.evaluation["perplexity"], "window": 16}}
    other = sweep.run()
    assert "heal step" not in other.err
    (first, *_) = other.json["points"]
    assert first["healed"]["divergence"] == ended.json["points"][0]["healed"]["divergence"] < first["divergence"]
    assert first["healed"]["loss"] != ended.json["points"][0]["healed"]["loss"]


def _dying(name: str, calls: int) -> Callable[..., Any]:
    real, done = getattr(pipeline.sweeping.point_healing, name), list[int]()

    def call(*arguments: Any) -> Any:
        done.append(1)
        if len(done) == calls:
            raise KeyboardInterrupt
        return real(*arguments)

    return call


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"points": [{"methods": [{"method": "svd"}]}]}, "heal: trains saved points, and no point is saved"),
        ({"heal": {"tokens": 100_000}}, "flat_llm-0.7, rounded-int3: heal.tokens: 100000: the text has 192 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str, sweep: Sweep) -> None:
    sweep.document |= changes
    ended = sweep.run()
    assert (ended.code, said in ended.err) == (2, True), ended.err


def test_the_plan_counts_the_healing_of_saved_points(sweep: Sweep, no_ray: None) -> None:
    healed = _planned(sweep)
    rows = {row["point"]: row for row in healed["points"]}
    assert set(rows) == {"flat_llm-0.7", "flat_llm-0.5", "rounded-int3"}
    assert healed["phases"]["score teacher"] > 0
    assert healed["healing_tokens"] == 192
    del sweep.document["heal"]
    plain = _planned(sweep)
    assert "heal" not in plain["phases"]
    more = {row["point"]: rows[row["point"]]["seconds"] - row["seconds"] for row in plain["points"]}
    assert more["flat_llm-0.5"] == 0
    assert more["flat_llm-0.7"] > healed["phases"]["heal"] / 3
    assert sum(more.values()) == pytest.approx(
        healed["phases"]["heal"] + healed["phases"]["score"] - plain["phases"]["score"]
    )
    assert healed["estimated_seconds"] == pytest.approx(sum(healed["phases"].values()))


def _planned(sweep: Sweep) -> Any:
    sweep.path.write_text(json.dumps(sweep.document))
    return command("plan", str(sweep.path), "--json", "--gpu", "H200").json
