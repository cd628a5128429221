"""The experts of one layer on sampled tokens: outputs, what removing one costs, and one shape for those that stay.

All functions need the weights of the layer's experts and router and `inputs_TD`, a sample of the mixture's inputs
(`Moment("mlp.in", kind="sample")`). Those that weigh by the loss also need the factor of G, the moment of the gradient
at the mixture's output. Experts are visited in order, so that the values of one expert at a time are in memory.

Legend: T tokens, t those of an expert, D hidden, N channels of an expert, k channels kept, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.elimination import eliminate, prune
from pipeline.kernels.mixture_refit import Served, refit_mixture
from pipeline.kernels.moments import add_head_moment_
from pipeline.kernels.nystrom import nested_losses, nested_outputs
from pipeline.kernels.routing import Routing, RoutingRule, add_change_, removal_sums, removals, route
from pipeline.kernels.sensitivity import Factored
from pipeline.methods.experts.scores import ExpertSums
from pipeline.methods.tensors import channel_priority

BATCH = 4096  # tokens whose changes of all their experts are in memory at a time


class ExpertWeights(NamedTuple):
    """The weights of one expert: gate and up, or up alone (N, D), and down (D, N); perhaps biases of all of them."""

    readers: tuple[Tensor, ...]
    down: Tensor
    biases: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Mixture:
    """A router and the experts that it chooses from.

    Attributes:
        router: (E, D).
        bias: (E,), added to the router's scores for the choice alone; None without one.
        channels: the function from the outputs of gate and up to the channels.
        logit_bias: (E,), added to the router's logits; None without one.
    """

    experts: tuple[ExpertWeights, ...]
    router: Tensor
    bias: Tensor | None
    rule: RoutingRule
    channels: Callable[..., Tensor]
    logit_bias: Tensor | None = None

    def logits(self, inputs_TD: Tensor) -> Tensor:
        """Return the router's logits (T, E), in float32 or better."""
        dtype = torch.promote_types(inputs_TD.dtype, torch.float32)
        logits_TE = inputs_TD.to(dtype) @ self.router.to(dtype).T
        return logits_TE if self.logit_bias is None else logits_TE + self.logit_bias.to(dtype)

    def route(self, inputs_TD: Tensor) -> Routing:
        """Choose experts for each token."""
        return route(self.logits(inputs_TD), self.rule, self.bias)

    def hidden(self, expert: int, inputs_tD: Tensor) -> Tensor:
        """Return the channels (t, N) of one expert, in the dtype of the inputs."""
        weights, dtype = self.experts[expert], inputs_tD.dtype
        read = [inputs_tD @ weight.to(dtype).T for weight in weights.readers]
        if weights.biases is not None:
            read = [values + bias.to(dtype) for values, bias in zip(read, weights.biases, strict=False)]
        return self.channels(*read)

    def outputs(self, expert: int, inputs_tD: Tensor) -> Tensor:
        """Return the outputs (t, D) of one expert, before the router's weight."""
        weights, dtype = self.experts[expert], inputs_tD.dtype
        outputs_tD = self.hidden(expert, inputs_tD) @ weights.down.to(dtype).T
        return outputs_tD if weights.biases is None else outputs_tD + weights.biases[-1].to(dtype)

    def served(self, expert: int, inputs_TD: Tensor, weights_TE: Tensor) -> Served:
        """Return the tokens that an expert serves, and p h on them, h(p x) where weights multiply inputs."""
        tokens_t = weights_TE[:, expert].nonzero()[:, 0]
        weights_t1 = weights_TE[tokens_t, expert, None].to(inputs_TD.dtype)
        if self.rule.weighs_inputs:
            return Served(tokens_t, self.hidden(expert, inputs_TD[tokens_t] * weights_t1))
        return Served(tokens_t, self.hidden(expert, inputs_TD[tokens_t]) * weights_t1)

    def weighed(self, inputs_tD: Tensor, weights_t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of one expert on tokens with these weights, and the factors of its outputs: both signed.

        The factor is the weight itself, or its sign where the weight multiplies the inputs.
        """
        if not self.rule.weighs_inputs:
            return inputs_tD, weights_t
        return inputs_tD * weights_t.abs()[:, None].to(inputs_tD.dtype), weights_t.sign()

    def output(self, inputs_TD: Tensor) -> Tensor:
        """Return the output (T, D) of the routed experts, in float32 or better."""
        weights_TE = self.route(inputs_TD).dense(len(self.experts))
        output_TD = torch.zeros_like(inputs_TD, dtype=torch.promote_types(inputs_TD.dtype, torch.float32))
        for number, expert in enumerate(self.experts):
            part = self.served(number, inputs_TD, weights_TE)
            written_tD = part.values.to(output_TD.dtype) @ expert.down.to(output_TD.dtype).T
            output_TD.index_add_(0, part.tokens, written_tD)
        return output_TD + self.written_biases(weights_TE).to(output_TD.dtype)

    def written_biases(self, weights_TE: Tensor) -> Tensor:
        """Return the sum (T, D) of the experts' biases, weighted by the router: of their writers alone, or zero."""
        biases = [expert.biases[-1] for expert in self.experts if expert.biases is not None]
        return weights_TE @ torch.stack(biases).to(weights_TE.dtype) if biases else weights_TE.new_zeros(1)

    def subset(self, kept: Sequence[int]) -> Mixture:
        """Return the mixture of some experts: the others leave the router, too."""
        rows = torch.tensor(list(kept), device=self.router.device)
        bias, logit_bias = (None if each is None else each[rows] for each in (self.bias, self.logit_bias))
        experts = tuple(self.experts[number] for number in kept)
        return replace(self, experts=experts, router=self.router[rows], bias=bias, logit_bias=logit_bias)


class SolvedExpert(NamedTuple):
    """The channels (k,) of the dense expert that stay, ascending, and its new weights on them.

    `tokens`: sampled tokens that it serves; without any, its first channels stay as they are.
    """

    channels: Tensor
    weights: ExpertWeights
    tokens: int


def expert_tokens(mixture: Mixture, inputs_TD: Tensor) -> Tensor:
    """Return how many tokens the router sends to each expert (E,)."""
    return (mixture.route(inputs_TD).dense(len(mixture.experts)) != 0).sum(dim=0)


def expert_sums(mixture: Mixture, inputs_TD: Tensor) -> ExpertSums:
    """Return the sums that expert scores follow."""
    weights_TE = mixture.route(inputs_TD).dense(len(mixture.experts)).double()
    rows = []
    for number in range(len(mixture.experts)):
        tokens_t = weights_TE[:, number].nonzero()[:, 0]
        weights_t = weights_TE[tokens_t, number]
        inputs_tD, factors_t = mixture.weighed(inputs_TD[tokens_t], weights_t)
        norms_t = mixture.outputs(number, inputs_tD).double().norm(dim=1)
        rows.append((len(tokens_t), float(weights_t.sum()), float(norms_t.sum()), float((factors_t * norms_t).sum())))
    return ExpertSums(*torch.tensor(rows, dtype=torch.float64).T)


def removal_losses(mixture: Mixture, inputs_TD: Tensor, metric: Factored) -> Tensor:
    """Return the predicted loss of each expert's removal (E,), nats per token, its tokens routed anew without it."""
    felt_DD = metric.factor * metric.scale**0.5
    sums_E = torch.zeros(len(mixture.experts), dtype=torch.float64, device=inputs_TD.device)
    for part_TD in inputs_TD.split(BATCH):
        without = removals(mixture.logits(part_TD), mixture.rule, mixture.bias)
        changes_Tkq = torch.zeros(*without.experts.shape, len(felt_DD), dtype=torch.float64, device=part_TD.device)
        for number in range(len(mixture.experts)):
            changes_Tk = without.changes[:, :, number]
            tokens_t = changes_Tk.any(dim=1).nonzero()[:, 0]
            some_tkq, some_tk = changes_Tkq[tokens_t], changes_Tk[tokens_t]
            weights_t = some_tk.gather(1, some_tk.abs().argmax(dim=1, keepdim=True))[:, 0]
            inputs_tD, _ = mixture.weighed(part_TD[tokens_t], weights_t)
            factors_tk = some_tk.sign() if mixture.rule.weighs_inputs else some_tk
            add_change_(some_tkq, factors_tk, mixture.outputs(number, inputs_tD).double() @ felt_DD)
            changes_Tkq[tokens_t] = some_tkq
        sums_E += removal_sums(without.experts, changes_Tkq, len(mixture.experts))
    return sums_E / len(inputs_TD)


def weighted_moment(part: Served, tokens: int) -> Tensor:
    """Return C_e (N, N): E[(p h)(p h)ᵀ] per token of all."""
    width = part.values.shape[1]
    moment_NN = torch.zeros(width, width, dtype=torch.float64, device=part.values.device)
    add_head_moment_(moment_NN[None], part.values, product_dtype=torch.promote_types(part.values.dtype, torch.float32))
    return moment_NN / tokens


def width_losses(mixture: Mixture, inputs_TD: Tensor, metric: Factored, widths: Sequence[int]) -> Tensor:
    """Return the predicted loss of each expert at each width (E, n), nats per token, its writer refitted alone."""
    weights_TE = mixture.route(inputs_TD).dense(len(mixture.experts))
    rows = []
    for number, expert in enumerate(mixture.experts):
        part, felt_DN = mixture.served(number, inputs_TD, weights_TE), metric.factor.T @ expert.down.double()
        moment_NN = weighted_moment(part, len(inputs_TD))
        order = eliminate(moment_NN, felt_DN, min(widths)).order
        losses = metric.scale * nested_losses(
            nested_outputs(moment_NN, felt_DN, channel_priority(order, len(moment_NN)))
        )
        rows.append(torch.stack([losses[width] * (width < len(moment_NN)) for width in widths]))
    return torch.stack(rows)


def solve_shape(
    mixture: Mixture, inputs_TD: Tensor, metric: Factored | None, kept: Sequence[int], width: int, refit: bool = True
) -> list[SolvedExpert]:
    """Keep some experts at one width, the router's other rows gone, and let them take over the work of all.

    Channels are eliminated by each expert's moment under the routing that is left, weighted by `metric` if given. With
    `refit`, writers are fitted to the dense mixture's output, otherwise each to its own expert's. Raises ValueError as
    `elimination.prune`.
    """
    stays = mixture.subset(kept)
    weights_TE = stays.route(inputs_TD).dense(len(kept))
    solved = [
        _narrowed(stays.experts[number], stays.served(number, inputs_TD, weights_TE), len(inputs_TD), metric, width)
        for number in range(len(kept))
    ]
    if not refit:
        return solved
    narrow = replace(stays, experts=tuple(each.weights for each in solved))
    fitted = refit_mixture(
        mixture.output(inputs_TD) - stays.written_biases(weights_TE),
        lambda number: narrow.served(number, inputs_TD, weights_TE),
        [each.weights.down for each in solved],
    )
    return [
        each._replace(weights=each.weights._replace(down=down_Dk)) for each, down_Dk in zip(solved, fitted, strict=True)
    ]


def shape_loss(
    mixture: Mixture, inputs_TD: Tensor, metric: Factored, kept: Sequence[int], solved: Sequence[SolvedExpert]
) -> float:
    """Return ½ tr(G E[δ δᵀ]) of a solution, in nats per token, δ the change of the mixture's output."""
    stays = mixture.subset(kept)
    narrow = replace(stays, experts=tuple(each.weights for each in solved))
    felt_TD = (mixture.output(inputs_TD) - narrow.output(inputs_TD)).double() @ metric.factor
    return 0.5 * metric.scale * float(felt_TD.square().sum()) / len(inputs_TD)


def _narrowed(expert: ExpertWeights, part: Served, tokens: int, metric: Factored | None, width: int) -> SolvedExpert:
    whole = part.values.shape[1]
    down_DN = expert.down.double()
    if width >= whole or not len(part.tokens):
        channels_k = torch.arange(min(width, whole), device=down_DN.device)
        return SolvedExpert(channels_k, _on(expert, channels_k, down_DN[:, channels_k]), len(part.tokens))
    felt_DN = None if metric is None else metric.factor.T @ down_DN
    pruned = prune(weighted_moment(part, tokens), down_DN, width, felt_DN)
    return SolvedExpert(pruned.channels, _on(expert, pruned.channels, pruned.weight), len(part.tokens))


def _on(expert: ExpertWeights, channels_k: Tensor, down_Dk: Tensor) -> ExpertWeights:
    biases = None
    if expert.biases is not None:
        *inner, down_D = expert.biases
        biases = (*(bias_N[channels_k] for bias_N in inner), down_D)
    return ExpertWeights(tuple(reader_ND[channels_k] for reader_ND in expert.readers), down_Dk, biases)
