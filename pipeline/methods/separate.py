"""The base class of the SVD baselines, which factor each linear weight by itself, to a common share of its numbers.

docs/methods.md#baselines. Legend: m outputs, D inputs of a weight, F features of a moment, r rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from manifests.records import FormSpec
from pipeline.families.blocks import roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.lowrank import InputRoots, rank_limit
from pipeline.methods.base import E, MethodBase
from pipeline.methods.method import Group, Key, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import input_moment
from pipeline.methods.tensors import factors_of
from pipeline.ranks.budget import RankVariable


@dataclass(frozen=True)
class SeparateMethod(MethodBase[E]):
    """Factors each weight by itself. Subclasses define `roots`, the weighting of inputs."""

    needs_inputs: ClassVar[bool] = True

    @abstractmethod
    def roots(self, moment_FF: Tensor) -> InputRoots:
        """Return S and S⁻¹ for inputs with this second moment; the factors W' minimise ‖(W − W')S‖."""

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim every matrix of each chosen layer; matrices that read the same input are one group."""
        return tuple(
            Group(layer.index, name, roles_of(matrices), (input_moment(matrices[0]),) if self.needs_inputs else ())
            for layer in self.chosen_layers(geometry)
            for block in layer.blocks
            for name, matrices in block.by_input.items()
        )

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Choose a rank for each role. At its cap the weight stays dense, because factors would save nothing."""
        multiple = self.entry.multiple(geometry.hidden)
        variables = []
        for role in group.roles:
            m, D = geometry.weight_shape(role)
            cost = partial(_stored, m, D, geometry.matrices[role].biases)
            variables.append(RankVariable(group.layer, group.name, role, rank_limit(m, D) + 1, multiple, cost))
        return tuple(variables)

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return the ranks at which the two factors of each weight store `ratio` of its numbers."""
        targets: dict[Key, float] = {}
        for group in self.claims(geometry):
            for role in group.roles:
                m, D = geometry.layers[group.layer].weight_shape(role)
                targets[group.layer, group.name, role] = min(ratio * m * D / (m + D), rank_limit(m, D) + 1.0)
        return targets

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Factor each weight into first (r, D) and second (m, r). Biases and weights with ranks above `rank_limit` are
        unchanged."""
        return next(self.compress_sizes(group, geometry, weights, statistics, [ranks]))

    def compress_sizes(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, sizes: Sequence[Ranks]
    ) -> Iterator[Solution]:
        """Compress to several sizes, with the roots of the inputs computed once."""
        roots = self.roots(statistics.moments[group.moments[0]][0]) if self.needs_inputs else None
        return (self._cut(weights, roots, self.forms(group, geometry, ranks)) for ranks in sizes)

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role whose factors store less than the dense weight to `low_rank`."""
        cut = (role for role in group.roles if ranks[role] <= rank_limit(*geometry.weight_shape(role)))
        return {role: FormSpec(form="low_rank", rank=ranks[role]) for role in cut}

    def _cut(self, weights: Weights, roots: InputRoots | None, forms: dict[str, FormSpec]) -> Solution:
        tensors: dict[str, Tensor] = {}
        report: dict[str, Any] = {}
        for key, weight in weights.items():
            role, _, kind = key.rpartition(".")
            rank = forms[role].rank if role in forms else None
            if kind != "weight" or rank is None:
                tensors[key] = weight
                continue
            factors = factors_of(role, weight, rank, roots)
            tensors |= factors.tensors
            report |= factors.report
        clipped = {"clipped": roots.clipped} if roots else {}
        return Solution(tensors, forms, report | clipped)


def _stored(m: int, D: int, bias: int, rank: float) -> float:
    return bias + (m * D if rank >= rank_limit(m, D) + 1 else min(rank * (m + D), m * D))
