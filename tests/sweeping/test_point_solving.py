"""Solving the points of a sweep: stored windows, damaged layers, and the line about a point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.entries import HeldOutScoreEntry, PointEntry
from manifests.errors import CorruptError
from pipeline.driver.ledger_keys import EVALUATION
from pipeline.sweeping import point_solving
from pipeline.sweeping.point_solving import _compress_and_score, _result_line, _stored_windows
from pipeline.units.scores import Scored, Windows
from stores.activations import ActivationStore
from stores.ledger import Ledger
from tests.failing_disk import flip
from tests.memory_storage import Memory

IDS = torch.arange(12, dtype=torch.int32).reshape(3, 4)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    repaired: list[tuple[str, list[str]]] = []
    store = ActivationStore(tmp_path / "activations.zarr")
    observer = SimpleNamespace(repaired=lambda reason, keys: repaired.append((reason, keys)))
    inputs = SimpleNamespace(geometry=SimpleNamespace(num_layers=2))
    run_dir = SimpleNamespace(activations=store)
    return SimpleNamespace(
        run_dir=run_dir, ledger=Ledger(Memory()), observer=observer, inputs=inputs, repaired=repaired
    )


def stored(job: Any, record: Any) -> torch.Tensor:
    return job.run_dir.activations.open(record).read(0, record.shape[0])


def test_windows_are_stored_once(job: Any) -> None:
    first = _stored_windows(job, IDS)
    assert torch.equal(stored(job, first), IDS)
    assert _stored_windows(job, IDS) == first == job.ledger.get(EVALUATION).tokens
    assert job.repaired == []


@pytest.mark.parametrize("other", [IDS + 1, IDS[:2], IDS.reshape(4, 3)])
def test_windows_of_another_text_replace_them(job: Any, other: torch.Tensor) -> None:
    first = _stored_windows(job, IDS)
    second = _stored_windows(job, other)
    assert second != first
    assert torch.equal(stored(job, second), other)
    assert job.ledger.get(EVALUATION).tokens == second
    assert job.repaired == []


def test_damaged_windows_are_written_again(job: Any, tmp_path: Path) -> None:
    first = _stored_windows(job, IDS)
    flip(tmp_path / "activations.zarr" / first.path / "c.0.0")
    second = _stored_windows(job, IDS)
    assert torch.equal(stored(job, second), IDS)
    assert [keys for _, keys in job.repaired] == [[EVALUATION]]


WINDOWS = Windows.even(2, 1, "float32", 1)
NO_TASKS: Any = SimpleNamespace(score=lambda job, workers, staged: None)


def scorer(failures: int) -> tuple[Any, Callable[[], int]]:
    """Return workers whose first scores fail, and a function that counts the scores."""
    calls: list[Any] = []

    def score(windows: Windows, model: str, staged: list[Any]) -> Scored:
        calls.append(staged)
        if len(calls) <= failures:
            raise CorruptError("staged layer 1: damaged", "staged")
        return Scored(2.0, 4)

    return SimpleNamespace(scorer=lambda job: SimpleNamespace(score=score)), lambda: len(calls)


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was asked of each compression: whether its layers are compared."""
    asked: list[bool] = []
    monkeypatch.setattr(point_solving, "compress_and_score", lambda job, workers, compared: asked.append(compared))
    monkeypatch.setattr(point_solving, "staged_layer", lambda ledger, layer: f"layer {layer}")
    return asked


@pytest.mark.parametrize("failures", [0, 1])
def test_a_layer_that_is_damaged_is_solved_again(job: Any, compressed: list[bool], failures: int) -> None:
    workers, count = scorer(failures)
    assert _compress_and_score(job, workers, WINDOWS, NO_TASKS, compared=True) == (Scored(2.0, 4), None)
    assert compressed == [True] * (1 + failures)
    assert count() == len(job.repaired) + 1 == 1 + failures


def test_but_once(job: Any, compressed: list[bool]) -> None:
    workers, count = scorer(2)
    with pytest.raises(CorruptError, match="staged layer 1"):
        _compress_and_score(job, workers, WINDOWS, NO_TASKS, compared=False)
    assert (count(), compressed) == (2, [False, False])


def test_without_an_evaluation_nothing_is_scored(job: Any, compressed: list[bool]) -> None:
    assert _compress_and_score(job, scorer(9)[0], None, NO_TASKS, compared=True) == (None, None)
    assert compressed == [True]


def test_the_line_about_a_point() -> None:
    held_out = HeldOutScoreEntry(divergence=0.01234, dense_perplexity=2.0, perplexity=2.1, tokens=3)
    fields: dict[str, Any] = {"text": "0" * 64, "predicted": None, "seconds": 1.26, "output": None, "seal": None}
    entry = PointEntry(**fields, counts={"bytes": {"compressed": 1, "dense": 3}}, loss=1.23456, held_out=held_out)
    assert _result_line("keep 0.5", entry) == "keep 0.5: 33.33% of the bytes, loss 1.2346, divergence 0.0123 (1.3 s)"
    plain = PointEntry(**fields, counts={"bytes": {"compressed": 1, "dense": 3}}, loss=None, held_out=None)
    assert _result_line("keep 0.5", plain) == "keep 0.5: 33.33% of the bytes (1.3 s)"
