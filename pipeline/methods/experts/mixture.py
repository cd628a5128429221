"""The experts of one layer on sampled tokens: their outputs, the loss of narrowing each, and pruning to one shape.

Functions that weight errors by the loss take the factor of G, the moment of the gradient at the mixture's output.
Experts are visited in order. `Mixture.experts` may read an expert on access, so that one at a time is in memory.

Legend: T tokens, t tokens of an expert, D hidden, N channels of an expert, k channels kept, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.families.blocks import MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import channels_of
from pipeline.kernels.deferred import Deferred, Offload, in_memory
from pipeline.kernels.elimination import eliminate, prune
from pipeline.kernels.mixture_refit import MixtureResidual, Served, refit_mixture_
from pipeline.kernels.nystrom import nested_losses, nested_outputs
from pipeline.kernels.routing import Others, Routing, RoutingRule, route
from pipeline.kernels.sensitivity import Factored
from pipeline.methods.products import passed
from pipeline.methods.tensors import channel_priority

ROUTER, ROUTER_BIAS = "router", "router_bias"  # roles
BATCH = 4096  # tokens of one product with an expert's weights


class ExpertWeights(NamedTuple):
    """The weights of one expert: gate and up, or up alone (N, D), and down (D, N); biases of all of them, or None."""

    readers: tuple[Tensor, ...]
    writer: Tensor
    biases: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Mixture:
    """A router and the experts that it chooses from.

    Attributes:
        router: (E, D).
        bias: (E,), added to the router's scores when experts are chosen, not in their weights; None without one.
        channels: the function that computes the channels from the outputs of gate and up.
        logit_bias: (E,), added to the router's logits; None without one.
    """

    experts: Sequence[ExpertWeights]
    router: Tensor
    bias: Tensor | None
    rule: RoutingRule
    channels: Callable[..., Tensor]
    logit_bias: Tensor | None = None

    @property
    def width(self) -> int:
        """Return the number of channels of the first expert."""
        return len(self.experts[0].readers[0])

    def logits(self, inputs_TD: Tensor) -> Tensor:
        """Return the router's logits (T, E), in float32 or better."""
        dtype = torch.promote_types(inputs_TD.dtype, torch.float32)
        logits_TE = inputs_TD.to(dtype) @ self.router.to(dtype).T
        return logits_TE if self.logit_bias is None else logits_TE + self.logit_bias.to(dtype)

    def route(self, inputs_TD: Tensor) -> Routing:
        """Choose experts for each token."""
        parts = [route(logits_BE, self.rule, self.bias) for logits_BE in self.logits(inputs_TD).split(BATCH)]
        return Routing(torch.cat([part.experts for part in parts]), torch.cat([part.weights for part in parts]))

    def on(self, inputs_TD: Tensor) -> MixtureSample:
        """Return the mixture on a sample of its inputs."""
        return MixtureSample(self, inputs_TD, self.route(inputs_TD))

    def hidden(self, expert: int, inputs_tD: Tensor) -> Tensor:
        """Return the channels (t, N) of one expert, in the dtype of the inputs."""
        return self.channels_of(self.experts[expert], inputs_tD)

    def channels_of(self, weights: ExpertWeights, inputs_tD: Tensor) -> Tensor:
        """Return the channels (t, N) of an expert with these weights, in the dtype of the inputs."""
        return self.channels(*read_by(weights, inputs_tD))

    def outputs(self, expert: int, inputs_tD: Tensor) -> Tensor:
        """Return the outputs (t, D) of one expert, before the router's weight."""
        weights, dtype = self.experts[expert], inputs_tD.dtype
        outputs_tD = passed(self.hidden(expert, inputs_tD), weights.writer)
        return outputs_tD if weights.biases is None else outputs_tD + weights.biases[-1].to(dtype)

    def as_own(self, inputs_TD: Tensor, others: Others) -> tuple[Tensor, float]:
        """Return the inputs (m, D) of an expert on tokens of others, and the factor of its channels."""
        if self.rule.weighs_inputs:
            return inputs_TD[others.tokens] * others.weight, others.factor
        return inputs_TD[others.tokens], others.weight * others.factor

    def weighed(self, inputs_tD: Tensor, weights_t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of one expert on tokens with these signed weights, and the factors of its outputs.

        The factor is the weight itself, or its sign if weights multiply inputs.
        """
        if not self.rule.weighs_inputs:
            return inputs_tD, weights_t
        return inputs_tD * weights_t.abs()[:, None].to(inputs_tD.dtype), weights_t.sign()

    def subset(self, kept: Sequence[int]) -> Mixture:
        """Return the mixture of some of the experts, with their rows of the router."""
        rows = torch.tensor(list(kept), device=self.router.device)
        bias, logit_bias = (None if each is None else each[rows] for each in (self.bias, self.logit_bias))
        experts = Deferred([partial(self.experts.__getitem__, number) for number in kept])
        return replace(self, experts=experts, router=self.router[rows], bias=bias, logit_bias=logit_bias)


@dataclass(frozen=True)
class MixtureSample:
    """A mixture, a sample of its inputs (T, D), and the experts that its router chooses for each token."""

    mixture: Mixture
    inputs: Tensor
    routing: Routing

    @property
    def tokens(self) -> Tensor:
        """Return the number of tokens that choose each expert (E,)."""
        return self.routing.tokens(len(self.mixture.experts))

    def subset(self, kept: Sequence[int]) -> MixtureSample:
        """Return the sample with some of the experts, which the router chooses anew."""
        return self.mixture.subset(kept).on(self.inputs)

    def with_experts(self, experts: Sequence[Callable[[], ExpertWeights]]) -> MixtureSample:
        """Return the sample with other weights of the experts, computed on access."""
        return replace(self, mixture=replace(self.mixture, experts=Deferred(experts)))

    def served(self, expert: int) -> Served:
        """Return the tokens of an expert and their channels p h(x), or h(p x) if routing weights multiply inputs.

        With fewer tokens than channels, also return those of other tokens.
        """
        mixture, inputs_TD = self.mixture, self.inputs
        tokens_t, weights_t = self.routing.of(expert)
        weights_t1, weights = weights_t[:, None].to(inputs_TD.dtype), mixture.experts[expert]
        if mixture.rule.weighs_inputs:
            values_tN = mixture.channels_of(weights, inputs_TD[tokens_t] * weights_t1)
        else:
            values_tN = mixture.channels_of(weights, inputs_TD[tokens_t]) * weights_t1
        others = self.routing.others(expert, values_tN.shape[1], len(tokens_t))
        if others is None:
            return Served(tokens_t, values_tN)
        inputs_mD, factor = mixture.as_own(inputs_TD, others)
        others_mN = mixture.channels_of(weights, inputs_mD) * factor
        matched = others.matched(float(values_tN.double().square().sum()), others_mN, len(tokens_t))
        return Served(tokens_t, values_tN, others_mN * matched, others.scale)

    def output(self) -> Tensor:
        """Return the output (T, D) of the routed experts, in float32 or better."""
        output_TD = torch.zeros_like(self.inputs, dtype=torch.promote_types(self.inputs.dtype, torch.float32))
        for number, expert in enumerate(self.mixture.experts):
            _add_written_(output_TD, self.served(number), expert.writer)
        return output_TD + self.written_biases().to(output_TD.dtype)

    def written_biases(self) -> Tensor:
        """Return the sum (T, D) of the biases of the experts' writers, weighted by the router; without biases, zero."""
        experts = self.mixture.experts
        if experts[0].biases is None:
            return self.routing.weights.new_zeros(1)
        biases = [expert.biases[-1] for expert in experts if expert.biases is not None]
        weights_TE = self.routing.dense(len(experts))
        return weights_TE @ torch.stack(biases).to(weights_TE.dtype)

    def saliencies(self) -> Tensor:
        """Return REAP's saliency of each expert (E,), float64: the mean of p‖f(m)‖ over its tokens.

        For an expert with few tokens, the mean over tokens of others counts like one more token.
        """
        scores = []
        for number in range(len(self.mixture.experts)):
            tokens_t, weights_t = self.routing.of(number)
            inputs_tD, factors_t = self.mixture.weighed(self.inputs[tokens_t], weights_t.double())
            norms_t = self.mixture.outputs(number, inputs_tD).double().norm(dim=1)
            count, other = self._other_saliency(number, len(tokens_t))
            scores.append((float((factors_t * norms_t).sum()) + other) / max(1.0, len(tokens_t) + count))
        return torch.tensor(scores, dtype=torch.float64)

    def _other_saliency(self, number: int, passed: int) -> tuple[float, float]:
        """Return 1 and the mean of p‖f(m)‖ over tokens of others, for an expert with few tokens; else zeros."""
        others = self.routing.others(number, self.mixture.experts[number].writer.shape[1], passed)
        if others is None:
            return 0.0, 0.0
        inputs_mD, _ = self.mixture.as_own(self.inputs, others)
        norms_m = self.mixture.outputs(number, inputs_mD).double().norm(dim=1)
        weight = 1.0 if self.mixture.rule.weighs_inputs else others.weight
        return 1.0, weight * float(norms_m.mean())

    def channel_moment(self, number: int) -> Tensor:
        """Return C_e (N, N) of an expert: the sum of (p h)(p h)ᵀ over its tokens, divided by the number of all."""
        return weighted_moment(self.served(number), len(self.inputs))

    def reader_moment(self, number: int) -> Tensor:
        """Return E[(p x)(p x)ᵀ] (D, D) per token of all, x the tokens of an expert whose inputs the weights
        multiply."""
        tokens_t, weights_t = self.routing.of(number)
        inputs_tD, _ = self.mixture.weighed(self.inputs[tokens_t], weights_t)
        others = self.routing.others(number, self.mixture.experts[number].writer.shape[1], len(tokens_t))
        if others is None:
            return weighted_moment(Served(tokens_t, inputs_tD), len(self.inputs))
        inputs_mD, factor = self.mixture.as_own(self.inputs, others)
        inputs_mD = inputs_mD * factor
        inputs_mD = inputs_mD * others.matched(float(inputs_tD.double().square().sum()), inputs_mD, len(tokens_t))
        return weighted_moment(Served(tokens_t, inputs_tD, inputs_mD, others.scale), len(self.inputs))


@dataclass(frozen=True)
class SolvedExpert:
    """An expert cut to some of its channels.

    Attributes:
        channels: (k,), the kept channels, ascending.
        dense: a function that returns the dense expert.
        writer: a function that returns the new writer (D, k).
        tokens: the number of its sampled tokens.
    """

    channels: Tensor
    dense: Callable[[], ExpertWeights]
    writer: Callable[[], Tensor]
    tokens: int

    @property
    def weights(self) -> ExpertWeights:
        """Return the new weights, computed anew each time."""
        dense = self.dense()
        biases = dense.biases
        if biases is not None:
            *inner, down_D = biases
            biases = (*(bias_N[self.channels] for bias_N in inner), down_D)
        return ExpertWeights(tuple(reader_ND[self.channels] for reader_ND in dense.readers), self.writer(), biases)


def mixture_of(layer: LayerGeometry, weights: Mapping[str, Tensor]) -> Mixture:
    """Return the mixture of a layer, whose experts are read from `weights` on access.

    `weights`: those of the routed experts, `router.weight`, and `router_bias.*` and `router.bias` if the router has
    them.
    """
    bias = next((weights[key] for key in weights if key.startswith(f"{ROUTER_BIAS}.")), None)  # reads no expert
    experts = Deferred([partial(_expert, block, weights) for block in layer.experts])
    rule, channels = rule_of(dict(layer.routing)), channels_of(layer.experts[0])
    return Mixture(experts, weights[f"{ROUTER}.weight"], bias, rule, channels, weights.get(f"{ROUTER}.bias"))


def rule_of(routing: Mapping[str, Any]) -> RoutingRule:
    """Return a router's rule from the fields of `LayerGeometry.routing`."""
    return RoutingRule(
        scores=routing["score"],
        top_k=routing["top_k"],
        normalise=routing["renormalise"],
        scale=routing["scale"],
        groups=routing["groups"],
        top_groups=routing["top_groups"],
        group_members=2 if routing["group_score"] == "top2" else 1,
        weighs_inputs=routing["weighs"] == "inputs",
    )


def _expert(block: MLPBlock, weights: Mapping[str, Tensor]) -> ExpertWeights:
    readers = tuple(weights[matrix.weight_key] for matrix in block.readers)
    biases = tuple(weights[matrix.bias_key] for matrix in block.matrices) if block.writer.bias else None
    return ExpertWeights(readers, weights[block.writer.weight_key], biases)


def read_by(weights: ExpertWeights, inputs_tD: Tensor) -> list[Tensor]:
    """Return the outputs (t, N) of gate and up, or of up alone, in the dtype of the inputs."""
    dtype = inputs_tD.dtype
    read = [passed(inputs_tD, weight) for weight in weights.readers]
    if weights.biases is not None:
        read = [values + bias.to(dtype) for values, bias in zip(read, weights.biases, strict=False)]
    return read


def weighted_moment(part: Served, tokens: int) -> Tensor:
    """Return C_e (N, N): the sum of (p h)(p h)ᵀ over the expert's tokens, divided by the number of all `tokens`."""
    moment_NN = part.moment(torch.promote_types(part.values.dtype, torch.float32))
    return (moment_NN if part.others is None else moment_NN * part.scale) / tokens


def narrowed(sample: MixtureSample, kept: Sequence[int], solved: Sequence[SolvedExpert]) -> MixtureSample:
    """Return the sample with the experts that stay, with their new weights."""
    return sample.subset(kept).with_experts([partial(getattr, each, "weights") for each in solved])


def _add_written_(output_TD: Tensor, part: Served, writer_DN: Tensor) -> None:
    """Add the output of an expert."""
    output_TD.index_add_(0, part.tokens, part.values.to(output_TD.dtype) @ writer_DN.to(output_TD.dtype).T)


def width_losses(sample: MixtureSample, metric: Factored, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the predicted loss of each expert at each width (E, n), nats per token, after a refit of its writer.

    Also return the mixture's output (T, D), as `MixtureSample.output`, for which each expert need not be read again.
    """
    inputs_TD, rows = sample.inputs, []
    output_TD = torch.zeros_like(inputs_TD, dtype=torch.promote_types(inputs_TD.dtype, torch.float32))
    for number, expert in enumerate(sample.mixture.experts):
        part, weighted_DN = sample.served(number), metric.factor.T @ expert.writer.double()
        _add_written_(output_TD, part, expert.writer)
        moment_NN = weighted_moment(part, len(inputs_TD))
        order = eliminate(moment_NN, weighted_DN, min(widths)).order
        losses = metric.scale * nested_losses(
            nested_outputs(moment_NN, weighted_DN, channel_priority(order, len(moment_NN)))
        )
        rows.append(torch.stack([losses[width] * (width < len(moment_NN)) for width in widths]))
    return torch.stack(rows), output_TD + sample.written_biases().to(output_TD.dtype)


def solve_shape(
    sample: MixtureSample,
    metric: Factored | None,
    kept: Sequence[int],
    width: int,
    refit: bool = True,
    offload: Offload = in_memory,
) -> tuple[list[SolvedExpert], Tensor | None]:
    """Keep some experts at one width. Return them and, after a refit, the change (T, D) of the mixture's output.

    Channels are eliminated by each expert's moment under the new routing, weighted by `metric` if given. With `refit`,
    writers are fitted to the dense mixture's output, otherwise each to its own expert's. New writers are stored by
    `offload`. Raises ValueError as `elimination.prune`.
    """
    remaining = sample.subset(kept)
    narrow = partial(_narrowed, remaining, metric, width, offload)
    if not refit:
        return [narrow(number) for number in range(len(kept))], None
    residual = MixtureResidual(sample.output() - remaining.written_biases())
    solved: list[SolvedExpert] = []

    def writer(number: int) -> Tensor:
        """Narrow the next expert, which the refit subtracts while it is held."""
        solved.append(narrow(number))
        return solved[number].writer()

    def expert(number: int) -> ExpertWeights:
        return solved[number].weights

    narrower = remaining.with_experts([partial(expert, number) for number in range(len(kept))])
    writers = Deferred([partial(writer, number) for number in range(len(kept))])
    fitted = refit_mixture_(residual, narrower.served, writers, offload=offload)
    refitted = [replace(each, writer=partial(fitted.__getitem__, number)) for number, each in enumerate(solved)]
    return refitted, residual.residual_TD


def change_loss(change_TD: Tensor, metric: Factored) -> float:
    """Return ½ tr(G E[δ δᵀ]), in nats per token, of the change δ (T, D) of a mixture's output."""
    return 0.5 * metric.scale * float((change_TD.double() @ metric.factor).square().sum()) / len(change_TD)


def _narrowed(
    remaining: MixtureSample, metric: Factored | None, width: int, offload: Offload, number: int
) -> SolvedExpert:
    dense = partial(remaining.mixture.experts.__getitem__, number)
    part, down_DN = remaining.served(number), dense().writer.double()
    whole = part.values.shape[1]
    if width >= whole or not (len(part.tokens) or part.others is not None):
        channels_k = torch.arange(min(width, whole), device=down_DN.device)
        return SolvedExpert(channels_k, dense, offload(down_DN[:, channels_k]), len(part.tokens))
    weighted_DN = None if metric is None else metric.factor.T @ down_DN
    pruned = prune(weighted_moment(part, len(remaining.inputs)), down_DN, width, weighted_DN)
    return SolvedExpert(pruned.channels, dense, offload(pruned.weight), len(part.tokens))
