"""The training loop of a healing: AdamW on the divergence from the teacher's stored rows. docs/methods.md#healing.

It continues from any step with the same bits: the order of windows follows from the seed and the number of the step.
Several processes share the windows of each step; all of them call each function at the same time.

Legend: B windows of a micro-batch, S tokens of a window, T scored tokens of these, D hidden, V vocabulary, W bytes.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.levels_lamina import PACKED, PARTS
from manifests.entries import HealingCurve
from manifests.errors import NumericsError
from manifests.heal import LOGIT_ROWS
from pipeline.healing.processes import Processes, local, whole
from pipeline.healing.stored_text import StoredText
from pipeline.healing.student import Student
from pipeline.kernels.teacher_rows import full_divergence, row_divergence

WARM_UP = 3  # steps
BETAS = (0.9, 0.95)
EVALUATIONS = 8
MOST_SKIPPED = 10  # steps whose gradient is not finite
WORSE, RETREAT = 1.02, 0.3  # than the best divergence: then the best weights train on, at this share of the rate
BEST = "best/"  # of the names of best tensors in a checkpoint
# Of matrices; how much more of tensors with few numbers, and of latent weights of codes; measured on SmolLM2-135M.
BASE_RATE, FEW, LATENTS, BASE_WIDTH = 2e-4, 6.0, 20.0, 576


@dataclass(frozen=True)
class Schedule:
    """The steps of a training, and its largest rate.

    `relative`: `peak` is a share of each matrix's mean magnitude at the start, and `few` times this share of other
    tensors'; without it, `peak` is the rate of all tensors.
    """

    windows: int
    per_step: int
    epochs: int
    peak: float
    seed: int
    relative: bool = False
    few: float = FEW

    @property
    def said_peak(self) -> str:
        """Return the largest rate for messages."""
        return f"{self.peak:.3g}{' of each magnitude' if self.relative else ''}"

    @property
    def steps(self) -> int:
        """The number of steps: the last one may have fewer windows."""
        return -(-self.windows * self.epochs // self.per_step)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step from 0: a linear rise, then half a cosine to zero."""
        rise = min(WARM_UP, self.steps // 2)
        if step < rise:
            return self.peak * (step + 1) / (rise + 1)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))

    def windows_of(self, step: int) -> list[int]:
        """Return the windows of a step: each epoch is a permutation of all windows."""
        places = range(step * self.per_step, min((step + 1) * self.per_step, self.windows * self.epochs))
        orders = {epoch: self._order(epoch) for epoch in {place // self.windows for place in places}}
        return [orders[place // self.windows][place % self.windows] for place in places]

    @property
    def evaluated(self) -> set[int]:
        """The numbers of steps after which the model is evaluated."""
        return {round(self.steps * part / EVALUATIONS) for part in range(EVALUATIONS + 1)}

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed + epoch) % 2**63)
        order: list[int] = torch.randperm(self.windows, generator=generator).tolist()
        return order


def default_rate(hidden: int) -> float:
    """Return the rate of `learning_rate: auto`, a share of each matrix's mean magnitude.

    It is that of a measured width, by the rule of maximal update parametrisation (arXiv 2203.03466, table 8): Adam's
    rate of hidden matrices is proportional to 1 / width, and their numbers to 1 / sqrt(width).
    """
    return BASE_RATE * math.sqrt(BASE_WIDTH / hidden)


@dataclass
class Progress:
    """The state of a training between two steps. `best`: the rounded tensors of the best evaluation so far."""

    step: int
    curve: HealingCurve
    best: Mapping[str, Tensor]


class Trainer:
    """Trains a student. `state` and `load` exchange everything that a later process needs to continue."""

    def __init__(
        self,
        student: Student,
        text: StoredText,
        schedule: Schedule,
        processes: Processes,
        say: Callable[[str], None],
    ) -> None:
        self.student = student
        self.processes = processes
        self.text = text
        self.schedule = schedule
        self.say = say
        rates = (
            tensor_rates(student.trained, schedule.few) if schedule.relative else dict.fromkeys(student.trained, 1.0)
        )
        groups = [{"params": [each], "rate": rates[name]} for name, each in student.trained.items()]
        on_cpu = all(each.device.type == "cpu" for each in student.trained.values())
        # On a CPU, torch by default goes through all numbers once for each of ten operations.
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=0.0, fused=on_cpu or None)
        self.progress = Progress(0, HealingCurve(retreats=()), {})
        self.loss = math.nan  # of the last step
        self._seconds: dict[str, float] = defaultdict(float)  # that this process spent on steps and on evaluations
        self._times: dict[str, int] = defaultdict(int)

    @property
    def _share(self) -> float:
        """The share of the schedule's rate that is left after the retreats so far."""
        return float(RETREAT ** len(self.progress.curve.retreats or ()))

    @property
    def seconds_left(self) -> float:
        """The seconds to the end: each step and each evaluation takes as long as the mean of those so far."""
        step, mean = self.progress.step, {kind: self._seconds[kind] / times for kind, times in self._times.items()}
        evaluations = sum(each > step for each in self.schedule.evaluated)
        return (self.schedule.steps - step) * mean.get("step", 0.0) + evaluations * mean.get("evaluation", 0.0)

    def run(self, after_step: Callable[[], None]) -> None:
        """Train to the end. `after_step` is called after each step, and may raise or store the state.

        Raises NumericsError after `MOST_SKIPPED` steps whose gradient was not finite, or if the model's divergence is
        not finite before a step.
        """
        if self.progress.step == 0 and not self.progress.curve.steps:
            self._timed("evaluation", self._evaluate)
        while self.progress.step < self.schedule.steps:
            self._timed("step", self._step)
            if self.progress.step in self.schedule.evaluated:
                self._timed("evaluation", self._evaluate)
            after_step()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name. They are not copies, unless they do not exist yet."""
        state = dict[str, Tensor]()
        best = self.progress.best or self.student.rounded_copy()
        for name, parameter in self.student.trained.items():
            moments = self.optimizer.state.get(parameter, {})
            state[f"weight/{name}"] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                state[f"{kind}/{name}"] = moments.get(kind, torch.zeros_like(parameter))
            state[BEST + name] = best[name]
        return state

    def load(self, state: Mapping[str, Tensor], step: int, curve: HealingCurve) -> None:
        """Continue from a checkpoint: the result of `state` with other values, whose tensors it keeps."""
        has_best = curve.best > 0 or curve.retreats is not None
        best = {name: state[BEST + name] for name in self.student.trained} if has_best else {}
        self.progress = Progress(step, curve, best)
        steps = torch.tensor(float(step - curve.skipped))
        for name, parameter in self.student.trained.items():
            with torch.no_grad():
                parameter.copy_(state[f"weight/{name}"])
            moments = {kind: state[f"{kind}/{name}"] for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": steps.clone(), **moments}

    def _timed(self, kind: str, act: Callable[[], None]) -> None:
        begun = time.monotonic()
        act()
        self._seconds[kind] += time.monotonic() - begun
        self._times[kind] += 1

    def _step(self) -> None:
        step, curve = self.progress.step, self.progress.curve
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(step) * group["rate"] * self._share
        self.loss = self._gradients(self.schedule.windows_of(step))
        if self._is_finite():
            self.optimizer.step()
        else:
            curve = curve.model_copy(update={"skipped": curve.skipped + 1})
            self.say(f"heal step {step + 1}: the gradient is not finite; skipped, {curve.skipped} so far")
            if curve.skipped >= MOST_SKIPPED:
                raise NumericsError(
                    f"heal: the gradients of {curve.skipped} steps were NaN or infinite; lower heal.learning_rate "
                    f"({self.schedule.said_peak}), or leave out heal; OUTPUT is as it was"
                )
        self.optimizer.zero_grad(set_to_none=True)
        self.progress = Progress(step + 1, curve, self.progress.best)

    def _gradients(self, chosen: list[int]) -> float:
        """Add up the gradients of the mean divergence over some windows. Return the divergence in nats per token."""
        scored = len(chosen) * (self.text.sizes.length - self.text.sizes.unscored)
        total = 0.0
        for batch, weight in self.processes.share(chosen, self.text.sizes.micro_batch):
            rows_TW = self.text.rows(batch)
            hidden_TD = self._scored(self.student.hidden(self.text.ids(batch).to(self.student.device)))
            # The head stays as it is, so that only the gradient at its inputs is needed: some tokens at a time.
            leaf_TD = hidden_TD.detach().requires_grad_()
            with self.student.head_products():
                for first in range(0, len(rows_TW), LOGIT_ROWS):
                    part = slice(first, first + LOGIT_ROWS)
                    loss = row_divergence(self.student.logits(leaf_TD[part]), rows_TW[part]) * (weight / scored)
                    loss.backward()
                    total += loss.item()
            assert leaf_TD.grad is not None
            hidden_TD.backward(leaf_TD.grad * self.processes.count)  # FSDP takes the mean over processes
        return self.processes.total(total)

    def _scored(self, hidden_BSD: Tensor) -> Tensor:
        """Return the tokens (T, D) of windows that predict a scored one."""
        return hidden_BSD[:, self.text.sizes.unscored - 1 : -1].flatten(0, 1)

    def _is_finite(self) -> bool:
        gradients = [local(each.grad) for each in self.student.trained.values() if each.grad is not None]
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        return not self.processes.any(not finite)

    def _evaluate(self) -> None:
        """Measure the divergence on the held-out windows, with the weights as they would be stored; keep the best. If
        these are worse, train on from the best ones at a lower rate."""
        step, curve, best = self.progress.step, self.progress.curve, self.progress.best
        with self.student.rounded(), torch.no_grad():
            divergence = self._held_out_divergence()
            is_best = divergence < min(curve.divergences, default=math.inf)
            if is_best:
                best = self.student.rounded_copy()
        if math.isfinite(divergence):
            measured = {"steps": (*curve.steps, step), "divergences": (*curve.divergences, divergence)}
            curve = curve.model_copy(update={**measured, "best": step if is_best else curve.best})
            self.say(f"heal step {step} of {self.schedule.steps}: divergence {divergence:.4f} nats per token held out")
        else:
            self._refuse_weights()
        self.progress = Progress(step, curve, best)
        if not divergence <= WORSE * min(curve.divergences) and step < self.schedule.steps:
            self._retreat()

    def _refuse_weights(self) -> None:
        """Report that the present weights are not kept. Raises NumericsError if they are those of the start."""
        step, of = self.progress.step, self.schedule.steps
        if step == 0:
            raise NumericsError(
                "heal: the divergence from the dense model on held-out text is not finite before a step; check OUTPUT "
                "with `python -m pipeline.verify`; OUTPUT is as it was"
            )
        self.say(f"heal step {step} of {of}: the divergence on held-out text is not finite; these weights are not kept")

    def _retreat(self) -> None:
        """Go back to the best weights, for steps at a lower rate. Adam's second moments stay."""
        step, curve = self.progress.step, self.progress.curve
        if curve.retreats is None:  # begun by a version that did not store the weights of the start
            return
        self.student.restore(self.progress.best)
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()
        curve = curve.model_copy(update={"retreats": (*curve.retreats, step)})
        self.progress = Progress(step, curve, self.progress.best)
        said = f"back to the weights of step {curve.best}; {self._share:.2g} of the rate from here on"
        self.say(f"heal step {step}: {said}")

    def _held_out_divergence(self) -> float:
        total = 0.0
        for (window,), weight in self.processes.share(self.text.sizes.evaluated, 1):
            ids_BS = self.text.held_out_ids(window).to(self.student.device)
            hidden_TD = self._scored(self.student.hidden(ids_BS))
            teacher_TD = self._scored(self.text.held_out_outputs(window)[None])
            for first in range(0, len(hidden_TD), LOGIT_ROWS):
                part = slice(first, first + LOGIT_ROWS)
                teacher_TV = self.student.teacher_logits(teacher_TD[part])
                total += weight * full_divergence(teacher_TV, self.student.logits(hidden_TD[part])).item()
        return self.processes.total(total) / (
            len(self.text.sizes.evaluated) * (self.text.sizes.length - self.text.sizes.unscored)
        )


def tensor_rates(trained: Mapping[str, Tensor], few: float = FEW) -> dict[str, float]:
    """Return the rate of each tensor, as a multiple of that of a matrix whose mean magnitude is 1. Zeros have the
    magnitude of the smallest other tensor.

    `few`: the share of scales, levels, norms and biases beside that of matrices: they are few numbers, so that the
    noise of their gradients adds up to less. Latent weights of codes have to reach the next level.
    """
    sums = {name: whole(tensor.detach().abs().sum(dtype=torch.float64)) for name, tensor in trained.items()}
    magnitudes = {name: float(total) / trained[name].numel() for name, total in sums.items()}
    least = min((size for size in magnitudes.values() if size > 0), default=1.0)
    shares = {name: few for name, tensor in trained.items() if tensor.ndim == 1 or name.endswith(PARTS)}
    shares |= {name: LATENTS for name in trained if name.endswith(PACKED)}
    return {name: (size or least) * shares.get(name, 1.0) for name, size in magnitudes.items()}
