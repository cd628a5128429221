"""A finished job that is run again: scores that are missing, and layers that are reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.evaluation.task_scores import AskedTasks
from pipeline.inputs.calibration import seen_share
from tests import factories
from tests.end_to_end.children import Child, Hook
from tests.end_to_end.jobs import MakeJob, command, file_digests
from tests.end_to_end.sources import make_source
from tests.evaluation.tasks import needs_lm_eval, write_task


def asked(*files: Path, window: int = 40, **fields: Any) -> dict[str, Any]:
    return {"perplexity": {"text": {"files": [str(file) for file in files]}, "window": window, **fields}}


def evaluated(model: Path, text: Path, window: int = 40) -> float:
    arguments = (str(model), "--text", str(text), "--window", str(window), "--json")
    return float(command("evaluate", *arguments).json["perplexity"])


@pytest.mark.usefixtures("inline")
def test_a_finished_job_scores_what_is_missing_and_only_that(tmp_path: Path, job: MakeJob, text: Path) -> None:
    one, other = (factories.write_text(tmp_path / f"{seed}.txt", 4_000, seed) for seed in (8, 9))
    made = job()
    assert made.run().json["evaluation"] == {}
    before = file_digests(made.output)

    first = made.scored(asked(one))
    assert first.json["already_finished"] is True
    assert first.json["scored_now"] is True
    assert first.json["evaluation"]["perplexity"]["perplexity"] == evaluated(made.output, one)
    assert "phase evaluate" in first.err
    assert "phase compress" not in first.err

    repeated = made.scored(asked(one))
    assert repeated.json["evaluation"] == first.json["evaluation"]
    assert "scored_now" not in repeated.json
    assert "phase" not in repeated.err

    second = made.scored(asked(other))
    assert second.json["evaluation"]["perplexity"]["perplexity"] == evaluated(made.output, other)
    assert second.json["evaluation"]["earlier"] == [first.json["evaluation"]["perplexity"]]

    wider = made.scored(asked(other, window=80))
    assert wider.json["evaluation"]["perplexity"]["window"] == 80
    assert wider.json["evaluation"]["perplexity"]["perplexity"] == evaluated(made.output, other, 80)
    assert len(wider.json["evaluation"]["earlier"]) == 2

    back = made.scored(asked(one))
    assert "phase" not in back.err
    assert back.json["evaluation"]["perplexity"] == first.json["evaluation"]["perplexity"]
    assert len(back.json["evaluation"]["earlier"]) == 2

    one.write_text(other.read_text() + one.read_text())  # the same name, another text
    changed = made.scored(asked(one))
    assert changed.json["evaluation"]["perplexity"]["perplexity"] == evaluated(made.output, one)
    assert len(changed.json["evaluation"]["earlier"]) == 3

    dense = made.scored(asked(one, dense=True))
    assert dense.json["evaluation"]["dense"]["perplexity"] == evaluated(made.source, one)
    assert dense.json["evaluation"]["perplexity"] == changed.json["evaluation"]["perplexity"]
    assert made.scored(asked(one)).json["evaluation"]["dense"] == dense.json["evaluation"]["dense"]  # known is shown
    assert file_digests(made.output) == before
    state = command("status", str(made.run_dir), "--json").json
    assert state["summary"]["evaluation"] == dense.json["evaluation"]


@pytest.mark.usefixtures("inline")
def test_a_missing_text_is_an_error_before_and_after_the_job(tmp_path: Path, job: MakeJob) -> None:
    made = job()
    for _ in range(2):
        ended = made.scored(asked(tmp_path / "nowhere.txt"))
        assert (ended.code, "nowhere.txt: missing" in ended.err) == (2, True), ended.err
        assert not (made.run_dir / "staged").exists() or made.output.exists()
        assert made.run().code == 0


@pytest.mark.usefixtures("inline")
def test_other_ranks_have_other_scores(tmp_path: Path, job: MakeJob) -> None:
    one = factories.write_text(tmp_path / "one.txt", 4_000, 8)
    made = job(evaluation=asked(one), **{"calibration.propagate": "dense"})
    first = made.run().json["evaluation"]
    second = made.run("--set", "budget.keep=0.5", "--set", f"output={made.root / 'second'}").json["evaluation"]
    assert second["perplexity"]["perplexity"] != first["perplexity"]["perplexity"]
    assert "earlier" not in second


@pytest.mark.usefixtures("inline")
def test_calibration_text_as_evaluation_text_is_said(tmp_path: Path, job: MakeJob, text: Path) -> None:
    copy = tmp_path / "another-name.txt"
    copy.write_text(text.read_text()[:6_000])
    many = {"calibration.samples": 300, "calibration.shards": 1, "calibration.micro_batch": 100}
    ended = job(evaluation=asked(copy), **many).run()
    assert ended.json["evaluation"]["perplexity"]["seen"] > 0.2
    assert "of the evaluation text occurs in the calibration samples" in ended.err
    fresh = factories.write_text(tmp_path / "fresh.txt", 6_000, 99)
    ended = job(evaluation=asked(fresh), **many).run()
    assert ended.json["evaluation"]["perplexity"]["seen"] < 0.1
    assert "occurs in the calibration samples" not in ended.err


def test_seen_share_counts_passages_wherever_they_begin() -> None:
    generator = torch.Generator().manual_seed(0)
    calibration = torch.randint(0, 1000, (4, 100), generator=generator)
    fresh = torch.randint(0, 1000, (3, 50), generator=generator)
    assert seen_share(calibration, fresh) == 0.0
    assert seen_share(calibration, calibration[:2, 7:57]) == 1.0
    mixed = torch.cat([calibration[:1, 3:53], fresh])
    assert seen_share(calibration, mixed) == 0.25
    half = torch.cat([calibration[:1, :41], fresh[:1, :9]], dim=1)
    assert seen_share(calibration, half) == pytest.approx((41 - 24) / 26)  # passages of half a window
    assert seen_share(calibration[:, :8], calibration[:1, :8]) == 1.0
    assert seen_share(calibration[:, :24], calibration[:, 6:20]) == 1.0


def test_killed_after_a_score_was_entered(tmp_path: Path, job: MakeJob) -> None:
    """Entered scores are not measured again, and scratch data is removed."""
    one = factories.write_text(tmp_path / "one.txt", 4_000, 8)
    made = job(evaluation=asked(one, dense=True))
    for place in ("score/output", "score/dense"):
        child = Child("run", [str(made.manifest)], tmp_path / place[-5:], Hook("commit", match=place, after=True))
        assert child.end() != 0, child.said
        assert child.said.count("phase evaluate") == 1, child.said
    child = Child("run", [str(made.manifest)], tmp_path / "last")
    assert child.end() == 0, child.said
    assert "phase evaluate" not in child.said
    assert not list(made.run_dir.glob("evaluation-*"))


@pytest.mark.usefixtures("inline")
def test_tasks_of_both_models_are_scored_once(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's requests to lm-eval and its output. lm-eval itself: tests/evaluation/test_task_scores.py."""
    asked_for: list[str] = []
    asked_as: list[tuple[int | None, int | None]] = []

    def score(model: str, asked: AskedTasks, scoring: Any, **options: Any) -> dict[str, Any]:
        tasks = asked.tasks
        asked_for.append(model)
        asked_as.append((asked.fewshot, asked.limit))
        return {
            task: {"documents": 9, "metrics": {"acc": {"value": len(asked_for) / 4, "stderr": 0.125}}} for task in tasks
        }

    monkeypatch.setattr("pipeline.inputs.job_inputs.check_tasks", lambda tasks, field, whole=None: None)
    monkeypatch.setattr("pipeline.job.output_scores.load_tasks", lambda asked, generates: None)
    monkeypatch.setattr("pipeline.job.output_scores.score_streamed", score)
    made = job(evaluation={"tasks": ["arc_easy"]})
    found = made.run().json["evaluation"]["tasks"]
    assert asked_for == [str(made.output), str(made.source)]
    assert found["compressed"]["arc_easy"] == {"documents": 9, "metrics": {"acc": {"value": 0.25, "stderr": 0.125}}}
    assert found["dense"]["arc_easy"]["metrics"]["acc"]["value"] == 0.5
    assert made.run().json["evaluation"]["tasks"] == found
    assert len(asked_for) == 2, "a finished job asks nothing twice"
    assert "scored_now" in made.scored({"tasks": ["piqa"]}).json
    assert len(asked_for) == 4
    settings = {"tasks": ["arc_easy"], "fewshot": 2, "limit": 9}
    assert "scored_now" in made.scored(settings).json
    assert len(asked_for) == 6
    assert asked_as[-1] == (2, 9)
    assert made.run().json["evaluation"]["tasks"] == found, "without settings, the first scores"
    assert len(asked_for) == 6
    assert "arc   acc" not in made.scored({}).out


