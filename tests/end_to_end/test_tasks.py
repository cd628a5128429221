"""lm-eval's tasks in jobs and sweeps: their settings, their seconds in the plan, and workers of Ray and buckets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.cost_model.prices import WORKERS_SECONDS
from pipeline.cost_model.work import scoring_flops
from pipeline.evaluation import questions, streamed_tasks
from pipeline.evaluation.questions import Window
from pipeline.families.registry import geometry_of, standard_config
from pipeline.reporting.summary import score_lines
from pipeline.units.questions import QuestionShard
from stores.bucket import Bucket
from tests import buckets
from tests.end_to_end.jobs import Job, MakeJob, Sweep, command
from tests.end_to_end.report_page import Page
from tests.evaluation.tasks import answers_of, chat_model, needs_lm_eval, write_task

pytestmark = needs_lm_eval
TERAFLOPS = 1e-6  # of the planned worker, so that a small model takes seconds
SETTINGS = {"fewshot": 1, "chat_template": True, "limit": 4}
OPTIONS = ("--num-fewshot", "1", "--apply-chat-template", "--limit", "4")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a chat template."""
    return chat_model(tmp_path_factory.mktemp("chat") / "source", 512)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path, "words")


def planned_seconds(manifest: Path) -> Any:
    """Return phase -> seconds of a worker of TERAFLOPS."""
    return command("plan", str(manifest), "--tflops", str(TERAFLOPS), "--json").json["phases"]


def write_sweep(made: Job, **evaluation: Any) -> Path:
    """Write a sweep of two points on the model of a job, and return its file."""
    return Sweep(made, [{"methods": [{"method": "flat_llm"}]}], evaluation=evaluation).write()


@pytest.mark.nightly
@pytest.mark.usefixtures("inline")
def test_a_job_s_settings_are_those_of_evaluate(chatting: Path, task: Path, job: MakeJob) -> None:
    """Scores of other settings are other scores; those without settings are found again."""
    made = job(chatting, evaluation={"tasks": [str(task)]})
    plain = made.run().json["evaluation"]["tasks"]
    evaluation = made.scored({"tasks": [str(task)], **SETTINGS}).json["evaluation"]
    scores = evaluation["tasks"]
    assert evaluation["task_settings"] == SETTINGS
    for which, model in (("compressed", made.output), ("dense", made.source)):
        direct = command("evaluate", str(model), "--tasks", str(task), *OPTIONS, "--json").json["tasks"][str(model)]
        assert scores[which] == direct
        assert (plain[which]["words"]["documents"], direct["words"]["documents"]) == (12, 4)
    assert command("report", str(made.run_dir)).code == 0
    page = Page((made.run_dir / "report.html").read_text(encoding="utf-8"))
    printed = list(score_lines(evaluation))
    assert [" ".join(row).split() for row in page.tables["tasks"]] == [line.split() for line in printed[:-1]]
    assert page.tables["tasks"][1][:2] == ["words", "acc"]
    assert printed[-1] in page.text  # the settings
    repeated = made.run()
    assert "scored_now" not in repeated.json
    assert repeated.json["evaluation"]["tasks"] == plain
    assert "task_settings" not in repeated.json["evaluation"]


@pytest.mark.nightly
@pytest.mark.usefixtures("inline")
def test_a_sweep_s_settings_are_those_of_evaluate(chatting: Path, task: Path, job: MakeJob) -> None:
    made = job(chatting)
    found = command("sweep", str(write_sweep(made, tasks=[str(task)], **SETTINGS)), "--json").json
    direct = command("evaluate", str(chatting), "--tasks", str(task), *OPTIONS, "--json").json["tasks"][str(chatting)]
    assert found["tasks"] == direct
    assert [row["tasks"]["words"]["documents"] for row in found["points"]] == [4, 4]
    plain = command("sweep", str(write_sweep(made, tasks=[str(task)])), "--json").json
    assert [row["tasks"]["words"]["documents"] for row in plain["points"]] == [12, 12]


def test_a_tokenizer_without_a_chat_template_is_refused_before_work(task: Path, job: MakeJob) -> None:
    made = job(evaluation={"tasks": [str(task)], "chat_template": True})
    sweep = write_sweep(made, tasks=[str(task)], chat_template=True)
    for ended in (made.run(), command("plan", str(made.manifest)), command("sweep", str(sweep))):
        assert ended.code == 2
        assert f"evaluation.chat_template: the tokenizer of {made.source} has no chat template" in ended.err
    assert not made.run_dir.exists()


