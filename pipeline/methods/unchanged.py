"""What no method of the manifest claims, as it is: so that all of it can be rounded. docs/methods.md#rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from pipeline.families.family import Geometry
from pipeline.methods.method import Group, Key, Method, Ranks, Scores, Solution, Statistics
from pipeline.ranks.budget import RankVariable

GROUPS = {"query_key_value": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
WHOLE = "whole"


@dataclass(frozen=True)
class Unchanged:
    """Claims every linear role that `others` leave, but those of `skip`; roles that read the same go together."""

    others: Sequence[Method]
    skip: tuple[str, ...] = ()
    name: str = "quantize"
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    keep: float | None = None
    fixed_ranks: bool = True
    uniform: bool = False
    scores: frozenset[str] = frozenset()

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """The groups of GROUPS in every layer, without the roles that are claimed. Raises ValueError as they do."""
        taken = {
            (group.layer, role) for method in self.others for group in method.claims(geometry) for role in group.roles
        }
        groups = []
        for layer in range(geometry.num_layers):
            for name, roles in GROUPS.items():
                free = [role for role in roles if role in geometry.roles and role not in self.skip]
                if left := tuple(role for role in free if (layer, role) not in taken):
                    groups.append(Group(layer, name, left))
        return tuple(groups)

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """One of a single value for each group: it is there."""
        return tuple(
            RankVariable(group.layer, group.name, WHOLE, 1, 1, partial(_numbers, geometry, group.roles))
            for group in self.claims(geometry)
        )

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """All of it."""
        return {variable.key: 1.0 for variable in self.rank_variables(geometry)}

    def compress(
        self,
        group: Group,
        geometry: Geometry,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        ranks: Ranks,
    ) -> Solution:
        """The weights."""
        return Solution(dict(weights), {}, {})


def _numbers(geometry: Geometry, roles: tuple[str, ...], rank: float) -> int:
    return geometry.layer_numbers(roles)
