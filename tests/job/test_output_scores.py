"""Scores of OUTPUT: which are missing, and to which checkpoint and text an entered one belongs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.entries import CompleteEntry
from manifests.errors import InputError
from manifests.records import SourceFile
from manifests.schema import Model
from pipeline.driver.ledger_keys import COMPLETE
from pipeline.inputs.calibration import EvaluationTokens
from pipeline.job import output_scores
from pipeline.job.output_scores import (
    dense_score_key,
    missing_scores,
    score_dense_first,
    score_entry,
    score_output,
    scores,
)
from stores.ledger import Ledger
from tests.families.geometries import manifest
from tests.memory_storage import Memory

SEAL, OTHER = "a" * 64, "b" * 64
FIGURES = {"perplexity": 2.0, "loss": 0.69, "tokens": 30, "windows": 3, "window": 11, "prefix": [5]}
IDS = torch.arange(12).reshape(2, 6)


def job_of(dense: bool = True, ids: torch.Tensor | None = IDS, digest: str = OTHER) -> Any:
    text = {"files": ["text.txt"]}
    evaluation = {} if ids is None else {"evaluation": {"perplexity": {"text": text, "window": 6, "dense": dense}}}
    said: list[str] = []
    return SimpleNamespace(
        manifest=manifest(**evaluation), ledger=Ledger(Memory()), tokens=None, said=said, stop=None,
        evaluation=None if ids is None else EvaluationTokens(ids),
        inputs=SimpleNamespace(source=SimpleNamespace(place="the source"), geometry=SimpleNamespace(vocab=320)),
        in_process=True,
        source_files={"model.safetensors": SourceFile(size=3, sha256=digest)},
        run_dir=SimpleNamespace(storage=SimpleNamespace(folder=None, folders=list)),
        observer=SimpleNamespace(say=lambda line, *_: said.append(line)),
    )  # fmt: skip


def finish(job: Any, seal: str = SEAL) -> None:
    job.ledger.commit(COMPLETE, CompleteEntry(output="out", contract_sha256=seal, summary={}))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were scored."""
    models: list[str] = []

    def score_tokens(model: str, tokens: EvaluationTokens, scoring: Any) -> dict[str, Any]:
        models.append(model)
        return {**FIGURES, "loss": float(len(models))}

    monkeypatch.setattr(output_scores, "score_tokens", score_tokens)
    monkeypatch.setattr(output_scores, "catch_signals", lambda stop: None)
    return models


@pytest.mark.parametrize("accepted", [False, True])
def test_a_dense_loss_above_that_of_guessing_ends_a_data_free_job_first(
    accepted: bool, monkeypatch: pytest.MonkeyPatch, scored: list[str]
) -> None:
    """It is entered, so that a job that goes on accepting it need not measure it again."""
    job, figures = job_of(), {**FIGURES, "loss": 6.1}
    job.manifest = job.manifest.model_copy(update={"model": Model(source="model", accept_loss=accepted)})

    def score_tokens(model: str, *_: Any) -> dict[str, Any]:
        scored.append(model)
        return figures

    monkeypatch.setattr(output_scores, "score_tokens", score_tokens)
    for _ in range(2):
        with nullcontext() if accepted else pytest.raises(InputError, match=r"set model.accept_loss: true"):
            score_dense_first(job)
    assert scored == ["the source"]
    assert scores(job, SEAL)["dense"]["loss"] == 6.1


@pytest.mark.parametrize("job", ["calibrated", "without the dense score", "without text"])
def test_other_jobs_score_the_dense_model_later_or_never(job: str, scored: list[str]) -> None:
    made = job_of(dense=job != "without the dense score", ids=None if job == "without text" else IDS)
    if job == "calibrated":
        made.tokens = IDS
    score_dense_first(made)
    assert scored == []


def test_an_unfinished_job_and_one_without_an_evaluation_miss_nothing() -> None:
    assert missing_scores(job_of()) == []
    job = job_of(ids=None)
    finish(job)
    assert missing_scores(job) == []
    assert dense_score_key(job) == ()
    assert scores(job, SEAL) == {}


@pytest.mark.parametrize("dense", [False, True])
def test_each_model_is_scored_once(scored: list[str], dense: bool) -> None:
    job = job_of(dense)
    finish(job)
    assert len(missing_scores(job)) == 1 + dense
    score_output(job, SEAL)
    assert scored == [job.manifest.output, "the source"][: 1 + dense]
    assert missing_scores(job) == []
    score_output(job, SEAL)
    assert len(scored) == 1 + dense
    entered = scores(job, SEAL)
    assert entered["perplexity"]["loss"] == 1.0
    assert ("dense" in entered) == dense
    assert not dense or entered["dense"]["loss"] == 2.0


def test_scores_of_another_output_and_of_another_text_are_apart(scored: list[str]) -> None:
    job = job_of()
    score_output(job, SEAL)
    finish(job, OTHER)
    assert len(missing_scores(job)) == 1  # the dense model's are not of OUTPUT
    assert "perplexity" not in scores(job, OTHER)
    job.evaluation = EvaluationTokens(IDS + 1)
    assert len(missing_scores(job)) == 2
    entered = scores(job, SEAL)
    assert "perplexity" not in entered
    assert [each["loss"] for each in entered["earlier"]] == [1.0]  # of this OUTPUT; the dense model's score is none


def test_the_source_s_score_is_of_its_files(scored: list[str]) -> None:
    (first,), (second,) = dense_score_key(job_of()), dense_score_key(job_of(digest=SEAL))
    assert first != second
    assert dense_score_key(job_of(ids=IDS.to(torch.int32))) == (first,)
    assert dense_score_key(job_of(ids=IDS.reshape(3, 4))) != (first,)


def test_an_entry_has_the_figures_and_the_share_that_was_seen() -> None:
    job = job_of()
    job.tokens = IDS
    entry = score_entry(job, "dense", SEAL, FIGURES)
    assert (entry.model, entry.seal, entry.seen, entry.windows, entry.prefix) == ("dense", SEAL, 1.0, 3, (5,))
    assert entry.text is not None
    assert entry.text["files"] == ["text.txt"]
    job.tokens = IDS + 100
    assert score_entry(job, "dense", SEAL, FIGURES).seen == 0.0


def test_text_that_calibration_has_seen_is_warned_of(scored: list[str]) -> None:
    job = job_of()
    job.tokens = IDS
    score_output(job, SEAL)
    assert any("100" in line for line in job.said)
