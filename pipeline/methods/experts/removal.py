"""The loss of removing experts from a mixture, and the share of it that remains after a refit of the others.

docs/methods.md#mixtures. Experts are visited in order, as in `pipeline.methods.experts.mixture`.

Legend: T tokens, t tokens of an expert, B a batch of tokens, D hidden, k experts of a token, E experts, C numbers of
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.interpolation import interpolate
from pipeline.kernels.mixture_refit import SWEEPS, MixtureResidual
from pipeline.kernels.routing import Removals, add_change_, removal_sums, removals
from pipeline.kernels.sensitivity import Factored
from pipeline.methods.experts.mixture import BATCH, Mixture, MixtureSample, change_loss
from pipeline.methods.experts.scores import kept_experts
from pipeline.ranks.curves import spread

REFITTED = 4  # numbers of experts at which the refit is measured


def removal_losses(sample: MixtureSample, metric: Factored) -> Tensor:
    """Return the predicted loss of each expert's removal (E,), nats per token. Its tokens are rerouted without it.

    An expert with few tokens loses the mean over them and over tokens of others, which lose its output.
    """
    mixture, inputs_TD, root_DD = sample.mixture, sample.inputs, metric.factor * metric.scale**0.5
    sums_E = torch.zeros(len(mixture.experts), dtype=torch.float64, device=inputs_TD.device)
    for span_TD in inputs_TD.split(removal_span(len(inputs_TD), mixture.rule.top_k)):
        parts = [_Change.of(mixture, part_BD, len(root_DD)) for part_BD in span_TD.split(BATCH)]
        for number in range(len(mixture.experts)):
            for part in parts:
                part.add_(mixture, number, root_DD)
        for part in parts:
            sums_E += removal_sums(part.without.experts, part.outputs, len(mixture.experts))
    _complete_(sums_E, sample, metric)
    return sums_E / len(inputs_TD)


def _complete_(sums_E: Tensor, sample: MixtureSample, metric: Factored) -> None:
    """Add ½ Σ fᵀ G f of the outputs, without biases, on tokens that stand for those that experts lack."""
    for number in (sample.tokens < sample.mixture.width).nonzero()[:, 0].tolist():
        part = sample.served(number)
        if part.others is not None:
            outputs_mD = part.others.double() @ sample.mixture.experts[number].writer.double().T
            lost = change_loss(outputs_mD, metric) * len(outputs_mD)
            sums_E[number] = part.scale * (sums_E[number] + lost)


def removal_span(tokens: int, top_k: int) -> int:
    """Return the number of tokens for which `removal_losses` visits all experts at once.

    Their changes, D float64 numbers for each of a token's k experts, take no more memory than the refits that a curve
    measures, an output and REFITTED residuals of the whole sample in float32, or than the changes of one batch if that
    is more.
    """
    return BATCH * max(1, tokens * (1 + REFITTED) // (2 * top_k * BATCH))


class _Change(NamedTuple):
    """The changes of tokens' outputs without each of their experts, in the metric of the loss: `outputs` (B, k, q)."""

    inputs: Tensor
    without: Removals
    outputs: Tensor

    @classmethod
    def of(cls, mixture: Mixture, inputs_BD: Tensor, outputs: int) -> _Change:
        """Return zero changes, to which `add_` adds each expert's part."""
        without = removals(mixture.logits(inputs_BD), mixture.rule, mixture.bias)
        shape = (*without.experts.shape, outputs)
        return cls(inputs_BD, without, torch.zeros(shape, dtype=torch.float64, device=inputs_BD.device))

    def add_(self, mixture: Mixture, number: int, root_DD: Tensor) -> None:
        """Add one expert's part."""
        changes_Bk = self.without.changes[:, :, number]
        tokens_t = changes_Bk.any(dim=1).nonzero()[:, 0]
        outputs_tkq, changes_tk = self.outputs[tokens_t], changes_Bk[tokens_t]
        weights_t = changes_tk.gather(1, changes_tk.abs().argmax(dim=1, keepdim=True))[:, 0]
        inputs_tD, _ = mixture.weighed(self.inputs[tokens_t], weights_t)
        factors_tk = changes_tk.sign() if mixture.rule.weighs_inputs else changes_tk
        add_change_(outputs_tkq, factors_tk, mixture.outputs(number, inputs_tD).double() @ root_DD)
        self.outputs[tokens_t] = outputs_tkq


def remaining_shares(
    sample: MixtureSample, metric: Factored, removal_E: Tensor, counts: Sequence[int], output_TD: Tensor
) -> Tensor:
    """Return the share (C,) of the summed removal losses that remains after the refit, at each number of experts.

    It is measured at up to REFITTED of the `counts`, at the full width, and interpolated between them. All are refitted
    side by side, so that an expert is visited 1 + SWEEPS times. Each keeps a residual (T, D) in float32 or better.
    `output_TD`: the mixture's output.
    """
    measured = refitted_counts(counts, len(removal_E))
    if not measured:
        return torch.ones(len(counts), dtype=torch.float64)
    kept = [kept_experts(removal_E, count, sample.mixture.rule.groups) for count in measured]
    refits = [_Refit.of(sample, each.tolist(), output_TD) for each in kept]
    for visit in range(1 + SWEEPS):
        for number in range(len(removal_E)):
            for refit in refits:
                refit.visit(number, first=visit == 0)
    shares = []
    for kept_k, refit in zip(kept, refits, strict=True):
        removed = float(removal_E.sum() - removal_E[kept_k].sum())
        loss = change_loss(refit.residual.residual_TD, metric)
        shares.append(min(1.0, loss / removed) if removed > 0.0 else 1.0)
    return interpolate(measured, torch.tensor(shares, dtype=torch.float64), torch.tensor(counts))


class _Refit(NamedTuple):
    """Some of the experts at their full width, of which only the residual is kept. `places`: number -> place."""

    remaining: MixtureSample
    places: Mapping[int, int]
    residual: MixtureResidual

    @classmethod
    def of(cls, sample: MixtureSample, kept: Sequence[int], output_TD: Tensor) -> _Refit:
        remaining, places = sample.subset(kept), {number: place for place, number in enumerate(kept)}
        return cls(remaining, places, MixtureResidual(output_TD - remaining.written_biases()))

    def visit(self, number: int, *, first: bool) -> None:
        """Subtract a kept expert's output at the `first` visit, refit its writer at later ones."""
        if (place := self.places.get(number)) is None:
            return
        part = self.remaining.served(place)
        if first:
            self.residual.subtract_(part, self.remaining.mixture.experts[place].writer.double())
        else:
            self.residual.refit_(part)


def refitted_counts(counts: Sequence[int], experts: int) -> Sequence[int]:
    """Return the numbers of experts at which `remaining_shares` measures."""
    return spread([count for count in counts if count < experts], REFITTED)