@needs_lm_eval
@pytest.mark.usefixtures("inline")
def test_documents_that_cannot_be_loaded_are_refused_before_any_layer(tmp_path: Path, job: MakeJob) -> None:
    task = write_task(tmp_path, "words")
    (tmp_path / "words.jsonl").unlink()
    made = job(evaluation={"tasks": [str(task)]})
    refused = made.run()
    assert refused.code == 2
    assert f"evaluation.tasks: {task}: cannot be loaded" in refused.err
    assert not list((made.run_dir / "staged").glob("*"))


@needs_lm_eval
@pytest.mark.nightly
@pytest.mark.usefixtures("inline")
def test_killed_between_two_layers_of_a_pass_of_tasks(tmp_path: Path, job: MakeJob) -> None:
    """The pass goes on behind the last committed layer, and the job's scores are those of `evaluate`."""
    task = write_task(tmp_path, "words")
    made = job(evaluation={"tasks": [str(task)]})
    hook = Hook("commit", match="scored/tasks/00001", after=True)
    child = Child("run", [str(made.manifest)], tmp_path / "killed", hook)
    assert child.end() != 0, child.said
    assert "tasks: the compressed model, layer by layer" in child.said
    child = Child("run", [str(made.manifest), "--json"], tmp_path / "again")
    assert child.end() == 0, child.said
    assert child.said.count("score tasks layer 1 committed") == 2
    assert child.said.count("score tasks layer 0 committed") == 1, "only of the dense model"
    assert not (made.run_dir / "tasks").exists()
    scores = made.run().json["evaluation"]["tasks"]
    for which, model in (("compressed", made.output), ("dense", made.source)):
        direct = command("evaluate", str(model), "--tasks", str(task), "--json").json["tasks"][str(model)]
        assert scores[which] == direct


