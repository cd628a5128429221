"""Queries and keys: a low-rank stack in the metric of the loss. docs/methods.md#curves, q and k.

Legend: D hidden, m rows of q and k, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.blocks import AttentionBlock, roles_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.sensitivity import Directions, input_directions, least_losses, losses_by_rank
from pipeline.methods.loss_aware.pairs import carry
from pipeline.methods.loss_aware.stacks import Stack
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import input_moment, pair, pull
from pipeline.methods.tensors import biases_of
from pipeline.ranks.curves import Point, to_columns, up_to_whole

NAME = "query_key"


def moments(block: AttentionBlock) -> tuple[Moment, ...]:
    """Return the moments of the input, and of the gradient at it through q and k."""
    return input_moment(block.query), pull(block.query_key)


def corrections(block: AttentionBlock) -> tuple[Moment, ...]:
    """Return the pairs for `correct`."""
    return (pair(block.input),)


def curve(entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics) -> Curve:
    """Return a point for each rank of the stack [q; k]."""
    block = geometry.attention
    pull_DD, input_DD = statistics.mean(pull(block.query_key))[0], statistics.mean(input_moment(block.query))[0]
    if entry.weighting == "loss":
        losses = least_losses(input_DD, pull_DD)
    else:
        losses = losses_by_rank(_directions(entry, block, weights, statistics), input_DD, pull_DD)
    biases, cache = _bias_numbers(block), block.key.outputs
    stacked = _stack(entry, geometry).points(losses, entry.multiple(geometry.hidden))
    points = [Point(point.ranks, point.numbers + biases, point.loss, cache) for point in stacked]
    return to_columns(up_to_whole(points))


def least_numbers(entry: LossAware, geometry: LayerGeometry) -> int:
    """Count the numbers stored at the smallest rank."""
    return _stack(entry, geometry).least(entry.multiple(geometry.hidden)) + _bias_numbers(geometry.attention)


def solve(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics, ranks: Ranks
) -> Solution:
    """Cut the stack to its rank, with unchanged biases."""
    if ranks[NAME] >= _stack(entry, geometry).full:
        return Solution(dict(weights), {}, {"dense": True})
    order = _directions(entry, geometry.attention, weights, statistics)
    return _stored(entry, geometry, weights, order, ranks[NAME])


def correct(
    entry: LossAware,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
) -> Solution:
    """Fit the stack to the compressed model's inputs, and cut it to its rank."""
    block = geometry.attention
    moved = carry(statistics, pair(block.input), weights, block.query_key)
    if ranks[NAME] >= _stack(entry, geometry).full:
        return Solution(moved.weights, {})
    if entry.weighting == "loss":
        pull_DD = moved.transfer.T @ statistics.mean(pull(block.query_key))[0] @ moved.transfer
    else:
        pull_DD = _gram(block, moved.weights)
    return _stored(entry, geometry, moved.weights, input_directions(moved.moment, pull_DD), ranks[NAME])


def _stored(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], directions: Directions, rank: int
) -> Solution:
    stack = _stack(entry, geometry)
    matrices = geometry.attention.query_key
    parts = {matrix.role: weights[matrix.weight_key] for matrix in matrices}
    stacked_mD = torch.cat([part.double() for part in parts.values()])
    tensors, forms = stack.store(parts, directions.encode[:rank], stacked_mD @ directions.decode[:, :rank])
    return Solution(tensors | biases_of(weights, matrices), forms)


def _directions(
    entry: LossAware, block: AttentionBlock, weights: Mapping[str, Tensor], statistics: Statistics
) -> Directions:
    input_DD = statistics.mean(input_moment(block.query))[0]
    if entry.weighting == "loss":
        return input_directions(input_DD, statistics.mean(pull(block.query_key))[0])
    return input_directions(input_DD, _gram(block, weights))


def _gram(block: AttentionBlock, weights: Mapping[str, Tensor]) -> Tensor:
    stacked_mD = torch.cat([weights[matrix.weight_key].double() for matrix in block.query_key])
    return stacked_mD.T @ stacked_mD


def _stack(entry: LossAware, geometry: LayerGeometry) -> Stack:
    matrices = geometry.attention.query_key
    rows = sum(matrix.outputs for matrix in matrices)
    return Stack(NAME, roles_of(matrices), rows, geometry.hidden, geometry.bits, entry.factors == "pivoted")


def _bias_numbers(block: AttentionBlock) -> int:
    return sum(matrix.biases for matrix in block.query_key)
