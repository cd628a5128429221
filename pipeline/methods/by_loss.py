"""Stacks of matrices at low rank, and curves of groups with a single rank, by the model's loss. docs/methods.md#curves.

Legend: D inputs, m rows of a stack, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from manifests.methods import JointRankK, LoRC
from manifests.records import Curve
from pipeline.families.blocks import Matrix
from pipeline.kernels.lowrank import InputRoots, input_roots
from pipeline.kernels.sensitivity import input_directions, least_losses, losses_by_rank
from pipeline.methods.base import Group
from pipeline.methods.method import Moment
from pipeline.methods.moments import input_moment, pull
from pipeline.methods.work import Work, directed_stack, direction_losses, low_rank
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, frontier, steps, to_columns

W = TypeVar("W", JointRankK, LoRC)


class LowRank(Group[W]):
    """Matrices with a common input, cut to a rank by the entry's `weighting`: none, input or loss.

    Those with another input, such as the output projection of `lorc`, come last and are not cut.
    """

    @property
    def input(self) -> Moment:
        """Return the moment of the first one's input."""
        return input_moment(self.matrices[0])

    @property
    def roots(self) -> InputRoots | None:
        """Return the roots of the input's moment with `weighting: input`, else None."""
        return input_roots(self.statistics.moments[self.input][0]) if self.entry.weighting == "input" else None

    def losses(self, stack: Sequence[Matrix], weights: Sequence[Tensor]) -> Tensor:
        """Return the loss of each rank (D + 1,), in nats per token, of a stack with these weights (m, D).

        Its directions are ordered by the energy of the weights (`none`) or of the outputs (`input`), or by `loss`.
        """
        moment_DD, pull_DD = self.mean(self.input), self.mean(pull(stack))
        if self.entry.weighting == "loss":
            return least_losses(moment_DD, pull_DD)
        gram_DD = torch.zeros_like(moment_DD)
        for weight in weights:
            gram_DD.addmm_(weight.double().T, weight.double())
        unit_DD = torch.eye(len(moment_DD), dtype=moment_DD.dtype, device=moment_DD.device)
        order = input_directions(unit_DD if self.entry.weighting == "none" else moment_DD, gram_DD)
        return losses_by_rank(order, moment_DD, pull_DD)

    def factors_by_loss(self, stack: Sequence[Matrix], rank: int) -> tuple[Tensor, list[Tensor], float]:
        """Decompose a stack in the metric of the loss.

        Return a shared first factor (r, D), a second (m, r) for each matrix, and the predicted loss. Both get √ of each
        direction's norm.
        """
        moment_DD, pull_DD = self.mean(self.input), self.mean(pull(stack))
        order = input_directions(moment_DD, pull_DD)
        decode_Dr, encode_rD = order.decode[:, :rank], order.encode[:rank]
        seconds = [self.weight(matrix).double() @ decode_Dr for matrix in stack]
        sizes_r = torch.stack([second.square().sum(dim=0) for second in seconds]).sum(dim=0).sqrt()
        inner_r = (sizes_r / torch.linalg.vector_norm(encode_rD, dim=1)).sqrt()
        inner_r = torch.where(inner_r > 0, inner_r, 1.0)
        predicted = float(losses_by_rank(order, moment_DD, pull_DD)[rank])
        return (encode_rD * inner_r[:, None]).contiguous(), [second / inner_r for second in seconds], predicted

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the directions in the metric of the loss, or the roots of the input's moment."""
        if self.entry.needs_gradient:
            return directed_stack(sum(matrix.outputs for matrix in self.matrices), self.geometry.hidden)
        return low_rank(self.matrices, self.geometry.hidden) if self.moments else Work()

    def curve_work(self, tokens: int) -> Work:
        """Count the losses of all ranks of one stack."""
        return direction_losses(self.geometry.hidden)


def moments_of(entry: JointRankK | LoRC, stacks: Sequence[Sequence[Matrix]]) -> tuple[Moment, ...]:
    """Return the moments by which an entry decomposes stacks with a common input."""
    read = input_moment(stacks[0][0])
    if entry.needs_gradient:
        return (read, *map(pull, stacks))
    return (read,) if entry.weighting == "input" else ()


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
