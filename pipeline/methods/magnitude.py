"""A baseline: the channels of an MLP whose weights are largest, nothing refitted. docs/methods.md#baselines.

Legend: D hidden, N intermediate, k channels kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from manifests.methods import Magnitude
from manifests.records import FormSpec
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.base import MethodBase
from pipeline.methods.method import Group, Key, Ranks, Scores, Solution, Statistics, Weights
from pipeline.ranks.budget import RankVariable

ROLES = ("gate", "up", "down")
MLP = "mlp"


@dataclass(frozen=True)
class MagnitudeMethod(MethodBase[Magnitude]):
    """`method: magnitude`."""

    name: ClassVar[str] = "magnitude"

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """The MLP of every chosen layer."""
        return tuple(Group(layer.index, MLP, _roles(layer)) for layer in self.chosen_layers(geometry))

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """A width, cap N."""
        multiple, cost = self.entry.multiple(geometry.hidden), partial(_stored, geometry)
        return (RankVariable(group.layer, MLP, MLP, geometry.intermediate, multiple, cost),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """The ratio of N."""
        return {variable.key: ratio * variable.cap for variable in self.rank_variables(geometry)}

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """`pruned` at the width."""
        return dict.fromkeys(group.roles, FormSpec(form="pruned", rank=ranks[MLP]))

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """The channels with the largest sum of squares over their rows of gate and up and their column of down."""
        size_N = sum(
            (weights[f"{role}.weight"].double().square().sum(dim=0 if role == "down" else 1) for role in group.roles),
            start=torch.zeros((), dtype=torch.float64),
        )
        kept_k = torch.sort(size_N, descending=True, stable=True).indices[: ranks[MLP]].sort().values
        tensors: dict[str, Tensor] = {"down.weight": weights["down.weight"][:, kept_k]}
        for key, tensor in weights.items():
            if not key.startswith("down."):
                tensors[key] = tensor[kept_k]
            elif key == "down.bias":
                tensors[key] = tensor
        return Solution(
            tensors,
            self.forms(group, geometry, ranks),
            {"dropped_magnitude": float(1.0 - size_N[kept_k].sum() / size_N.sum())},
        )


def _roles(geometry: LayerGeometry) -> tuple[str, ...]:
    return tuple(role for role in ROLES if role in geometry.roles)


def _stored(geometry: LayerGeometry, width: float) -> float:
    """Numbers of an MLP with so many channels."""
    rows = [role for role in _roles(geometry) if role != "down"]
    channel = geometry.hidden * (len(rows) + 1) + sum(role in geometry.biases for role in rows)
    return channel * width + (geometry.hidden if "down" in geometry.biases else 0)
