"""Experts merged into fewer by what they compute: a baseline after HC-SMoE. docs/methods.md#mixtures.

Statistics of a layer: the mean output of each expert over all sampled tokens (E, D), routed or not, and the number of
tokens of each expert.

Legend: E experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.kernels.mixture_refit import refit_mixture
from pipeline.methods.experts.mixture import ExpertWeights, Mixture


def mean_outputs(mixture: Mixture, inputs_TD: Tensor) -> Tensor:
    """Return the mean output of each expert over all tokens (E, D), float64."""
    means = [mixture.outputs(number, inputs_TD).double().mean(dim=0) for number in range(len(mixture.experts))]
    return torch.stack(means)


def cluster(outputs_ED: Tensor, count: int, groups: int = 1) -> list[list[int]]:
    """Join experts into `count` clusters, step by step the two whose members lie nearest on average.

    Each of the router's groups, of consecutive experts, gets equally many. Clusters of a group and their members
    ascend; of equal distances, the first pair is joined. Raises ValueError on NaN or infinity, or unless E and `count`
    are multiples of `groups` and 0 < count <= E.
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
    """Return the member of each cluster with most tokens, the first of equal ones."""
    return [max(members, key=lambda number: (float(tokens_E[number]), -number)) for members in clusters]


def merge(mixture: Mixture, clusters: Sequence[Sequence[int]], tokens_E: Tensor) -> Mixture:
    """Return a mixture with one expert for each cluster: the mean of its members' weights, by their tokens.

    The router keeps the row of the member with most tokens. A cluster that no token reached takes plain means.
    """
    experts = []
    for members in clusters:
        shares = tokens_E[list(members)].double()
        shares = shares / shares.sum() if float(shares.sum()) > 0.0 else torch.full_like(shares, 1.0 / len(members))
        parts = [mixture.experts[number] for number in members]
        experts.append(_mean_expert(parts, shares))
    routed = mixture.subset(busiest(clusters, tokens_E))
    return replace(routed, experts=tuple(experts))


def refit(mixture: Mixture, merged: Mixture, inputs_TD: Tensor) -> Mixture:
    """Return the merged experts with writers fitted to the output of `mixture`."""
    weights_TE = merged.route(inputs_TD).dense(len(merged.experts))
    downs = refit_mixture(
        mixture.output(inputs_TD) - merged.written_biases(weights_TE),
        lambda number: merged.served(number, inputs_TD, weights_TE),
        [expert.down for expert in merged.experts],
    )
    fitted = zip(merged.experts, downs, strict=True)
    return replace(merged, experts=tuple(expert._replace(down=down) for expert, down in fitted))


def _mean_expert(parts: Sequence[ExpertWeights], shares: Tensor) -> ExpertWeights:
    readers = tuple(_mean(some, shares) for some in zip(*(part.readers for part in parts), strict=True))
    biases = [part.biases for part in parts if part.biases is not None]
    means = tuple(_mean(some, shares) for some in zip(*biases, strict=True)) if biases else None
    return ExpertWeights(readers, _mean([part.down for part in parts], shares), means)


def _mean(weights: Sequence[Tensor], shares: Tensor) -> Tensor:
    stacked = torch.stack([weight.double() for weight in weights])
    mean: Tensor = torch.tensordot(shares.to(stacked.device), stacked, dims=1)
    return mean
