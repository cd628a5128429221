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

from pipeline.methods.experts.mixture import ExpertWeights, Mixture


def mean_outputs(mixture: Mixture, inputs_TD: Tensor) -> Tensor:
    """Return the mean output of each expert over all tokens (E, D), float64."""
    means = [mixture.outputs(number, inputs_TD).double().mean(dim=0) for number in range(len(mixture.experts))]
    return torch.stack(means)


def cluster(outputs_ED: Tensor, count: int) -> list[list[int]]:
    """Join experts into `count` clusters, step by step the two whose members lie nearest on average.

    Clusters and their members ascend; of equal distances, the first pair is joined. Raises ValueError on NaN or
    infinity, or unless 0 < count <= E.
    """
    if not 0 < count <= len(outputs_ED):
        raise ValueError(f"{len(outputs_ED)} experts cannot form {count} clusters")
    if not bool(torch.isfinite(outputs_ED).all()):
        raise ValueError("outputs: some are NaN or infinite")
    distances_EE = torch.cdist(outputs_ED.double(), outputs_ED.double())
    clusters = [[number] for number in range(len(outputs_ED))]
    while len(clusters) > count:
        pairs = ((one, other) for other in range(len(clusters)) for one in range(other))
        one, other = min(
            sorted(pairs), key=lambda pair: float(distances_EE[clusters[pair[0]]][:, clusters[pair[1]]].mean())
        )
        clusters[one] = sorted(clusters[one] + clusters.pop(other))
    return clusters


def merge(mixture: Mixture, clusters: Sequence[Sequence[int]], tokens_E: Tensor) -> Mixture:
    """Return a mixture with one expert for each cluster: the mean of its members' weights, by their tokens.

    The router keeps the row of the member with most tokens. A cluster that no token reached takes plain means.
    """
    experts, rows = [], []
    for members in clusters:
        shares = tokens_E[list(members)].double()
        shares = shares / shares.sum() if float(shares.sum()) > 0.0 else torch.full_like(shares, 1.0 / len(members))
        parts = [mixture.experts[number] for number in members]
        experts.append(_mean_expert(parts, shares))
        rows.append(members[int(shares.argmax())])
    routed = mixture.subset(rows)
    return replace(routed, experts=tuple(experts))


def _mean_expert(parts: Sequence[ExpertWeights], shares: Tensor) -> ExpertWeights:
    gate, up, down = (_mean(weights, shares) for weights in zip(*(part[:3] for part in parts), strict=True))
    biases = [part.biases for part in parts if part.biases is not None]
    if not biases:
        return ExpertWeights(gate, up, down)
    gate_N, up_N, down_D = (_mean(some, shares) for some in zip(*biases, strict=True))
    return ExpertWeights(gate, up, down, (gate_N, up_N, down_D))


def _mean(weights: Sequence[Tensor], shares: Tensor) -> Tensor:
    stacked = torch.stack([weight.double() for weight in weights])
    mean: Tensor = torch.tensordot(shares.to(stacked.device), stacked, dims=1)
    return mean
