"""Each point of a sweep equals its own job, from one pass over the text, also if healed or killed."""

from __future__ import annotations

import csv
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeline.sweeping.point_healing
from manifests.errors import StorageError
from pipeline.cost_model.prices import WORKERS_SECONDS
from stores.disk import Disk
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import MakeJob, Sweep, command, file_digests, interrupting, load
from tests.end_to_end.sources import make_source
from tests.evaluation.tasks import needs_lm_eval, write_task

POINTS: list[dict[str, Any]] = [
    {"methods": [{"method": "flat_llm"}], "save": [0.6]},
    {"name": "loss", "methods": [{"method": "loss_aware"}], "quantize": [None, {"bits": 8}]},
    {"name": "joint", "methods": [{"method": "joint_rank_k"}]},
]


@pytest.fixture
def sweep(job: MakeJob, scored: Path) -> Callable[..., Sweep]:
    def make(*points: dict[str, Any], source: Path | None = None, **changes: Any) -> Sweep:
        return Sweep(job(source) if source else job(), list(points or POINTS), scored, **changes)

    return make


def test_a_point_is_what_its_job_gives(sweep: Callable[..., Sweep], job: MakeJob, inline: None) -> None:
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


@pytest.mark.nightly
def test_killed_anywhere_it_goes_on(sweep: Callable[..., Sweep], inline: None) -> None:
    """Between points, in the midst of one, and while a checkpoint is put together: the same results, nothing twice."""
    points = [{"methods": [{"method": "flat_llm"}], "save": [0.6]}, {"methods": [{"method": "joint_rank_k"}]}]
    expected = sweep(*points)
    wanted = expected.run().json
    made = sweep(*points)
    kills = [
        Hook("commit", match="dense/00001"),
        Hook("commit", match="score/dense", after=True),
        Hook("commit", match="layer/00000", after=True),
        Hook("commit", match="/result"),
        Hook("file", match="config.json"),
        Hook("commit", match="layer/00001", after=True, nth=1),
        Hook("commit", match="/result", after=True),
    ]
    for number, hook in enumerate(kills):
        child = Child("sweep", [str(made.write())], made.job.root / f"log{number}", hook)
        assert child.end() == -signal.SIGKILL, child.said
    found = made.run().json
    assert _measured(found) == _measured(wanted)
    assert file_digests(made.job.output / "flat_llm-0.6") == file_digests(expected.job.output / "flat_llm-0.6")
    assert not list((made.job.run_dir / "staged").iterdir())
    writes = [unit for unit in made.units() if unit.startswith("write/")]
    assert len(writes) <= 4 * 2 + 3  # a layer that was in hand is done again, and nothing that was entered


def _measured(found: dict[str, Any]) -> list[dict[str, Any]]:
    """All but times, places, and what others have to do with it."""
    besides = {"seconds", "output", "best_by_bytes", "best_by_cache"}
    return [{name: row[name] for name in row.keys() - besides} for row in found["points"]]


def test_points_come_and_go(sweep: Callable[..., Sweep], inline: None) -> None:
    """Finished points stay valid when points are added before them, and only new points are computed."""
    first, second = {"methods": [{"method": "joint_rank_k"}]}, {"methods": [{"method": "flat_llm"}]}
    made = sweep(first)
    before = made.run().json
    assert made.forwards() == []  # nobody asked for moments
    done = len(made.units())
    made.document["points"] = [second, first]
    after = made.run().json
    assert _measured(after)[2:] == _measured(before)
    assert [row["series"] for row in after["points"]] == ["flat_llm"] * 2 + ["joint_rank_k"] * 2
    new = made.units()[done:]
    assert sum(unit.startswith("forward/") for unit in new) == 4  # two shards through two layers
    solves = [unit for unit in new if unit.startswith("solvesizes/")]
    assert len(solves) == len(set(solves)) == 4  # two groups of two layers, of both new points, no other
    made.document["points"] = [second]
    made.document["keep"] = [0.6]
    count = len(made.units())
    assert [row["point"] for row in made.run().json["points"]] == ["flat_llm-0.6"]
    assert len(made.units()) == count


def test_a_saved_point_gets_its_former_name_back(sweep: Callable[..., Sweep], inline: None) -> None:
    """Its checkpoint under that name is the sweep's own, and no other job's."""
    point: dict[str, Any] = {"name": "first", "methods": [{"method": "joint_rank_k"}], "keep": [0.6], "save": "all"}
    made = sweep(point, calibration=None)
    for name in ("first", "second", "first"):
        point["name"] = name
        assert [row["point"] for row in made.run().json["points"]] == [f"{name}-0.6"]
    first, second = (file_digests(made.job.output / f"{name}-0.6") for name in ("first", "second"))
    assert first == second


