"""A baseline: keeps the channels of an MLP with the largest weights, without a refit. docs/methods.md#baselines.

Legend: D hidden, N intermediate, k channels kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from manifests.methods import Magnitude
from manifests.records import FormSpec
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import Group, Method
from pipeline.methods.method import Ranks, Solution
from pipeline.methods.tensors import kept_channels
from pipeline.ranks.budget import RankVariable

WIDTH = "mlp"  # the rank variable


class Channels(Group[Magnitude]):
    """An MLP, of which the channels with the largest weights are kept."""

    def variables(self) -> tuple[RankVariable, ...]:
        """Choose a width, at most N."""
        return (self.variable(WIDTH, self.mlp.width, self.mlp.numbers),)

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to `pruned` at the width."""
        return dict.fromkeys(self.roles, FormSpec(form="pruned", rank=ranks[WIDTH]))

    def solve(self, ranks: Ranks) -> Solution:
        """Keep the channels with the largest sum of squares over their rows of the readers and column of the writer."""
        size_N = sum(
            (
                self.weight(matrix).double().square().sum(dim=1 if matrix.feeds_matrix else 0)
                for matrix in self.mlp.matrices
            ),
            start=torch.zeros((), dtype=torch.float64),
        )
        kept_k = torch.sort(size_N, descending=True, stable=True).indices[: ranks[WIDTH]].sort().values
        tensors = kept_channels(self.weights, self.mlp, kept_k, self.weight(self.mlp.writer)[:, kept_k])
        report = {"dropped_magnitude": float(1.0 - size_N[kept_k].sum() / size_N.sum())}
        return Solution(tensors, self.forms(ranks), report)


@dataclass(frozen=True)
class MagnitudeMethod(Method[Magnitude]):
    """`method: magnitude`."""

    name: ClassVar[str] = "magnitude"

    def groups(self, layer: LayerGeometry) -> Iterator[Channels]:
        """Claim the MLP."""
        return (Channels(self.entry, layer, block.name, block.roles) for block in layer.mlps)
