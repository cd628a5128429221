"""`method: loss_aware`: what it claims, which statistics it needs, its curves and solutions.

docs/methods.md#loss-aware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.methods.base import MethodBase
from pipeline.methods.loss_aware import attention, mlp, query_key
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.ranks.budget import RankVariable


class Part(Protocol):
    """A module that knows one group."""

    @property
    def curve(self) -> Callable[[LossAware, LayerGeometry, Mapping[str, Tensor], Statistics], Curve]:
        """Every choice of ranks that no other undercuts in both size and loss."""
        ...

    @property
    def least_numbers(self) -> Callable[[LossAware, LayerGeometry], int]:
        """What the smallest of it stores."""
        ...

    @property
    def CORRECTIONS(self) -> tuple[Moment, ...]:  # noqa: N802 - a constant of the module
        """The pairs that `correct` is called with, one after another."""
        ...

    @property
    def correct(
        self,
    ) -> Callable[[LossAware, LayerGeometry, Mapping[str, Tensor], Statistics, Ranks, Mapping[str, Tensor]], Solution]:
        """As `Correcting.correct`."""
        ...

    @property
    def solve(self) -> Callable[[LossAware, LayerGeometry, Mapping[str, Tensor], Statistics, Ranks], Solution]:
        """The factors at ranks chosen."""
        ...


PARTS: Mapping[str, Part] = {"query_key": query_key, "attention": attention, "mlp": mlp}


@dataclass(frozen=True)
class LossAwareMethod(MethodBase[LossAware]):
    """`method: loss_aware` with the settings of its manifest entry."""

    name: ClassVar[str] = "loss_aware"

    def claims(self, geometry: Geometry) -> tuple[Group, ...]:
        """Groups `query_key` (q, k), `attention` (v, o) and `mlp` ((gate), up, down) of every chosen layer."""
        names = [name for name in PARTS if getattr(self.entry, name)]
        return tuple(self._group(layer, name) for layer in self.chosen_layers(geometry) for name in names)

    def _group(self, layer: LayerGeometry, name: str) -> Group:
        roles, moments = {
            "query_key": (query_key.ROLES, query_key.MOMENTS),
            "attention": (attention.ROLES, attention.MOMENTS),
            "mlp": (mlp.roles(layer), mlp.moments(layer)),
        }[name]
        corrections = PARTS[name].CORRECTIONS if self.entry.correct == "output" else ()
        pieces = mlp.pieces(self.entry, layer) if name == "mlp" else 1
        return Group(layer.index, name, roles, moments, corrections, pieces)

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """All ranks at one step."""
        return PARTS[group.name].least_numbers(self.entry, geometry)

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Dispatches on the group; see the modules beside."""
        return PARTS[group.name].curve(self.entry, geometry, weights, statistics)

    def begin_curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> mlp.Begun:
        """The MLP's: see `mlp.begin`."""
        return mlp.begin(self.entry, geometry, weights, statistics)

    def curve_pieces(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        begun: mlp.Begun,
        numbers: Sequence[int],
    ) -> list[mlp.Piece]:
        """The MLP's: see `mlp.piece`."""
        return mlp.piece(self.entry, geometry, weights, statistics, begun, numbers)

    def join_curve(self, group: Group, geometry: LayerGeometry, begun: mlp.Begun, pieces: Sequence[mlp.Piece]) -> Curve:
        """As `curve`, of the MLP."""
        return mlp.join(self.entry, geometry, begun, pieces)

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """None: ranks are points of curves."""
        return ()

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """None: ranks are points of curves."""
        return {}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Dispatches on the group; see the modules beside."""
        return PARTS[group.name].solve(self.entry, geometry, weights, statistics, ranks)

    def compress_sizes(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, sizes: Sequence[Ranks]
    ) -> Iterator[Solution]:
        """As `compress`; of an MLP, see `mlp.solve_sizes`."""
        if group.name == "mlp":
            return mlp.solve_sizes(self.entry, geometry, weights, statistics, sizes)
        return (self.compress(group, geometry, weights, statistics, ranks) for ranks in sizes)

    def correct(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        ranks: Ranks,
        before: Weights,
    ) -> Solution:
        """Dispatches on the group; see the modules beside."""
        return PARTS[group.name].correct(self.entry, geometry, weights, statistics, ranks, before)
