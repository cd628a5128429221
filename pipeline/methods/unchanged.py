"""Claims the matrices that no method compresses, so that they can be rounded. docs/methods.md#rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from manifests.quantize import is_skipped
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import MethodDefaults
from pipeline.methods.method import Group, Key, Method, Ranks, Scores, Solution, Statistics
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, to_columns

WHOLE, BITS = "whole", "bits"


@dataclass(frozen=True)
class Unchanged(MethodDefaults):
    """Claims every linear role that `others` do not claim, except those of `skip`.

    `outer`: further roles outside the layers, whose ranks are fixed (`outer_ranks`).
    """

    others: Sequence[Method]
    skip: tuple[str, ...] = ()
    chosen_bits: bool = False
    outer: tuple[str, ...] = ()
    routed_only: bool = False
    name: ClassVar[str] = "quantize"

    @property
    def fixed_ranks(self) -> bool:
        """Return True unless bits are chosen, because no budget applies."""
        return not self.chosen_bits

    def predicts(self, geometry: Geometry) -> tuple[Group, ...]:
        """Return all groups inside the layers if bits are chosen, else none."""
        return self._inside(geometry) if self.chosen_bits else ()

    def curve(
        self, group: Group, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics
    ) -> Curve:
        """Return a single point, with loss 0."""
        return to_columns([Point({WHOLE: 1}, geometry.numbers(group.roles), 0.0)])

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim the remaining matrices: those with a common input as one group, and each outer role by itself.

        Raises the ValueErrors of the other methods.
        """
        return self._inside(geometry) + self._outside(geometry)

    def _outside(self, geometry: Geometry) -> tuple[Group, ...]:
        outer = [(layer.index, role) for layer in geometry.layers for role, _, _ in layer.outer if role in self.outer]
        return tuple(Group(layer, role, (role,)) for layer, role in outer)

    def outer_ranks(self, geometry: Geometry, bits: int) -> dict[tuple[int, str], dict[str, int]]:
        """Map layer and group of each role outside the layers to its ranks, with `bits` if bits are chosen."""
        ranks = {WHOLE: 1, BITS: bits} if self.chosen_bits else {WHOLE: 1}
        return {(group.layer, group.name): dict(ranks) for group in self._outside(geometry)}

    def rank_variables(self, geometry: Geometry) -> tuple[RankVariable, ...]:
        """Return the variables of the groups inside the layers."""
        inside = self._inside(geometry)
        return tuple(v for group in inside for v in self.group_variables(group, geometry.layers[group.layer]))

    def _inside(self, geometry: Geometry) -> tuple[Group, ...]:
        claimed = {
            (group.layer, role) for method in self.others for group in method.claims(geometry) for role in group.roles
        }
        groups = []
        for layer in geometry.layers:
            for name, matrices in (group for block in layer.matrix_blocks for group in block.by_input.items()):
                inside = (role for role in roles_of(matrices) if not self.routed_only or role in layer.routed_roles)
                free = (role for role in inside if not is_skipped(role, self.skip))
                if unclaimed := tuple(role for role in free if (layer.index, role) not in claimed):
                    groups.append(Group(layer.index, name, unclaimed))
        return tuple(groups)

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return one variable with a single value."""
        return (RankVariable(group.layer, group.name, WHOLE, 1, 1, partial(_numbers, geometry, group.roles)),)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return 1 for every variable."""
        return {variable.key: 1.0 for variable in self.rank_variables(geometry)}

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Return none: all roles stay dense."""
        return {}

    def compress(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        ranks: Ranks,
    ) -> Solution:
        """Return the weights."""
        return Solution(dict(weights), {}, {})


def _numbers(geometry: LayerGeometry, roles: tuple[str, ...], rank: float) -> int:
    return geometry.numbers(roles)
