"""Losses, factors and curves of groups with a single rank, weighted by the model's loss. docs/methods.md#curves.

Legend: D inputs, m rows of a stack, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manifests.records import Curve
from pipeline.kernels.sensitivity import Directions, input_directions, least_losses, losses_by_rank
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, frontier, steps, to_columns


def directions(weights: Sequence[Tensor], weighting: str, moment_DD: Tensor, pull_DD: Tensor) -> Directions:
    """Order the directions of a stack's input by the energy of weights (`none`) or outputs (`input`), or by `loss`."""
    if weighting == "loss":
        return input_directions(moment_DD, pull_DD)
    gram_DD = torch.zeros_like(moment_DD)
    for weight in weights:
        gram_DD.addmm_(weight.double().T, weight.double())
    unit_DD = torch.eye(len(moment_DD), dtype=moment_DD.dtype, device=moment_DD.device)
    return input_directions(unit_DD if weighting == "none" else moment_DD, gram_DD)


def losses(weights: Sequence[Tensor], weighting: str, moment_DD: Tensor, pull_DD: Tensor) -> Tensor:
    """Return the loss of each rank (D + 1,), in nats per token, of a stack that is cut along `directions`."""
    if weighting == "loss":
        return least_losses(moment_DD, pull_DD)
    return losses_by_rank(directions(weights, weighting, moment_DD, pull_DD), moment_DD, pull_DD)


def factors(order: Directions, rank: int, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a shared first factor (r, D) and a second (m, r) for each weight. Both get √ of each direction's norm."""
    decode_Dr, encode_rD = order.decode[:, :rank], order.encode[:rank]
    seconds = [weight.double() @ decode_Dr for weight in weights]
    sizes_r = torch.stack([second.square().sum(dim=0) for second in seconds]).sum(dim=0).sqrt()
    inner_r = (sizes_r / torch.linalg.vector_norm(encode_rD, dim=1)).sqrt()
    inner_r = torch.where(inner_r > 0, inner_r, 1.0)
    return (encode_rD * inner_r[:, None]).contiguous(), [second / inner_r for second in seconds]


def curve_of(variable: RankVariable, loss_at: Callable[[int], float], cache_at: Callable[[int], int]) -> Curve:
    """Return the curve of a group with one rank. The loss at its cap is 0."""
    points = [
        Point({variable.name: rank}, round(variable.cost(rank)), loss_at(rank), cache_at(rank))
        for rank in steps(variable.cap, variable.multiple)[:-1]
    ]
    dense = Point({variable.name: variable.cap}, round(variable.cost(variable.cap)), 0.0, cache_at(variable.cap))
    return to_columns([*_useful(points, dense), dense])


def _useful(points: Sequence[Point], dense: Point) -> list[Point]:
    """Return the points with fewer numbers or a smaller cache than the dense group, on the frontier of either."""
    smaller = [point for point in points if point.numbers < dense.numbers or point.cache < dense.cache]
    by_cache = frontier(smaller, lambda point: point.cache)
    on_frontier = {id(point) for point in (*frontier(smaller), *by_cache)}
    return [point for point in smaller if id(point) in on_frontier]
