"""Run directories of versions whose evaluations had no prefix: nothing is scored otherwise without the user's word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from manifests.errors import InputError
from manifests.evaluation import Evaluation
from pipeline.inputs.calibration import EvaluationTokens
from pipeline.job.context import check_evaluation_prefix
from tests.memory_storage import Memory

FILE = "manifest.yaml"
TEXT = {"text": {"files": ["a.txt"]}, "window": 8}


def check(stored: dict[str, Any] | None, given: dict[str, Any] | None, prefix: tuple[int, ...] = (7,)) -> None:
    """Check a directory with the `perplexity` of its stored manifest against that of the user's manifest."""
    storage = Memory()
    storage.replace(FILE, yaml.safe_dump({"version": 1, "evaluation": {"perplexity": stored}}).encode())
    tokens = EvaluationTokens(torch.zeros(1, 8), prefix) if given else None
    job: Any = SimpleNamespace(run_dir=SimpleNamespace(storage=storage), evaluation=tokens)
    check_evaluation_prefix(job, FILE, Evaluation.model_validate({"perplexity": given}, strict=False))


def test_the_default_is_refused_where_an_earlier_version_scored() -> None:
    with pytest.raises(InputError, match=r"evaluation\.perplexity\.prefix: an earlier version .* the ids 7 before"):
        check(TEXT, TEXT)


@pytest.mark.parametrize("prefix", ["none", "tokenizer"])
def test_a_given_prefix_goes_on(prefix: str) -> None:
    check(TEXT, {**TEXT, "prefix": prefix}, (7,) if prefix == "tokenizer" else ())


def test_directories_without_such_scores_go_on() -> None:
    check({**TEXT, "prefix": "tokenizer"}, TEXT)  # of this version
    check(None, TEXT)
    check(TEXT, None)
    check(TEXT, TEXT, prefix=())  # the tokenizer puts nothing before a text
