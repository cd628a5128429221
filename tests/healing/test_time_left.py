"""The time left of a training: steps and evaluations count apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.healing import training
from pipeline.healing.processes import Processes
from pipeline.healing.stored_text import TextSizes
from pipeline.healing.training import Progress, Schedule, Trainer

STEPS, STEP_S, EVALUATION_S = 80, 2.0, 30.0


def test_it_is_that_of_the_steps_and_evaluations_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    trained: Any = SimpleNamespace(trained={"a": torch.nn.Parameter(torch.ones(2))})
    text: Any = None
    made = Trainer(trained, text, Schedule(STEPS, 1, 1, 1e-3, 0), Processes(), print)

    def step() -> None:
        clock[0] += STEP_S
        made.progress = Progress(made.progress.step + 1, made.progress.curve, {})

    def evaluate() -> None:
        clock[0] += EVALUATION_S

    monkeypatch.setattr(made, "_step", step)
    monkeypatch.setattr(made, "_evaluate", evaluate)
    said: list[tuple[float, float]] = []
    made.run(lambda: said.append((clock[0], made.seconds_left)))
    assert len(said) == STEPS
    whole = STEPS * STEP_S + (training.EVALUATIONS + 1) * EVALUATION_S
    assert [now + left for now, left in said] == pytest.approx([whole] * STEPS)


def test_some_of_many_held_out_windows_are_scored() -> None:
    few, many = (TextSizes(trained=90, held_out=held_out, length=1024, unscored=1) for held_out in (3, 20))
    assert few.evaluated == [0, 1, 2]
    assert many.evaluated == [0, 2, 5, 7, 10, 12, 15, 17]
    assert many.held_out_tokens == 8 * 1024
