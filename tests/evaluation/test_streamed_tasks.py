"""lm-eval's tasks, scored a layer at a time: the same answers as its own class `hf`, and passes that resume."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipeline.evaluate
from manifests.errors import InputError, Interrupted
from manifests.schema import Workers
from pipeline.console.progress import JobObserver
from pipeline.evaluation.perplexity import Scoring
from pipeline.evaluation.streamed_tasks import Kept, score_streamed
from pipeline.evaluation.task_scores import AskedTasks, load_tasks, run_tasks
from stores.storage import open_storage
from tests.end_to_end.sources import make_source
from tests.evaluation.tasks import answers_of, chat_model, evaluate, needs_lm_eval, write_group, write_task

pytestmark = [needs_lm_eval, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("source") / "model", 64)


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """A task of each kind; the documents of the last are longer than the model's context."""
    kinds = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
    return [str(write_task(tmp_path, f"of_{kind}", kind)) for kind in kinds]


def own_answers(model: Path, asked: AskedTasks) -> tuple[dict[str, Any], dict[tuple[str, int], list[Any]]]:
    """Return the scores and the answers of lm-eval's class `hf`."""
    from lm_eval.models.huggingface import HFLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    lm = HFLM(pretrained=whole, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=3)
    scores = run_tasks(lm, "hf", asked, load_tasks(asked, generates=False))
    assert asked.samples is not None
    return {task: score.as_json() for task, score in scores.items()}, answers_of(asked.samples)


