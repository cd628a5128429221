"""Queries and keys: one low-rank stack in the metric of the loss. docs/methods.md#curves, q and k.

Legend: D hidden, m rows of q and k, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.family import LayerGeometry
from pipeline.kernels.sensitivity import Directions, input_directions, least_losses, losses_by_rank
from pipeline.methods.loss_aware.pairs import carry, pair
from pipeline.methods.loss_aware.stacks import Stack, biases_of
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, frontier, to_columns

ROLES = ("q", "k")
NAME = "query_key"
INPUT = Moment("attention.in")
PULL = Moment("pull:q+k", kind="gradient")
MOMENTS = (INPUT, PULL)
PAIR = pair("attention.in")
CORRECTIONS = (PAIR,)


def curve(entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics) -> Curve:
    """One point for each rank of the stack [q; k]."""
    pull_DD, input_DD = found.mean(PULL)[0], found.mean(INPUT)[0]
    if entry.weighting == "loss":
        losses = least_losses(input_DD, pull_DD)
    else:
        losses = losses_by_rank(_directions(entry, weights, found), input_DD, pull_DD)
    biases, cache = _bias_numbers(geometry), geometry.weight_shape("k")[0]
    found_points = _stack(entry, geometry).points(losses, entry.multiple(geometry.hidden))
    points = [Point(point.ranks, point.numbers + biases, point.loss, cache) for point in found_points]
    return to_columns(frontier(points))


def least_numbers(entry: LossAware, geometry: LayerGeometry) -> int:
    """Stored at the smallest rank."""
    return _stack(entry, geometry).least(entry.multiple(geometry.hidden)) + _bias_numbers(geometry)


def solve(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics, ranks: Ranks
) -> Solution:
    """The stack at its rank; biases as they are."""
    if ranks[NAME] >= _stack(entry, geometry).full:
        return Solution(dict(weights), {}, {"dense": True})
    return _stored(entry, geometry, weights, _directions(entry, weights, found), ranks[NAME])


def correct(
    entry: LossAware,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    found: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
) -> Solution:
    """The stack for the input as it comes behind compressed layers."""
    moved = carry(found, PAIR, weights, ROLES)
    if ranks[NAME] >= _stack(entry, geometry).full:
        return Solution(moved.weights, {})
    if entry.weighting == "loss":
        pull_DD = moved.transfer.T @ found.mean(PULL)[0] @ moved.transfer
    else:
        pull_DD = _gram(moved.weights)
    return _stored(entry, geometry, moved.weights, input_directions(moved.moment, pull_DD), ranks[NAME])


def _stored(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], directions: Directions, rank: int
) -> Solution:
    stack = _stack(entry, geometry)
    parts = {role: weights[f"{role}.weight"] for role in ROLES}
    stacked_mD = torch.cat([part.double() for part in parts.values()])
    tensors, forms = stack.store(parts, directions.encode[:rank], stacked_mD @ directions.decode[:, :rank])
    return Solution(tensors | biases_of(weights, ROLES), forms)


def _directions(entry: LossAware, weights: Mapping[str, Tensor], found: Statistics) -> Directions:
    input_DD = found.mean(INPUT)[0]
    if entry.weighting == "loss":
        return input_directions(input_DD, found.mean(PULL)[0])
    return input_directions(input_DD, _gram(weights))


def _gram(weights: Mapping[str, Tensor]) -> Tensor:
    stacked_mD = torch.cat([weights[f"{role}.weight"].double() for role in ROLES])
    return stacked_mD.T @ stacked_mD


def _stack(entry: LossAware, geometry: LayerGeometry) -> Stack:
    rows = sum(geometry.weight_shape(role)[0] for role in ROLES)
    return Stack(NAME, ROLES, rows, geometry.hidden, geometry.bits, entry.factors == "pivoted")


def _bias_numbers(geometry: LayerGeometry) -> int:
    return sum(geometry.weight_shape(role)[0] for role in ROLES if role in geometry.biases)