def test_the_plan_counts_tasks(chatting: Path, tmp_path: Path, job: MakeJob) -> None:
    """A text of n tokens is n tokens through all layers, each of which is scored, for both models."""
    task = write_task(tmp_path, "texts", "loglikelihood_rolling", documents=2)
    made = job(chatting, evaluation={"tasks": [str(task)], "limit": 1})
    text = json.loads((tmp_path / "texts.jsonl").read_text().splitlines()[0])["query"]
    tokens = len(AutoTokenizer.from_pretrained(chatting)(text).input_ids)
    geometry = geometry_of(standard_config(json.loads((chatting / "config.json").read_text())))
    seconds = tokens * scoring_flops(geometry, tokens) / (TERAFLOPS * 1e12)
    assert seconds > 1
    assert planned_seconds(made.manifest)["tasks"] == pytest.approx(2 * (WORKERS_SECONDS + seconds))
    assert "tasks" not in planned_seconds(job(chatting).manifest)


def test_the_plan_counts_the_settings_of_tasks(chatting: Path, task: Path, job: MakeJob) -> None:
    found = [
        planned_seconds(job(chatting, evaluation={"tasks": [str(task)], **settings}).manifest)["tasks"]
        for settings in ({"limit": 4}, {}, {"chat_template": True}, {"fewshot": 2, "chat_template": True})
    ]
    assert found == sorted(set(found)), "each counts more than the one before"


def test_the_plan_of_a_sweep_counts_tasks(chatting: Path, task: Path, job: MakeJob) -> None:
    """The dense model is scored once, and each of two points: half of a job's seconds for each."""
    evaluation = {"tasks": [str(task)], "fewshot": 1}
    one = planned_seconds(job(chatting, evaluation=evaluation).manifest)["tasks"] / 2
    made = job(chatting)
    plain, scored = planned_seconds(write_sweep(made)), planned_seconds(write_sweep(made, **evaluation))
    assert one > 1
    assert scored["score dense"] - plain["score dense"] == pytest.approx(one)
    assert scored["score"] - plain["score"] == pytest.approx(2 * one)
    others = {"score dense", "score"}
    assert {name: scored[name] for name in scored if name not in others} == {
        name: plain[name] for name in plain if name not in others
    }


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.nightly
def test_any_number_of_workers_gives_the_same_log_likelihoods(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One and two workers of Ray, and the command's own process. Small shards, so that two workers share a task."""
    monkeypatch.setattr(questions, "LEAST_TOKENS", 128)
    shards: list[int] = []

    def counted(windows: Sequence[Window]) -> tuple[list[QuestionShard], torch.Tensor]:
        packed = questions.packed(windows)
        shards.append(len(packed[0]))
        return packed

    monkeypatch.setattr(streamed_tasks, "packed", counted)
    kinds = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
    tasks = [str(write_task(tmp_path, f"of_{kind}", kind)) for kind in kinds]
    answers = []
    for options in (("--in-process",), ("--workers", "1"), ("--workers", "2")):
        samples = tmp_path / f"{len(answers)}.jsonl"
        ended = command("evaluate", str(llama), "--tasks", *tasks, "--samples", str(samples), *options)
        assert ended.code == 0, ended.err
        answers.append(answers_of(samples))
    assert len(answers[0]) == 36
    assert min(shards) > 2
    assert answers[1] == answers[2] == answers[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("inline")
def test_a_job_in_a_bucket_scores_tasks(llama: Path, text: Path, task: Path, s3_bucket: str, job: MakeJob) -> None:
    buckets.put_inputs(s3_bucket, llama, text)
    evaluation = {"tasks": [str(task)]}
    local, remote = job(evaluation=evaluation), job(evaluation=evaluation, **buckets.job_places(s3_bucket))
    expected = local.run().json["evaluation"]["tasks"]
    assert remote.run().json["evaluation"]["tasks"] == expected
    assert [path.name for path in remote.root.iterdir()] == ["manifest.yaml"], "nothing is on this disk"
    run_dir = Bucket(f"{s3_bucket}/run")
    assert "tasks" not in run_dir.folders(), "removed with the last score"
    assert "scored_now" not in remote.run().json
