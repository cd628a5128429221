"""Perplexity of a checkpoint: the order of the units, and the figures of their sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeline.evaluation.perplexity import MODEL, SCRATCH_PREFIX, _score_windows, perplexity_figures, sweep_scratch
from pipeline.inputs.calibration import EvaluationTokens
from pipeline.units.scores import Score, Scored, Windows
from stores.disk import Disk


class Observer:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def phase(self, name: str, layers: int, units: int) -> None:
        self.events.append((name, layers, units))

    def layer_done(self, phase: str, layer: int, summary: Any) -> None:
        self.events.append(layer)


def test_windows_pass_each_part_of_each_layer_before_they_are_scored() -> None:
    windows, observer = Windows.even(5, 2, "float32", 1), Observer()
    stream = _score_windows(windows, [[None], [0, 1, 2], [None]], observer)  # type: ignore[arg-type]
    batches, results, total = list[list[Any]](), None, None
    while total is None:
        try:
            batches.append(list(stream.send(results)))
        except StopIteration as ended:
            total = ended.value
        results = [Scored(1.0 + unit.shard, 10) if isinstance(unit, Score) else None for unit in batches[-1]]
    passes = [[(unit.layer, unit.part) for unit in batch] for batch in batches[:-1]]
    assert passes == [[(0, None)] * 2, [(1, 0)] * 2, [(1, 1)] * 2, [(1, 2)] * 2, [(2, None)] * 2]
    assert {unit.model for batch in batches for unit in batch} == {MODEL}
    assert [(unit.layer, unit.shard) for unit in batches[-1]] == [(3, 0), (3, 1)]
    assert total == Scored(3.0, 20)
    assert observer.events == [("evaluate", 3, 2), 0, 1, 2]


@pytest.mark.parametrize("loss", [0.0, 2.5, 800.0])
def test_figures(loss: float) -> None:
    figures = perplexity_figures(Scored(30 * loss, 30), EvaluationTokens(torch.zeros(3, 11), (5,)))
    assert figures["perplexity"] == ("Infinity" if loss > 700 else math.exp(loss))
    size = {"tokens": 30, "windows": 3, "window": 11, "prefix": [5]}
    assert {**figures, "perplexity": 0} == {"perplexity": 0, "loss": loss, **size}


def test_only_scratch_of_killed_evaluations_is_removed(tmp_path: Any) -> None:
    storage = Disk(tmp_path)
    for name in (f"{SCRATCH_PREFIX}abc/activations.zarr/a", "ledger/a", f"x{SCRATCH_PREFIX}/a"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    sweep_scratch(storage)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["ledger", f"x{SCRATCH_PREFIX}"])
