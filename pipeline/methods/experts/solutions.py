"""Converts the tensors of a layer to a `Mixture`, and solved experts back to tensors and forms.

Statistics of the layer: `sample_of` (1, T, D), the mixture's inputs on sampled tokens, and `metric_of` (1, D, D), the
moment of the gradient at the mixture's output. docs/methods.md#mixtures.

Legend: T tokens, D hidden, E experts, k channels kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.blocks import MLPBlock, roles_of
from pipeline.families.registry import channels_of
from pipeline.kernels.deferred import Deferred, DeferredTensors, in_memory
from pipeline.kernels.routing import RoutingRule
from pipeline.methods.experts.mixture import (
    ExpertWeights,
    Mixture,
    SolvedExpert,
    change_loss,
    channel_moment,
    narrowed,
    reader_moment,
    solve_shape,
)
from pipeline.methods.experts.scores import few_tokens
from pipeline.methods.method import Moment, Solution, Statistics
from pipeline.methods.moments import factored_mean, output_gradient

ROUTER, ROUTER_BIAS, LOGIT_BIAS = "router.weight", "router_bias", "router.bias"


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


def mixture_from(experts: Sequence[MLPBlock], weights: Mapping[str, Tensor], rule: RoutingRule) -> Mixture:
    """Return the mixture of a layer, whose experts are read from `weights` on access.

    `weights`: those of the routed experts, `router.weight`, and `router_bias.*` and `router.bias` if the router has
    them.
    """
    bias = next((weights[key] for key in weights if key.startswith(f"{ROUTER_BIAS}.")), None)  # reads no expert
    parts, channels = Deferred([partial(_expert, block, weights) for block in experts]), channels_of(experts[0])
    return Mixture(parts, weights[ROUTER], bias, rule, channels, weights.get(LOGIT_BIAS))


def _expert(block: MLPBlock, weights: Mapping[str, Tensor]) -> ExpertWeights:
    readers = tuple(weights[matrix.weight_key] for matrix in block.readers)
    biases = tuple(weights[matrix.bias_key] for matrix in block.matrices) if block.writer.bias else None
    return ExpertWeights(readers, weights[block.writer.weight_key], biases)


def sample_of(experts: Sequence[MLPBlock], tokens: int) -> Moment:
    """Return the sample of the mixture's inputs."""
    return Moment(experts[0].passing, kind="sample", tokens=tokens)


def metric_of(experts: Sequence[MLPBlock]) -> Moment:
    """Return the moment of the gradient at the mixture's output."""
    return output_gradient(experts[0].writer)


def solve(
    experts: Sequence[MLPBlock],
    mixture: Mixture,
    statistics: Statistics,
    tokens: int,
    kept: Sequence[int],
    width: int,
    refit: bool = True,
) -> Solution:
    """Keep some experts at one width.

    The solution holds the tensors of the kept experts, under their dense roles, and their rows of the router. The
    report names the kept experts, those without sampled tokens and those with few, and has the predicted `loss` after a
    refit, if the gradient's moment is among the statistics.
    """
    inputs_TD = statistics.moments[sample_of(experts, tokens)][0]
    metric = factored_mean(statistics, metric_of(experts)) if metric_of(experts) in statistics.moments else None
    solved, change_TD = solve_shape(mixture, inputs_TD, metric, kept, width, refit, statistics.offload)
    tensors: dict[str, Callable[[], Tensor]] = {}
    forms: dict[str, FormSpec] = {}
    for number, each in zip(kept, solved, strict=True):
        block = experts[number]
        matrices = (*block.readers, block.writer)
        tensors |= {matrix.weight_key: partial(_weight, each, place) for place, matrix in enumerate(matrices)}
        biased = [(place, matrix) for place, matrix in enumerate(matrices) if matrix.bias]
        tensors |= {matrix.bias_key: partial(_bias, each, place) for place, matrix in biased}
        if width < block.width:
            forms |= dict.fromkeys(roles_of(matrices), FormSpec(form="pruned", rank=width))
    router = mixture.subset(kept)
    rows = {ROUTER: router.router, ROUTER_BIAS: router.bias, LOGIT_BIAS: router.logit_bias}
    tensors |= {key: in_memory(tensor) for key, tensor in rows.items() if tensor is not None}
    report: dict[str, Any] = {"experts": list(kept), "width": width, **_few_tokens(experts, kept, solved)}
    if metric is not None and change_TD is not None:
        report["loss"] = change_loss(change_TD, metric)
    outputs = {
        reader.role: each.channels
        for number, each in zip(kept, solved, strict=True)
        for reader in experts[number].readers
    }
    inputs = inputs_of([experts[number] for number in kept], narrowed(mixture, kept, solved), inputs_TD)
    return Solution(DeferredTensors(tensors), forms, report, inputs, outputs)


def inputs_of(experts: Sequence[MLPBlock], mixture: Mixture, inputs_TD: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Map the matrices whose inputs are an expert's own to functions that compute their moments on the sample.

    They are the writers, and the readers of experts whose inputs the router's weights multiply. `experts`: the blocks
    of the mixture's experts, in order.
    """
    routing, inputs = mixture.route(inputs_TD), dict[str, Callable[[], Tensor]]()
    for number, block in enumerate(experts):
        inputs[block.writer.role] = partial(channel_moment, mixture, number, inputs_TD, routing)
        if block.weighed:
            read = partial(reader_moment, mixture, number, inputs_TD, routing)
            inputs |= dict.fromkeys(roles_of(block.readers), read)
    return inputs


def _weight(solved: SolvedExpert, place: int) -> Tensor:
    weights = solved.weights
    return (*weights.readers, weights.writer)[place]


def _bias(solved: SolvedExpert, place: int) -> Tensor:
    biases = solved.weights.biases
    assert biases is not None
    return biases[place]


def _few_tokens(experts: Sequence[MLPBlock], kept: Sequence[int], solved: Sequence[SolvedExpert]) -> dict[str, Any]:
    tokens = {experts[number].name: each.tokens for number, each in zip(kept, solved, strict=True)}
    unseen = [name for name, count in tokens.items() if not count]
    few = {
        experts[number].name: each.tokens
        for number, each in zip(kept, solved, strict=True)
        if few_tokens(each.tokens, experts[number].width)
    }
    return {"unseen": unseen, "few_tokens": few}
