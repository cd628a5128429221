"""Queries and keys: a low-rank stack in the metric of the loss. docs/methods.md#curves, q and k.

Legend: D hidden, m rows of q and k, r rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manifests.records import Curve
from pipeline.kernels.sensitivity import Directions, input_directions, least_losses, losses_by_rank
from pipeline.methods.loss_aware.stacks import Stack, Stacked
from pipeline.methods.method import Ranks, Solution, Weights
from pipeline.methods.pairs import carry
from pipeline.methods.tensors import biases_of
from pipeline.methods.work import Work, directed_stack, direction_losses
from pipeline.ranks.curves import to_columns, up_to_whole

NAME = "query_key"


class QueryKey(Stacked):
    """Queries and keys of a layer. `moments`: of their input, and of the gradient at it through q and k."""

    @property
    def whole(self) -> Stack:
        """Return the stack [q; k]."""
        return self.stack(NAME, self.roles, sum(matrix.outputs for matrix in self.matrices), self.geometry.hidden)

    def curve(self) -> Curve:
        """Return a point for each rank of the stack."""
        input_DD, pull_DD = map(self.mean, self.moments)
        if self.by_loss:
            losses = least_losses(input_DD, pull_DD)
        else:
            losses = losses_by_rank(input_directions(input_DD, self._gram(self.weights)), input_DD, pull_DD)
        biases, cache = self.bias_numbers, self.geometry.attention.key.outputs
        stacked = self.whole.points(losses, self.multiple)
        points = [replace(point, numbers=point.numbers + biases, cache=cache) for point in stacked]
        return to_columns(up_to_whole(points))

    def least_numbers(self) -> int:
        """Count the numbers stored at the smallest rank."""
        return self.whole.least(self.multiple) + self.bias_numbers

    def solve(self, ranks: Ranks) -> Solution:
        """Cut the stack to its rank, with unchanged biases."""
        if ranks[NAME] >= self.whole.full:
            return self.dense()
        input_DD, pull_DD = map(self.mean, self.moments)
        metric_DD = pull_DD if self.by_loss else self._gram(self.weights)
        return self._stored(self.weights, input_directions(input_DD, metric_DD), ranks[NAME])

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Fit the stack to the compressed model's inputs, and cut it to its rank."""
        readers, _ = self.entry.correct_ridges
        moved = carry(self.statistics, self.corrections[0], self.weights, self.matrices, readers)
        if ranks[NAME] >= self.whole.full:
            return Solution(moved.weights, {})
        if self.by_loss:
            metric_DD = moved.transfer.T @ self.mean(self.moments[1]) @ moved.transfer
        else:
            metric_DD = self._gram(moved.weights)
        return self._stored(moved.weights, input_directions(moved.moment, metric_DD), ranks[NAME])

    def _stored(self, weights: Weights, directions: Directions, rank: int) -> Solution:
        parts = {matrix.role: weights[matrix.weight_key] for matrix in self.matrices}
        stacked_mD = torch.cat([part.double() for part in parts.values()])
        tensors, forms = self.whole.store(parts, directions.encode[:rank], stacked_mD @ directions.decode[:, :rank])
        return Solution(tensors | biases_of(weights, self.matrices), forms)

    def _gram(self, weights: Weights) -> Tensor:
        stacked_mD = torch.cat([weights[matrix.weight_key].double() for matrix in self.matrices])
        return stacked_mD.T @ stacked_mD

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the directions of the stack, and its stored form."""
        return directed_stack(self.whole.outputs, self.geometry.hidden)

    def curve_work(self, tokens: int) -> Work:
        """Count the losses of all ranks."""
        return direction_losses(self.geometry.hidden)
