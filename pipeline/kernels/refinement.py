"""Training of parameters with early stopping on held-out samples. docs/methods.md#refinement.

The result depends only on the arguments: the order of the samples follows from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.descent import Descent

WARM_UP = 10  # steps of rising rates
CHECKS = 10  # measurements of the held-out error, evenly spread over the steps
PATIENCE = 5  # training stops after this many checks without a smaller error
STEP_TOKENS = 1024  # about as many tokens per step
HELD_OUT_SHARE = 0.1  # of the samples
HELD_OUT_TOKENS = 2**15  # at most, unless a single sample is longer


@dataclass(frozen=True)
class Training:
    """The samples and settings of a training.

    Attributes:
        train, held_out: the indices of the samples to train on, and of the held-out ones.
        steps: the largest number of steps.
        batch: samples per step.
        rates: learning rates. Each is tried if the previous one has not lowered the error.
        seed: the seed of the order of the samples.
        floor: the error of rounding. Parameters with a smaller error are not trained.
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
        steps: the step of the kept parameters; 0: the initial ones.
        steps_done: the number of steps until training stopped.
        rate: the last learning rate.
        rates: each rate that was tried, with its least held-out error, or infinity.
        before, after: held-out errors of the initial and of the kept parameters.
    """

    steps: int
    steps_done: int
    rate: float
    rates: tuple[tuple[float, float], ...]
    before: float
    after: float


Error = Callable[[Sequence[int]], Tensor]  # samples -> their mean error, a scalar


def train_(
    parameters: Sequence[Tensor],
    error: Error,
    training: Training,
    dtypes: Sequence[torch.dtype],
) -> Trained:
    """Train parameters in place, and set them to their best values on the held-out samples, rounded to `dtypes`.

    Without a lower held-out error, they keep their initial values. Held-out errors are measured on rounded values.
    `error`: differentiable in the parameters. `dtypes`: the dtype in which each parameter is stored. Raises ValueError
    if the initial error is not finite.
    """
    run = _Run(parameters, error, training, dtypes)
    before = run.held_out_error()
    if not math.isfinite(before):
        raise ValueError("the error on the held-out samples is not finite")
    if before <= training.floor:
        return Trained(0, 0, 0.0, (), before, before)
    rates: list[tuple[float, float]] = []
    for rate in training.rates:
        steps, steps_done, least = run.train(rate, before)
        rates.append((rate, least))
        if steps:
            break
    return Trained(steps, steps_done, rate, tuple(rates), before, min(before, least))


class _Run:
    """Parameters in training, and their initial values."""

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
        """Return the mean error of rounded values on the held-out samples."""
        trained = [values.clone() for values in self.parameters]
        self._set(self._stored(trained))
        held_out, batch, total = self.training.held_out, self.training.batch, 0.0
        for start in range(0, len(held_out), batch):
            samples = held_out[start : start + batch]
            total += float(self.error(samples)) * len(samples)
        self._set(trained)
        return total / len(held_out) if math.isfinite(total) else math.inf

    def train(self, rate: float, before: float) -> tuple[int, int, float]:
        """Train from the initial values. Return the step of the best values, the steps done, and the least error.

        Step 0 stands for the initial values, whose error is `before`. The least error is that of later steps.
        """
        self._set(self.initial)
        steps = self.training.steps
        checks = {round(steps * check / CHECKS) for check in range(1, CHECKS + 1)}
        best, best_step, least, worse, done = self.initial, 0, math.inf, 0, 0
        for done in self._steps(rate, steps):
            if done not in checks:
                continue
            error = self.held_out_error()
            worse = 0 if error < min(before, least) else worse + 1
            if not worse:
                best, best_step = [each.detach().clone() for each in self.parameters], done
            least = min(least, error)
            if worse == PATIENCE:
                break
        self._set(self._stored(best) if best_step else self.initial)
        return best_step, done, least

    def _steps(self, rate: float, steps: int) -> Iterator[int]:
        """Take the steps of the schedule one by one, and yield the number of each."""
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
        """Yield batches of samples forever, each sample once per epoch."""
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


def step_samples(sequence: int) -> int:
    """Return the number of samples of a step, for samples of this length."""
    return max(1, STEP_TOKENS // sequence)


def training_steps(steps: int, sequence: int) -> int:
    """Return the largest number of steps: if samples are longer than a step, `steps` times √(step / sample)."""
    return max(1, round(steps * math.sqrt(min(1.0, STEP_TOKENS / sequence))))


def held_out_samples(samples: int, sequence: int) -> int:
    """Return the number of held-out samples."""
    return max(1, min(round(HELD_OUT_SHARE * samples), HELD_OUT_TOKENS // sequence))


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step, which rises linearly, then falls to zero like a cosine."""
    rising = min(1.0, (step + 1) / min(WARM_UP, 1 + steps // 4))
    return rising * 0.5 * (1.0 + math.cos(math.pi * step / steps))