def test_what_is_written(sweep: Callable[..., Sweep], inline: None) -> None:
    """The files in RUN_DIR say the same; a finished sweep that is run again computes nothing."""
    made = sweep({"methods": [{"method": "joint_rank_k"}], "quantize": [{"bits": 8, "group": None}]}, calibration=None)
    found = made.run().json
    run_dir = made.job.run_dir
    assert json.loads((run_dir / "sweep.json").read_text())["points"] == found["points"]
    rows = list(csv.DictReader((run_dir / "sweep.csv").read_text().splitlines()))
    assert [row["point"] for row in rows] == [row["point"] for row in found["points"]]
    refused = command("report", str(run_dir))
    assert (refused.code, "the run directory of a sweep" in refused.err) == (2, True)
    for row, point in zip(rows, found["points"], strict=True):
        assert float(row["perplexity"]) == point["perplexity"] == math.exp(point["loss"])
        assert float(row["bytes_kept"]) == point["counts"]["bytes"]["compressed"] / point["counts"]["bytes"]["dense"]
        assert point["loss_over_dense"] == point["loss"] - found["dense"]["loss"]
        assert point["divergence"] is None
    count = len(made.units())
    shown = command("sweep", str(made.write()))
    assert (shown.code, len(made.units())) == (0, count)
    assert all(row["point"] in shown.out for row in rows)
    state = command("status", str(run_dir), "--json").json
    assert (state["points"], state["output"]) == ({"done": 2, "of": 2}, str(made.job.output))


@pytest.mark.nightly
def test_points_behind_their_own_layers_share_the_dense_pass(
    sweep: Callable[..., Sweep], tmp_path: Path, job: MakeJob, inline: None
) -> None:
    """Corrected, refined, and neither: one pass over the text, and each is its job byte for byte."""
    entries = {
        "plain": {"method": "loss_aware"},
        "corrected": {"method": "loss_aware", "correct": "output"},
        "refined": {"method": "loss_aware", "refine": {"steps": 6}},
        "dense": {"method": "loss_aware", "refine": {"steps": 6, "inputs": "dense"}},
        "mixed": {"method": "loss_aware", "refine": {"steps": 6, "inputs": "mixed"}},
    }
    points = [{"name": name, "methods": [entry], "save": "all"} for name, entry in entries.items()]
    source = make_source(tmp_path / "source", "llama", layers=2)
    made = sweep(*points, source=source, keep=[0.6])
    found = made.run().json
    assert len(made.forwards()) == len(set(made.forwards()))
    assert len([unit for unit in made.units() if unit.startswith("refine/")]) == 6
    predicted = [unit for unit in made.units() if unit.startswith("predict/")]
    assert len(predicted) == 2 * 6, "curves of three groups in two layers: one set with corrections, one without"
    dense = {"calibration.propagate": "dense", "evaluation": made.document["evaluation"], "budget.keep": 0.6}
    rows = {row["point"]: row for row in found["points"]}
    for name in ("corrected", "refined", "dense", "mixed"):
        single = job(source, **dense, methods=[entries[name]])
        assert single.run().code == 0
        assert file_digests(Path(rows[f"{name}-0.6"]["output"])) == file_digests(single.output)


