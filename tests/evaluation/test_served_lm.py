"""Tasks that a running server answers: the scores of the same model, streamed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import pipeline.evaluate
from tests.evaluation.completions_server import completions_server
from tests.evaluation.tasks import answers_of, chat_model, evaluate, needs_lm_eval, write_task

pytestmark = [needs_lm_eval, pytest.mark.slow]
CONTEXT = 256  # tokens, more than any question of these tests has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("source") / "model", CONTEXT)


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    return [str(write_task(tmp_path, f"of_{kind}", kind)) for kind in ("multiple_choice", "loglikelihood")]


@pytest.mark.skipif(importlib.util.find_spec("tenacity") is None, reason="tenacity, of the extra `tasks`, is missing")
@pytest.mark.parametrize(
    "options", [[], ["--num-fewshot", "1", "--apply-chat-template"]], ids=["plain", "fewshot-chat"]
)
def test_a_server_s_scores_are_those_of_its_model(
    model: Path, tasks: list[str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server answers with log-likelihoods of the same model."""
    arguments = [str(model), "--tasks", *tasks, "--limit", "5", *options]
    served, ours = tmp_path / "served.jsonl", tmp_path / "ours.jsonl"
    with completions_server(model) as url:
        scores = evaluate([*arguments, "--samples", str(served), "--endpoint", url, "--batch", "2"], capsys)
    expected = evaluate([*arguments, "--samples", str(ours)], capsys)
    assert {task: score["documents"] for task, score in scores[str(model)].items()} == dict.fromkeys(
        expected[str(model)], 5
    )
    for key, each in answers_of(ours).items():
        for ((log, greedy),), ((served_log, served_greedy),) in zip(each, answers_of(served)[key], strict=True):
            assert served_log == pytest.approx(log, abs=1e-3), key
            assert served_greedy == greedy, key
    assert scores == expected


def test_a_server_needs_the_packages_of_the_extra(
    model: Path, tasks: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.models import api_models

    monkeypatch.setattr(api_models, "find_spec", lambda name: None if name == "tenacity" else object())
    with completions_server(model) as url:
        assert pipeline.evaluate.main([str(model), "--tasks", tasks[0], "--endpoint", url]) == 2
    said = capsys.readouterr().err
    assert "--endpoint: " in said
    assert "tenacity" in said
    assert "`pip install 'CHECKOUT[tasks]'`" in said


def test_a_server_that_does_not_answer_is_named(tasks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.evaluate.main(["model", "--tasks", tasks[0], "--endpoint", "http://127.0.0.1:9/v1"]) == 2
    assert "--endpoint: http://127.0.0.1:9/v1/models: no list of models" in capsys.readouterr().err