DENSE: dict[str, Any] = {"calibration.propagate": "dense"}
EXPERTS: dict[str, Any] = {"budget": {"keep": 0.7, "scope": "experts"}, **DENSE}
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # which groups of 32 divide
NARROW = {"method": "flat_llm", "attention": False, "uniform": True}
LATENT = {"method": "mla", "cache_keep": 0.5}

# Family, sizes, entries and other fields of the manifest. `make test` runs the first two.
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "rounded": ("llama", WIDE, [], {"quantize": {"bits": 3, "levels": "learned", "what": "all"}, "budget": None}),
    "rounded experts": (
        "mixtral", WIDE, [{"method": "loss_aware", "shapes": "stock"}], {**EXPERTS, "quantize": {"bits": 4}},
    ),
    "chosen bits": (
        "llama", WIDE, [{"method": "loss_aware"}], {**DENSE, "quantize": {"bits": "auto"}, "budget": {"bytes": 0.4}},
    ),
    "narrow heads": ("llama", {}, [{"method": "flat_llm", "query_key": "head_pca"}], {}),
    "latents": ("llama", {}, [{"method": "lorc", "cache_keep": 0.4, "allocation": "uniform"}], {"budget": None}),
    "cores": ("llama", {}, [{"method": "lestd", "target": "both", "sweeps": 1, "refine_sweeps": 0}], {}),
    "joint factors": ("qwen2", {}, [{"method": "joint_rank_k"}], {}),
    "pivoted rows": ("opt", {}, [{"method": "loss_aware"}], DENSE),
    "corrected": ("llama", {}, [{"method": "loss_aware", "correct": "output"}], DENSE),
    "another class": ("llama", {}, [LATENT, NARROW], DENSE),
    "free experts": ("mixtral", {}, [{"method": "loss_aware"}], EXPERTS),
    "fewer experts": ("qwen3_moe", {}, [{"method": "reap", "refit": True}], EXPERTS),
    "merged experts": ("qwen3_moe", {}, [{"method": "merge_experts"}], EXPERTS),
    "fused experts": ("gpt_oss", {}, [{"method": "loss_aware"}], EXPERTS),
    "latent attention": ("deepseek_v3", {}, [{"method": "loss_aware"}], DENSE),
    "hybrid": ("nemotron_h", {}, [NARROW], EXPERTS),
}  # fmt: skip


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", CASES)
def test_entered_layers_stay(name: str, tmp_path: Path, job: MakeJob) -> None:
    family, sizes, methods, fields = CASES[name]
    source = make_source(tmp_path / "source", family, layers=2, **sizes)
    made = job(source, methods=methods, **{**({} if methods else DENSE), **fields})
    ended = made.run()
    assert ended.code == 0, ended.err
    ledger, before = made.run_dir / "ledger", file_digests(made.output)
    *kept, last = sorted(ledger.glob("layer.*"))
    for entry in (last, *ledger.glob("complete.*")):
        entry.unlink()
    ended = made.run()
    assert ended.code == 0, ended.err
    assert "does not fit the job" not in ended.err
    assert sorted(ledger.glob("layer.*"))[:-1] == kept
    assert file_digests(made.output) == before