@pytest.mark.parametrize(
    ("points", "changes", "said"),
    [
        (
            [{"methods": [{"method": "flat_llm"}]}],
            {"calibration": {"text": {"files": ["t"]}, "propagate": "compressed"}},
            ["calibration: propagate: compressed", "a job of its own"],
        ),
        ([{"methods": [{"method": "flat_llm", "ridg": 1}], "keep": [2.0]}], {"zz": 1}, ["ridg", "points.0.keep", "zz"]),
        ([{"methods": [{"method": "lorc"}]}] * 2, {}, ["2 are called lorc-0.8", "2 are called lorc-0.6"]),
        ([{"methods": [{"method": "lorc"}], "save": [0.5]}], {}, ["save: 0.5 is not among its sizes, 0.8, 0.6"]),
        ([{"methods": [{"method": "flat_llm"}]}], {"keep": []}, ["budget: missing", "in a sweep: keep"]),
        ([{"methods": [{"method": "flat_llm"}]}], {"calibration": None}, ["flat_llm-0.8", "calibration: missing"]),
        (
            [{"methods": [{"method": "lorc"}]}, {"methods": [{"method": "joint_rank_k", "layers": [9]}]}],
            {"keep": [0.9, 0.1]},
            ["lorc-0.1: budget.keep", "joint_rank_k-0.9, joint_rank_k-0.1: methods.0", "layers 0 to 1"],
        ),
        (
            [{"methods": [{"method": "lorc"}]}],
            {"evaluation": {"whole_model": True}},
            ["whole_model needs a checkpoint"],
        ),
        (
            [{"methods": [{"method": "lorc"}]}],
            {"evaluation": {}, "calibration": None, "keep": [0.8]},
            ["nothing to compare points on"],
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    points: list[dict[str, Any]], changes: dict[str, Any], said: list[str], sweep: Callable[..., Sweep], no_ray: None
) -> None:
    made = sweep(*points, **changes)
    ended = made.run()
    assert ended.code == 2
    assert [words for words in said if words not in ended.err] == [], ended.err
    assert not made.job.run_dir.exists()


@needs_lm_eval
@pytest.mark.nightly
def test_points_are_scored_on_tasks(sweep: Callable[..., Sweep], tmp_path: Path, inline: None) -> None:
    """From their staged layers, with the scores that `evaluate` gives the checkpoint; another task is scored anew."""
    task = write_task(tmp_path, "words")
    made = sweep({"methods": [{"method": "flat_llm"}], "save": [0.6]}, {"methods": [{"method": "svd"}]})
    made.document["evaluation"]["tasks"] = [str(task)]
    found = made.run().json
    rows = {row["point"]: row for row in found["points"]}
    saved = rows["flat_llm-0.6"]
    for model, scores in ((saved["output"], saved["tasks"]), (made.job.source, found["tasks"])):
        assert command("evaluate", str(model), "--tasks", str(task), "--json").json["tasks"][str(model)] == scores
    assert all(set(row["tasks"]) == {"words"} for row in rows.values())
    assert "words acc" in (made.job.run_dir / "sweep.csv").read_text().splitlines()[0]
    assert "words acc" in (made.job.run_dir / "sweep.html").read_text()
    write_task(tmp_path, "words", documents=5)
    task.write_text(task.read_text() + "# five documents\n")
    again = made.run().json
    assert {row["tasks"]["words"]["documents"] for row in again["points"]} == {5}


def test_another_calibration_is_refused_by_name(sweep: Callable[..., Sweep], inline: None) -> None:
    made = sweep({"methods": [{"method": "joint_rank_k"}]})
    assert made.run().code == 0
    made.document["calibration"]["samples"] = 9
    ended = made.run()
    assert (ended.code, "manifest.calibration.samples: 8 -> 9" in ended.err) == (2, True), ended.err
    assert made.run("--fresh").code == 0


@pytest.mark.nightly
@pytest.mark.ray
def test_killed_with_ray_it_goes_on(sweep: Callable[..., Sweep], inline: None) -> None:
    """Two workers, the driver and all of Ray killed behind the first point: the same figures as without either."""
    points = [{"methods": [{"method": "flat_llm"}]}, {"methods": [{"method": "svd_llm"}]}]
    expected = sweep(*points).run().json
    made = sweep(*points, workers={"min": 2, "max": 2})
    hook = Hook("commit", match="/result", after=True)
    child = Child("sweep", [str(made.write())], made.job.root / "log", hook, inline=False)
    assert child.end() == -signal.SIGKILL, child.said
    state = command("status", str(made.job.run_dir), "--json").json
    assert (state["state"], state["points"]) == ("killed", {"done": 1, "of": 4})
    child = Child("sweep", [str(made.write())], made.job.root / "log-2", inline=False)
    assert child.end() == 0, child.said
    assert "phase statistics" not in child.said
    assert _measured(json.loads((made.job.run_dir / "sweep.json").read_text())) == _measured(expected)


def test_what_a_sweep_would_take(sweep: Callable[..., Sweep], job: MakeJob, no_ray: None) -> None:
    """The passes once, curves once for the same methods, what each point takes besides; nothing is made."""
    made = sweep()
    found = command("plan", str(made.write()), "--json", "--gpu", "H200").json
    rows = {row["point"]: row for row in found["points"]}
    assert list(rows)[:3] == ["flat_llm-0.8", "flat_llm-0.6", "loss-0.8"]
    assert [label for label, row in rows.items() if row["output_bytes"]] == ["flat_llm-0.6"]
    assert found["output_bytes"] == rows["flat_llm-0.6"]["output_bytes"]
    phases = found["phases"]
    assert found["estimated_seconds"] == pytest.approx(sum(phases.values()))
    own = sum(phases[name] for name in ("solve", "assemble", "score"))
    assert sum(row["seconds"] for row in rows.values()) == pytest.approx(own)
    one = job(methods=[{"method": "loss_aware"}], **{"calibration.propagate": "dense", "budget.keep": 0.8})
    one.changes = {**one.changes, "evaluation": made.document["evaluation"]}
    alone = command("plan", str(one.write().manifest), "--json", "--gpu", "H200").json["phases"]
    evaluate = alone["evaluate"] - WORKERS_SECONDS  # a sweep scores with the workers that it has
    assert rows["loss-0.8"]["seconds"] == pytest.approx(alone["solve"] + alone["held-out"] / 2 + evaluate)
    assert alone["curves"] < phases["curves"] < 2.5 * alone["curves"], "with bits and without, at both sizes the same"
    assert phases["statistics"] >= alone["statistics"]
    assert phases["gradient"] == pytest.approx(alone["gradient"])
    assert not made.job.run_dir.exists()
    assert not made.job.output.exists()
    said = command("plan", str(made.write()), "--gpu", "H200").out
    assert all(label in said for label in rows)
    wrong = sweep({"methods": [{"method": "flat_llm", "widht": 3}]})
    assert "points.0.methods.0.widht" in command("plan", str(wrong.write())).err


def test_plots_have_their_folder_before_anything_is_computed(
    sweep: Callable[..., Sweep], tmp_path: Path, inline: None
) -> None:
    made, plots = sweep({"methods": [{"method": "svd"}]}, keep=[0.8, 0.6]), tmp_path / "missing" / "plots"
    (tmp_path / "file").write_text("")
    ended = made.run("--plots", str(tmp_path / "file" / "plots"))
    assert ended.code == 2
    assert f"--plots {tmp_path / 'file' / 'plots'}: cannot be used" in ended.err
    assert not made.job.run_dir.exists(), "nothing was begun"
    assert made.run("--plots", str(plots)).code == 0
    assert list(plots.glob("*.svg"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_finished_table_is_printed_whatever_fails_after_it(
    as_json: bool, sweep: Callable[..., Sweep], tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for the results, or for a plot."""
    made = sweep({"methods": [{"method": "svd"}]}, keep=[0.8, 0.6])
    options = ["--json"] if as_json else []
    replace = Disk.replace

    def fill(name: str) -> None:
        def refuse(disk: Disk, written: str, data: bytes) -> None:
            if written.endswith(name):
                raise StorageError(f"writing {written}: No space left on device")
            replace(disk, written, data)

        monkeypatch.setattr(Disk, "replace", refuse)

    fill("sweep.json")
    ended = command("sweep", str(made.write()), *options)
    assert ended.code == 1
    assert "svd-0.8" in ended.out
    fill(".svg")
    ended = command("sweep", str(made.write()), *options, "--plots", str(tmp_path / "plots"))
    assert ended.code == 1
    assert "svd-0.8" in ended.out
    assert json.loads((made.job.run_dir / "sweep.json").read_text())["points"]


# -- healing -----------------------------------------------------------------------------------------------------------


HEAL = {"epochs": 8, "learning_rate": 0.003}
POINT: dict[str, Any] = {"methods": [{"method": "flat_llm"}], "save": [0.7]}
ROUNDED: dict[str, Any] = {"methods": [], "keep": [], "quantize": [{"bits": 3}], "save": "all"}


@pytest.fixture
def healing(job: MakeJob, scored: Path, small_steps: None) -> Sweep:
    """A sweep of three points, two of them saved and healed."""
    return Sweep(job(), [POINT, ROUNDED], scored, heal=HEAL, keep=[0.7, 0.5])


def assert_phases_came_as_expected(expected: list[Any], etas: int) -> None:
    """Assert that the first estimate has all phases, and the last one those of the scores after the healing."""
    assert len(expected) == etas
    (observer, first, _), (_, last, _) = expected[0], expected[-1]
    assert {phase.phase for phase in first.planned} == set(observer.seconds) - {"checks", "verify"}
    assert last.begun == len(last.planned), last.planned
    assert all(phase.seconds > 0 for phase in first.planned)
    expected.clear()


def test_a_saved_point_is_healed_as_its_job_is(healing: Sweep, job: MakeJob, expected: list[Any]) -> None:
    healing.document["points"] = [POINT]
    ended = healing.run()
    found = ended.json
    assert_phases_came_as_expected(expected, etas=2)
    assert ended.err.count("phase score teacher") == 1
    rows = {row["point"]: row for row in found["points"]}
    assert not found["missing"]
    assert [name for name, row in rows.items() if row.get("healed")] == ["flat_llm-0.7"]
    row = rows["flat_llm-0.7"]
    single = job(
        heal=HEAL, evaluation=healing.document["evaluation"], **{"calibration.propagate": "dense", "budget.keep": 0.7}
    )
    summary = single.run().json
    assert_phases_came_as_expected(expected, etas=3)
    assert file_digests(single.output) == file_digests(Path(row["output"]))
    assert row["healed"]["loss"] == pytest.approx(summary["evaluation"]["perplexity"]["loss"], rel=1e-6)
    assert row["healed"]["divergence"] == pytest.approx(summary["held_out"]["divergence"], rel=1e-6)
    assert row["healed"]["divergence"] < row["divergence"]
    assert row["divergence"] == pytest.approx(single.ledger("held_out_score")["divergence"], rel=1e-6)
    load(Path(row["output"]))
    assert command("verify", row["output"], "--source", str(healing.job.source)).code == 0
    lines = (healing.job.run_dir / "sweep.csv").read_text().splitlines()
    by_point = {row["point"]: row for row in csv.DictReader(lines)}
    assert float(by_point["flat_llm-0.7"]["healed_divergence"]) == row["healed"]["divergence"]
    assert by_point["flat_llm-0.5"]["healed_divergence"] == ""
    assert "healed divergence" in (healing.job.run_dir / "sweep.html").read_text()
    assert len([*healing.job.run_dir.glob("staged/*")]) == 2, "the healed layers stay"
    again = healing.run()
    assert again.json["points"] == found["points"]
    assert "heal" not in again.err
    refused = command("heal", str(healing.job.run_dir))
    assert (refused.code, "if the sweep has `heal: {}`" in refused.err) == (2, True), refused.err


@pytest.mark.nightly
def test_killed_in_healing_it_goes_on_and_trains_nothing_twice(healing: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    del healing.document["heal"]
    healing.run()
    healing.document["heal"] = HEAL
    said = list[str]()
    for name, calls, done in (("train_layers", 2, 1), ("assemble_output", 1, 1), ("forget_work", 1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(*interrupting(pipeline.sweeping.point_healing, name, calls))
            ended = healing.run()
            said.append(ended.err)
            assert ended.code == 75
            state = command("status", str(healing.job.run_dir), "--json").json
            assert (state["points"], state["state"]) == ({"done": done, "of": 3}, "interrupted")
    ended = healing.run()
    said.append(ended.err)
    assert "".join(said).count("heal step 16 of 16") == 2
    assert [bool(row.get("healed")) for row in ended.json["points"]] == [True, False, True]
    assert ended.json["points"][0]["healed"]["best_step"]
    healing.document["evaluation"] = {"perplexity": {**healing.document["evaluation"]["perplexity"], "window": 16}}
    other = healing.run()
    assert "heal step" not in other.err
    (first, *_) = other.json["points"]
    assert first["healed"]["divergence"] == ended.json["points"][0]["healed"]["divergence"] < first["divergence"]
    assert first["healed"]["loss"] != ended.json["points"][0]["healed"]["loss"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"points": [{"methods": [{"method": "svd"}]}]}, "heal: trains saved points, and no point is saved"),
        ({"heal": {"tokens": 100_000}}, "flat_llm-0.7, rounded-int3: heal.tokens: 100000: the text has 192 tokens"),
    ],
)
def test_a_healing_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str, healing: Sweep) -> None:
    healing.document |= changes
    ended = healing.run()
    assert (ended.code, said in ended.err) == (2, True), ended.err


def test_the_plan_counts_the_healing_of_saved_points(healing: Sweep, no_ray: None) -> None:
    healed = _planned(healing)
    rows = {row["point"]: row for row in healed["points"]}
    assert set(rows) == {"flat_llm-0.7", "flat_llm-0.5", "rounded-int3"}
    assert healed["phases"]["score teacher"] > 0
    assert healed["healing_tokens"] == 192
    del healing.document["heal"]
    plain = _planned(healing)
    assert "heal" not in plain["phases"]
    more = {row["point"]: rows[row["point"]]["seconds"] - row["seconds"] for row in plain["points"]}
    assert more["flat_llm-0.5"] == 0
    assert more["flat_llm-0.7"] > healed["phases"]["heal"] / 3
    assert sum(more.values()) == pytest.approx(
        healed["phases"]["heal"] + healed["phases"]["score"] - plain["phases"]["score"]
    )
    assert healed["estimated_seconds"] == pytest.approx(sum(healed["phases"].values()))


def _planned(healing: Sweep) -> Any:
    return command("plan", str(healing.write()), "--json", "--gpu", "H200").json
