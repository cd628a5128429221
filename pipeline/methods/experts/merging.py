"""Merging of experts with similar outputs: a baseline after HC-SMoE. docs/methods.md#mixtures.

Statistics of a layer: the mean output of each expert over all sampled tokens (E, D), routed to it or not, and the
number of tokens routed to each expert.

Legend: E experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pipeline.kernels.deferred import Deferred, Offload, in_memory
from pipeline.kernels.mixture_refit import MixtureResidual, refit_mixture_
from pipeline.methods.experts.mixture import ExpertWeights, Mixture, MixtureSample


def mean_outputs(sample: MixtureSample) -> Tensor:
    """Return the mean output of each expert over all tokens (E, D), float64."""
    numbers = range(len(sample.mixture.experts))
    return torch.stack([sample.mixture.outputs(number, sample.inputs).double().mean(dim=0) for number in numbers])


def cluster(outputs_ED: Tensor, count: int, groups: int = 1) -> list[list[int]]:
    """Cluster experts by average linkage, until `count` clusters are left.

    Each of the router's groups, of consecutive experts, gets the same number of clusters. Clusters of a group and their
    members ascend; among equal distances, the first pair is joined. Raises ValueError on NaN or infinity, or unless E
    and `count` are multiples of `groups` and 0 < count <= E.
    """
    num_experts = len(outputs_ED)
    if not 0 < count <= num_experts or count % groups or num_experts % groups:
        raise ValueError(f"{num_experts} experts cannot form {count} clusters in {groups} equal groups")
    if not bool(torch.isfinite(outputs_ED).all()):
        raise ValueError("outputs: some are NaN or infinite")
    distances_EE = torch.cdist(outputs_ED.double(), outputs_ED.double())
    size = num_experts // groups
    return [
        members
        for first in range(0, num_experts, size)
        for members in _joined(distances_EE, range(first, first + size), count // groups)
    ]


def _joined(distances_EE: Tensor, experts: Sequence[int], count: int) -> list[list[int]]:
    clusters = [[number] for number in experts]
    while len(clusters) > count:
        pairs = ((one, other) for other in range(len(clusters)) for one in range(other))
        one, other = min(
            sorted(pairs), key=lambda pair: float(distances_EE[clusters[pair[0]]][:, clusters[pair[1]]].mean())
        )
        clusters[one] = sorted(clusters[one] + clusters.pop(other))
    return clusters


def busiest(clusters: Sequence[Sequence[int]], tokens_E: Tensor) -> list[int]:
    """Return the member of each cluster with the most tokens; among equals, the first."""
    return [max(members, key=lambda number: (float(tokens_E[number]), -number)) for members in clusters]


def merge(
    mixture: Mixture, clusters: Sequence[Sequence[int]], tokens_E: Tensor, offload: Offload = in_memory
) -> Mixture:
    """Return a mixture with one expert for each cluster: the mean of its members' weights, weighted by their tokens.

    The router keeps the row of the member with the most tokens. A cluster without tokens gets the unweighted mean. One
    member at a time is in memory beside the mean; merged experts are stored by `offload`.
    """
    experts = []
    for members in clusters:
        shares = tokens_E[list(members)].double()
        shares = shares / shares.sum() if float(shares.sum()) > 0.0 else torch.full_like(shares, 1.0 / len(members))
        parts = Deferred([partial(mixture.experts.__getitem__, number) for number in members])
        experts.append(_offloaded(_mean_expert(parts, shares.tolist()), offload))
    routed = mixture.subset(busiest(clusters, tokens_E))
    return replace(routed, experts=Deferred(experts))


def refit(sample: MixtureSample, merged: Mixture, offload: Offload = in_memory) -> Mixture:
    """Fit the writers of merged experts to the output of the dense mixture; they are stored by `offload`."""
    refitted, experts = merged.on(sample.inputs), merged.experts
    residual = MixtureResidual(sample.output() - refitted.written_biases())
    writers = Deferred([partial(_writer, experts, number) for number in range(len(experts))])
    downs = refit_mixture_(residual, refitted.served, writers, offload=offload)
    fitted = [partial(_with_writer, experts, downs, number) for number in range(len(experts))]
    return replace(merged, experts=Deferred(fitted))


def _writer(experts: Sequence[ExpertWeights], number: int) -> Tensor:
    return experts[number].writer


def _with_writer(experts: Sequence[ExpertWeights], downs: Sequence[Tensor], number: int) -> ExpertWeights:
    return experts[number]._replace(writer=downs[number])


def _mean_expert(parts: Sequence[ExpertWeights], shares: Sequence[float]) -> ExpertWeights:
    """Return the weighted sum of experts, float64, read one after another."""
    means: list[Tensor] = []
    for part, share in zip(parts, shares, strict=True):
        weighed = [tensor.double() * share for tensor in (part.writer, *part.readers, *(part.biases or ()))]
        means = [mean.add_(other) for mean, other in zip(means, weighed, strict=True)] if means else weighed
    down_DN, *others = means
    readers = len(parts[0].readers)
    return ExpertWeights(tuple(others[:readers]), down_DN, tuple(others[readers:]) or None)


def _offloaded(expert: ExpertWeights, offload: Offload) -> Callable[[], ExpertWeights]:
    readers, writer, biases = (
        [offload(reader_ND) for reader_ND in expert.readers],
        offload(expert.writer),
        expert.biases,
    )
    return lambda: ExpertWeights(tuple(reader() for reader in readers), writer(), biases)
