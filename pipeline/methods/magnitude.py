"""A baseline: keeps the channels of an MLP with the largest weights, without a refit. docs/methods.md#baselines.

Legend: D hidden, N intermediate, k channels kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manifests.methods import Magnitude
from manifests.records import FormSpec
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import MethodBase
from pipeline.methods.method import Group, Key, Ranks, Scores, Solution, Statistics, Weights
from pipeline.ranks.budget import RankVariable

WIDTH = "mlp"  # the rank variable


@dataclass(frozen=True)
class MagnitudeMethod(MethodBase[Magnitude]):
    """`method: magnitude`."""

    name: ClassVar[str] = "magnitude"

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim the MLP of every chosen layer."""
        return tuple(
            Group(layer.index, block.name, block.roles)
            for layer in self.chosen_layers(geometry)
            for block in layer.mlps
        )

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose a width, at most N."""
        block, multiple = geometry.mlp_of(group.roles[0]), self.entry.multiple(geometry.hidden)
        return (RankVariable(group.layer, group.name, WIDTH, block.width, multiple, block.numbers),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return `ratio` times N."""
        return {variable.key: ratio * variable.cap for variable in self.rank_variables(geometry)}

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to `pruned` at the width."""
        return dict.fromkeys(group.roles, FormSpec(form="pruned", rank=ranks[WIDTH]))

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Keep the channels with the largest sum of squares over their rows of the readers and column of the writer."""
        block = geometry.mlp_of(group.roles[0])
        size_N = sum(
            (
                weights[matrix.weight_key].double().square().sum(dim=1 if matrix.feeds_matrix else 0)
                for matrix in block.matrices
            ),
            start=torch.zeros((), dtype=torch.float64),
        )
        kept_k = torch.sort(size_N, descending=True, stable=True).indices[: ranks[WIDTH]].sort().values
        writer = block.writer
        tensors: dict[str, Tensor] = {writer.weight_key: weights[writer.weight_key][:, kept_k]}
        for key, tensor in weights.items():
            if key == writer.bias_key:
                tensors[key] = tensor
            elif key != writer.weight_key:
                tensors[key] = tensor[kept_k]
        return Solution(
            tensors,
            self.forms(group, geometry, ranks),
            {"dropped_magnitude": float(1.0 - size_N[kept_k].sum() / size_N.sum())},
        )
