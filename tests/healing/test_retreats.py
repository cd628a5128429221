"""A training whose rate is too high goes back to its best weights, and goes on at a lower rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manifests.entries import HealingCurve
from pipeline.healing.processes import Processes
from pipeline.healing.training import RETREAT, Schedule, Trainer

STEPS, TARGET = 80, 1.0


class Bowl:
    """A student with one trained number; the divergence of the stored one is its squared distance from TARGET."""

    def __init__(self) -> None:
        self.trained = {"a": nn.Parameter(torch.full((1,), 0.99))}

    @contextmanager
    def rounded(self) -> Iterator[None]:
        yield

    def rounded_copy(self) -> dict[str, Tensor]:
        return {"a": self.trained["a"].detach().clone()}

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.trained["a"].copy_(stored["a"])


class BowlTrainer(Trainer):
    """Trains a bowl. `rates`: those of the steps."""

    def __init__(self, peak: float, divergence: Callable[[float], float] = lambda distance: distance**2) -> None:
        student: Any = Bowl()
        text: Any = None
        self.said: list[str] = []
        self.rates: list[float] = []
        self.divergence = divergence
        super().__init__(student, text, Schedule(STEPS, 1, 1, peak, 0), Processes(), self.said.append)

    @property
    def distance(self) -> float:
        return abs(float(self.student.trained["a"].detach()) - TARGET)

    def _gradients(self, chosen: list[int]) -> float:
        number = self.student.trained["a"]
        number.grad = 2 * (number.detach() - TARGET)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return self.distance**2

    def _held_out_divergence(self) -> float:
        return self.divergence(self.distance)


def nothing() -> None:
    pass


def test_it_goes_back_and_then_gains() -> None:
    made = BowlTrainer(peak=1.0)
    made.run(nothing)
    curve = made.progress.curve
    assert curve.retreats
    first = curve.retreats[0]
    assert curve.divergences[curve.steps.index(first)] > curve.divergences[0]
    assert made.rates[first] == pytest.approx(RETREAT * made.schedule.rate(first))
    assert any(f"back to the weights of step 0; {RETREAT}" in line for line in made.said)
    assert min(curve.divergences) < 0.2 * curve.divergences[0]
    assert made.progress.best["a"] == pytest.approx(TARGET, abs=math.sqrt(min(curve.divergences)) * 1.01)


def test_a_rate_that_fits_stays() -> None:
    made = BowlTrainer(peak=0.0003)
    made.run(nothing)
    assert made.progress.curve.retreats == ()
    assert made.rates == [pytest.approx(made.schedule.rate(step)) for step in range(STEPS)]


@pytest.mark.parametrize("at", [5, 25, 45])
def test_a_training_that_resumes_has_the_same_bits(at: int) -> None:
    whole = BowlTrainer(peak=1.0)
    whole.run(nothing)
    stored: dict[str, Any] = {}

    def store() -> None:
        if (step := begun.progress.step) == at:
            state = {name: tensor.clone() for name, tensor in begun.state().items()}
            stored.update(state=state, step=step, curve=begun.progress.curve)

    begun = BowlTrainer(peak=1.0)
    begun.run(store)
    resumed = BowlTrainer(peak=1.0)
    resumed.load(**stored)
    resumed.run(nothing)
    assert resumed.progress.curve == whole.progress.curve
    assert torch.equal(resumed.student.trained["a"], whole.student.trained["a"])
    assert torch.equal(resumed.progress.best["a"], whole.progress.best["a"])


def test_a_divergence_that_is_not_finite_is_left() -> None:
    made = BowlTrainer(peak=1.0, divergence=lambda distance: distance**2 if distance < 0.03 else math.nan)
    made.run(nothing)
    assert made.progress.curve.retreats
    assert all(map(math.isfinite, made.progress.curve.divergences))


def test_one_of_an_earlier_version_never_goes_back() -> None:
    made = BowlTrainer(peak=1.0)
    made.load(made.state(), 1, HealingCurve(steps=(0,), divergences=(0.01,)))
    made.run(nothing)
    assert made.progress.curve.retreats is None
