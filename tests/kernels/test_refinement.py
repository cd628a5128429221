"""Training by Adam: what held-out samples decide, and that the result depends on the arguments alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.kernels.refinement import CHECKS, Trained, Training, held_out_samples, schedule, train_, training_steps

TRAINING = Training(train=range(20), held_out=range(20, 24), steps=60, batch=4, rates=(0.1, 0.03), seed=3)


class Problem:
    """Outputs of a known matrix, with noise; `weight` begins beside it."""

    def __init__(self, dtype: torch.dtype = torch.float64, noise: float = 0.0, start: float = 0.5) -> None:
        source = torch.Generator().manual_seed(5)
        self.inputs_MTI = torch.randn(24, 6, 5, dtype=torch.float64, generator=source).to(dtype)
        self.goal_OI = torch.randn(3, 5, dtype=torch.float64, generator=source).to(dtype)
        noise_MTO = noise * torch.randn(24, 6, 3, dtype=torch.float64, generator=source).to(dtype)
        self.outputs_MTO = self.inputs_MTI @ self.goal_OI.T + noise_MTO
        self.weight = (self.goal_OI + start * torch.randn(3, 5, generator=source).to(dtype)).requires_grad_()
        self.seen: list[list[int]] = []

    def error(self, samples: Sequence[int]) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append(list(samples))
        return (self.inputs_MTI[samples] @ self.weight.T - self.outputs_MTO[samples]).square().mean()

    def train(self, training: Training = TRAINING, dtype: torch.dtype = torch.float64) -> Trained:
        return train_([self.weight], self.error, training, [dtype])


def test_it_finds_what_made_the_outputs_and_repeats_bit_for_bit() -> None:
    first, second = Problem(), Problem()
    result = first.train()
    assert result == second.train()
    assert torch.equal(first.weight, second.weight)
    assert result.after < 0.01 * result.before
    assert 0 < result.steps <= result.steps_done <= TRAINING.steps
    assert (first.weight - first.goal_OI).abs().max() < 0.1
    with torch.no_grad():
        assert float(first.error(list(TRAINING.held_out))) == pytest.approx(result.after)


def test_a_lower_rate_follows_one_that_ruins() -> None:
    first, second = Problem(), Problem()
    lower = first.train(replace(TRAINING, rates=(1e6, 0.03)))
    alone = second.train(replace(TRAINING, rates=(0.03,)))
    assert [rate for rate, _ in lower.rates] == [1e6, 0.03]
    assert lower.rates[0][1] >= lower.before > lower.after == lower.rates[1][1]
    assert replace(lower, rates=()) == replace(alone, rates=())
    assert torch.equal(first.weight, second.weight)
    assert len(Problem().train().rates) == 1


@pytest.mark.parametrize(
    ("sequence", "steps", "held_out"), [(24, 200, 26), (1024, 200, 26), (4096, 100, 8), (2**17, 18, 1)]
)
def test_long_samples_have_fewer_steps_and_fewer_are_held_out(sequence: int, steps: int, held_out: int) -> None:
    assert training_steps(200, sequence) == steps
    assert held_out_samples(256, sequence) == held_out


@pytest.mark.parametrize(("rate", "noise"), [(1e6, 0.0), (math.inf, 0.0), (0.3, 3.0)])
def test_it_ends_no_worse_than_it_began(rate: float, noise: float) -> None:
    """A rate that ruins everything, one that gives NaN, and noise that can only be learnt by heart."""
    problem = Problem(noise=noise, start=1e-9)
    before = problem.weight.detach().clone()
    result = problem.train(replace(TRAINING, rates=(rate,), train=range(2)))
    assert (result.steps, result.after) == (0, result.before)
    assert result.steps_done < TRAINING.steps
    assert torch.equal(problem.weight, before)


def test_a_stored_dtype_is_what_is_judged() -> None:
    problem = Problem(torch.float32)
    result = problem.train(dtype=torch.bfloat16)
    assert torch.equal(problem.weight, problem.weight.bfloat16().float())
    with torch.no_grad():
        assert float(problem.error(list(TRAINING.held_out))) == pytest.approx(result.after)


@pytest.mark.parametrize("batch", [1, 3, 20, 50])
def test_every_sample_comes_once_in_a_round(batch: int) -> None:
    problem = Problem()
    problem.train(replace(TRAINING, rates=(1e-3,), batch=batch, steps=40))
    order = [sample for samples in problem.seen for sample in samples]
    rounds = [order[at : at + 20] for at in range(0, len(order) - 19, 20)]
    assert rounds
    assert all(sorted(samples) == list(TRAINING.train) for samples in rounds)
    assert len({tuple(samples) for samples in rounds}) == len(rounds), "another order in each round"


def test_nothing_is_trained_at_the_floor_of_rounding() -> None:
    problem = Problem(start=0.0)
    assert problem.train() == Trained(0, 0, 0.0, (), 0.0, 0.0)
    problem = Problem()
    assert problem.train(replace(TRAINING, floor=1e3)).steps_done == 0
    assert problem.seen == []


def test_an_initial_error_must_be_finite() -> None:
    problem = Problem()
    problem.outputs_MTO[21] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        problem.train()


@pytest.mark.parametrize("steps", [1, 2, 7, CHECKS, 200])
def test_the_schedule_rises_then_falls(steps: int) -> None:
    shares = [schedule(step, steps) for step in range(steps)]
    assert all(0.0 < share <= 1.0 for share in shares)
    top = shares.index(max(shares))
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