@pytest.mark.parametrize(
    "options", [[], ["--num-fewshot", "2", "--apply-chat-template", "--limit", "7"]], ids=["plain", "fewshot-chat"]
)
def test_answers_are_lm_eval_s_own(
    model: Path, tasks: list[str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tasks[:2] if options else tasks
    samples = tmp_path / "ours.jsonl"
    scores = evaluate([str(model), "--tasks", *tasks, "--samples", str(samples), *options], capsys)[str(model)]
    fewshot, chat, limit = (2, True, 7) if options else (None, False, None)
    own = AskedTasks(tuple(tasks), "--tasks", limit, fewshot, chat, tmp_path / "hf.jsonl")
    expected, answers = own_answers(model, own)
    found = answers_of(samples)
    assert found.keys() == answers.keys()
    assert len(found) == sum(score["documents"] for score in expected.values())
    for key, each in answers.items():
        for ours, theirs in zip(found[key], each, strict=True):
            if isinstance(theirs[0], list):
                assert ours[0][0] == pytest.approx(theirs[0][0], abs=1e-3), key
                assert ours[0][1] == theirs[0][1], key
            else:
                assert ours[0] == pytest.approx(theirs[0], abs=1e-3), key
    assert scores.keys() == expected.keys()
    for task, score in expected.items():
        for metric, figure in score["metrics"].items():
            assert scores[task]["metrics"][metric]["value"] == pytest.approx(figure["value"], rel=1e-4), (task, metric)


def test_a_group_is_weighted_by_its_documents(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, documents in (("few", 3), ("many", 9)):
        write_task(tmp_path, name, documents=documents)
    group = write_group(tmp_path, "both", ["few", "many"])
    scores = evaluate([str(model), "--tasks", str(group)], capsys)[str(model)]
    few, many, both = (scores[name]["metrics"]["acc"]["value"] for name in ("few", "many", "both"))
    assert both == pytest.approx((3 * few + 9 * many) / 12)


def test_tasks_that_generate_are_refused_before_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, "writes", "generate_until", 2)
    group = write_group(tmp_path, "some", ["writes"])
    for file in (task, group):
        assert pipeline.evaluate.main([str(model), "--tasks", str(file), "--in-process"]) == 2
        assert "--tasks: writes: generates text, which needs the whole model" in capsys.readouterr().err
    with pytest.raises(InputError, match="writes: generates text"):
        load_tasks(AskedTasks((str(task),), "--tasks"), generates=False)
    scores = evaluate([str(model), "--tasks", str(task), "--whole-model"], capsys)[str(model)]
    assert scores["writes"]["documents"] == 2


def test_an_interrupted_pass_resumes_after_the_last_layer(
    model: Path, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both models are in one folder; a finished one is not run again."""
    other = make_source(tmp_path / "other", "llama", layers=4)
    arguments = [str(model), "--beside", str(other), "--tasks", tasks[0]]
    expected = evaluate(arguments, capsys)
    kept = ["--run-dir", str(tmp_path / "kept")]
    report = JobObserver.layer_done

    def killed(self: JobObserver, phase: str, layer: int, summary: Any) -> None:
        report(self, phase, layer, summary)
        if layer == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JobObserver, "layer_done", killed)
        assert pipeline.evaluate.main([*arguments, *kept, "--in-process"]) != 0
    assert "layer 2 committed" in capsys.readouterr().err
    stored = [path for path in (tmp_path / "kept").rglob("layer-00003/*") if path.is_dir()]
    assert stored, "the inputs of the layer to come"
    assert pipeline.evaluate.main([*arguments, *kept, "--in-process"]) == 0
    said = capsys.readouterr()
    assert "score tasks layer 3 committed" in said.err
    assert said.err.count("phase ") == 1
    assert "layer 2" not in said.err
    assert not list((tmp_path / "kept").rglob("layer-0*"))
    assert evaluate([*arguments, *kept], capsys) == expected


def test_a_pass_is_kept_in_a_bucket(
    model: Path, tasks: list[str], s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The address of a bucket is no folder of the working directory."""
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    arguments = [str(model), "--tasks", tasks[0], "--run-dir", f"{s3_bucket}/kept"]
    scores = evaluate(arguments, capsys)
    assert not list(working.iterdir())
    assert any(name.startswith("model-") for name in open_storage(f"{s3_bucket}/kept").folders())
    assert pipeline.evaluate.main([*arguments, "--in-process"]) == 0
    assert "phase" not in capsys.readouterr().err, "the answers are in the bucket"
    assert evaluate(arguments, capsys) == scores


def test_no_error_of_git_is_printed(
    model: Path, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pipeline.evaluate.main([str(model), "--tasks", tasks[0], "--limit", "2", "--in-process"]) == 0
    assert "git repository" not in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--scratch", "--samples"])
def test_addresses_of_buckets_are_refused_where_a_disk_is_needed(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        pipeline.evaluate.main(["model", "--tasks", "x.yaml", option, "s3://bucket/x"])
    assert ended.value.code == 2
    assert f"{option}: s3://bucket/x: is the address of a bucket" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit", "3", "--text", "x"], "--limit: only with --tasks"),
        (["--tasks", "x.yaml", "--limit", "0"], "--limit: 0 is too small"),
        (["--tasks", "x.yaml", "--num-fewshot", "-1"], "--num-fewshot: -1 is too small"),
        (["--tasks", "x.yaml", "--batch", "0"], "--batch: 0 is too small"),
        (["--tasks", "x.yaml", "--run-dir", "kept", "--whole-model"], "nothing is kept with --whole-model"),
        (["--tasks", "x.yaml", "--beside", "m", "--endpoint", "http://h/v1"], "one server answers for one model"),
    ],
)
def test_options_that_do_not_fit(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.evaluate.main(["model", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_tokenizer_without_a_chat_template(
    tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make_source(tmp_path / "bare", "llama")
    assert pipeline.evaluate.main([str(bare), "--tasks", tasks[0], "--apply-chat-template", "--in-process"]) == 2
    assert (
        f"--apply-chat-template: the tokenizer of {bare} has no chat template; leave it out" in capsys.readouterr().err
    )


@pytest.mark.nightly
def test_a_pass_resumes_in_a_bucket(model: Path, tasks: list[str], s3_bucket: str) -> None:
    """What a job with its run directory in a bucket does."""
    asked, stop = AskedTasks((tasks[0],), "evaluation.tasks"), threading.Event()
    kept = Kept(open_storage(f"{s3_bucket}/run/tasks/dense"), 1, "model")

    class Stopping(JobObserver):
        def layer_done(self, phase: str, layer: int, summary: Any) -> None:
            stop.set()
            super().layer_done(phase, layer, summary)

    with Stopping(quiet=True) as observer:
        scoring = Scoring(Workers(max=1, cpus=1), torch.float32, stop, observer, in_process=True)
        with pytest.raises(Interrupted):
            score_streamed(str(model), asked, scoring, kept=lambda _: kept)
        assert any("layer-00001" in name for name in kept.storage.names())
        stop.clear()
        units: list[str] = []
        observer.unit_done = lambda unit, _: units.append(unit.key)  # type: ignore[method-assign]
        resumed = score_streamed(str(model), asked, replace(scoring, stop=threading.Event()), kept=lambda _: kept)
        assert not any(unit.startswith("windowforward/tasks/0/") for unit in units), units
        assert any(unit.startswith("windowforward/tasks/1/") for unit in units)
        assert resumed == score_streamed(str(model), asked, replace(scoring, stop=threading.Event()))
        units.clear()
        score_streamed(
            str(model), replace(asked, limit=5), replace(scoring, stop=threading.Event()), kept=lambda _: kept
        )
        assert any(unit.startswith("windowforward/tasks/0/") for unit in units), "of other questions nothing is known"
