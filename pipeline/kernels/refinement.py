"""Trains parameters. Held-out samples choose the rate, stop it, and may refuse it. docs/methods.md#refinement.

The result depends on the arguments alone: the order of the samples follows from a seed, and a step is computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.descent import Descent

WARM_UP = 10  # steps of rising rates
CHECKS = 10  # looks at the held-out samples, evenly spread over the steps
PATIENCE = 5  # looks without a smaller error, after which training stops
PROBE_SHARE = 0.1  # of the steps, for each rate that is tried
GAIN_SHARE = 0.75  # of the largest gain of a trial; short trials favour low rates, which gain less in the end
RATES_TRIED = 3
STEP_TOKENS = 1024  # of a step, about


@dataclass(frozen=True)
class Training:
    """The samples and settings of a training.

    Attributes:
        train, held_out: numbers of the samples to train on, and of those that judge.
        steps: the most steps.
        batch: samples of a step.
        rates: learning rates to try, ascending; `chosen_rate` trains.
        seed: of the order of the samples.
        floor: an error that is rounding alone; below it nothing is trained.
    """

    train: Sequence[int]
    held_out: Sequence[int]
    steps: int
    batch: int
    rates: Sequence[float]
    seed: int
    floor: float = 0.0


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        steps: steps of the parameters that were kept; 0: the initial ones.
        steps_done: steps until training stopped.
        rate: the learning rate; rates: each rate that was tried, and its held-out error after the trial, or infinity.
        before, after: held-out error of the initial and of the kept parameters.
    """

    steps: int
    steps_done: int
    rate: float
    rates: tuple[tuple[float, float], ...]
    before: float
    after: float


Error = Callable[[Sequence[int]], Tensor]  # some samples -> their mean error, a scalar


def train_(
    parameters: Sequence[Tensor],
    error: Error,
    training: Training,
    dtypes: Sequence[torch.dtype],
) -> Trained:
    """Train parameters in place, and leave them at their best values on the held-out samples.

    `error`: differentiable in the parameters. `dtypes`: in which each of them is stored. All held-out errors are those
    of stored values; the parameters end as such. They end at their initial values unless training has lowered the
    error. Raises ValueError if the initial error is not finite.
    """
    run = _Run(parameters, error, training, dtypes)
    before = run.held_out_error()
    if not math.isfinite(before):
        raise ValueError("the error on the held-out samples is not finite")
    if before <= training.floor:
        return Trained(0, 0, 0.0, (), before, before)
    if len(training.rates) == 1:
        return _trained(run, training.rates[0], (), before)
    rates = tuple((rate, run.tried(rate, probe_steps(training.steps))) for rate in training.rates)
    rate = chosen_rate(rates, before)
    best, least = min(rates, key=lambda tried: tried[1])
    trained = _trained(run, rate, rates, before)
    return _trained(run, best, rates, before) if rate > best and trained.after >= least else trained


def _trained(run: _Run, rate: float, rates: tuple[tuple[float, float], ...], before: float) -> Trained:
    steps, steps_done, after = run.train(rate, before)
    return Trained(steps, steps_done, rate, rates, before, after)


class _Run:
    """Parameters in training. `initial`: their first values."""

    def __init__(
        self, parameters: Sequence[Tensor], error: Error, training: Training, dtypes: Sequence[torch.dtype]
    ) -> None:
        self.parameters = parameters
        self.error = error
        self.training = training
        self.dtypes = dtypes
        self.initial = [values.detach().clone() for values in parameters]

    @torch.no_grad()
    def held_out_error(self) -> float:
        """Return the mean error of stored values over the held-out samples, a batch at a time."""
        trained = [values.clone() for values in self.parameters]
        self._set(self._stored(trained))
        held_out, batch, total = self.training.held_out, self.training.batch, 0.0
        for start in range(0, len(held_out), batch):
            samples = held_out[start : start + batch]
            total += float(self.error(samples)) * len(samples)
        self._set(trained)
        return total / len(held_out) if math.isfinite(total) else math.inf

    def tried(self, rate: float, steps: int) -> float:
        """Return the held-out error after a short training from the initial values."""
        for _ in self._steps(rate, steps):
            pass
        error = self.held_out_error()
        self._set(self.initial)
        return error

    def train(self, rate: float, before: float) -> tuple[int, int, float]:
        """Train from the initial values. Return the steps of the best values, the steps done, and the best error."""
        steps = self.training.steps
        looks = {round(steps * look / CHECKS) for look in range(1, CHECKS + 1)}
        best, best_step, best_error, worse, done = self.initial, 0, before, 0, 0
        for done in self._steps(rate, steps):
            if done not in looks:
                continue
            error = self.held_out_error()
            if error < best_error:
                best, best_step, best_error, worse = [each.detach().clone() for each in self.parameters], done, error, 0
            else:
                worse += 1
            if worse == PATIENCE:
                break
        self._set(self._stored(best) if best_step else self.initial)
        return best_step, done, best_error

    def _steps(self, rate: float, steps: int) -> Iterator[int]:
        """Take all steps of a schedule, and yield the number of each."""
        descent, batches, scale = Descent(self.parameters), self._batches(), None
        for step in range(steps):
            for values in self.parameters:
                values.grad = None
            with torch.enable_grad():
                error = self.error(next(batches))
                scale = scale or max(float(error.detach()), torch.finfo(torch.float32).tiny)
                (error / scale).backward()
            descent.step(rate * schedule(step, steps))
            yield step + 1

    def _batches(self) -> Iterator[Sequence[int]]:
        """Yield batches of samples without end, each sample once in every round."""
        generator = torch.Generator().manual_seed(self.training.seed)
        train, batch = self.training.train, min(self.training.batch, len(self.training.train))
        waiting: list[int] = []
        while True:
            if len(waiting) < batch:
                waiting += [train[place] for place in torch.randperm(len(train), generator=generator).tolist()]
            yield waiting[:batch]
            waiting = waiting[batch:]

    def _stored(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [value.to(dtype).to(value.dtype) for value, dtype in zip(values, self.dtypes, strict=True)]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def chosen_rate(rates: Sequence[tuple[float, float]], before: float) -> float:
    """Return the largest rate whose trial has three quarters of the best one's gain; without a gain, the best one.

    `rates`: each rate, ascending, and the error after its trial. `before`: the error at first.
    """
    best, least = min(rates, key=lambda tried: tried[1])
    if least >= before:
        return best
    return max(rate for rate, error in rates if before - error >= GAIN_SHARE * (before - least))


def step_samples(sequence: int) -> int:
    """Return the number of samples of a step, for samples of this length."""
    return max(1, STEP_TOKENS // sequence)


def probe_steps(steps: int) -> int:
    """Return the steps of the short training by which a rate is tried."""
    return max(1, round(PROBE_SHARE * steps))


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step: it rises linearly, then falls to zero as a cosine."""
    rising = min(1.0, (step + 1) / min(WARM_UP, 1 + steps // 4))
    return rising * 0.5 * (1.0 + math.cos(math.pi * step / steps))
