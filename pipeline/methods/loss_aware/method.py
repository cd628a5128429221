"""`method: loss_aware`: its claims, statistics, curves and solutions.

docs/methods.md#loss-aware.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.blocks import AttentionBlock, MLPBlock, roles_of
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.base import MethodBase
from pipeline.methods.loss_aware import attention, latents, mlp, query_key
from pipeline.methods.loss_aware.mlp_sizes import Sizes
from pipeline.methods.method import Group, Key, Moment, Ranks, Scores, Solution, Statistics, Weights
from pipeline.ranks.budget import RankVariable

QUERY_KEY, ATTENTION = "query_key", "attention"


class AttentionPart(Protocol):
    """A module that compresses two matrices of an attention block."""

    def moments(self, block: AttentionBlock, /) -> tuple[Moment, ...]:
        """Return the statistics that `curve` and `solve` need."""
        ...

    def corrections(self, block: AttentionBlock, /) -> tuple[Moment, ...]:
        """Return the pairs for `correct`, in order."""
        ...

    def curve(self, entry: LossAware, geometry: LayerGeometry, weights: Weights, statistics: Statistics, /) -> Curve:
        """Return the choices of ranks on the frontier of size and loss."""
        ...

    def least_numbers(self, entry: LossAware, geometry: LayerGeometry, /) -> int:
        """Count the numbers stored at the smallest ranks."""
        ...

    def correct(
        self,
        entry: LossAware,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        ranks: Ranks,
        before: Weights,
        /,
    ) -> Solution:
        """Apply one correction, as `Correcting.correct`."""
        ...

    def solve(
        self, entry: LossAware, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks, /
    ) -> Solution:
        """Return the factors at chosen ranks."""
        ...


PARTS: Mapping[str, AttentionPart] = {QUERY_KEY: query_key, ATTENTION: attention}


@dataclass(frozen=True)
class LossAwareMethod(MethodBase[LossAware]):
    """`method: loss_aware` with the settings of its manifest entry."""

    name: ClassVar[str] = "loss_aware"

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim groups `query_key` (q, k), `attention` (v, o), latent attention and the MLP of every chosen layer.

        Raises ValueError for corrections of a layer whose router weighs the inputs of experts.
        """
        groups: list[Group] = []
        for layer in self.chosen_layers(geometry):
            if self._corrects and any(block.weighed for block in layer.mlps):
                raise ValueError(
                    f"`correct: output` does not support layer {layer.index}, whose router weighs the inputs of "
                    "experts; leave out correct"
                )
            groups += [group for block in layer.attentions for group in self._attention_groups(layer, block)]
            groups += latents.groups(layer, output=True, corrects=self._corrects) if self.entry.attention else ()
            if self.entry.mlp:
                groups += [self._mlp_group(layer, block) for block in layer.mlps]
        return tuple(groups)

    def _attention_groups(self, layer: LayerGeometry, block: AttentionBlock) -> Iterator[Group]:
        for name, matrices in {QUERY_KEY: block.query_key, ATTENTION: block.value_output}.items():
            if getattr(self.entry, name):
                pairs = PARTS[name].corrections(block) if self._corrects else ()
                yield Group(layer.index, name, roles_of(matrices), PARTS[name].moments(block), pairs)

    @property
    def _corrects(self) -> bool:
        return self.entry.correct == "output"

    def _mlp_group(self, layer: LayerGeometry, block: MLPBlock) -> Group:
        pairs = mlp.corrections(block) if self._corrects else ()
        pieces = mlp.pieces(Sizes(self.entry, layer, block))
        return Group(layer.index, block.name, block.roles, mlp.moments(block), pairs, pieces)

    def _sizes(self, group: Group, geometry: LayerGeometry) -> Sizes:
        return Sizes(self.entry, geometry, geometry.mlp_of(group.roles[0]))

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers stored with all ranks at their first step."""
        if group.name in PARTS:
            return PARTS[group.name].least_numbers(self.entry, geometry)
        if latents.is_latent(group, geometry):
            return latents.least_numbers(self.entry, group, geometry)
        return mlp.least_numbers(self._sizes(group, geometry))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Return the choices of ranks on the frontier of size and loss."""
        if group.name in PARTS:
            return PARTS[group.name].curve(self.entry, geometry, weights, statistics)
        if latents.is_latent(group, geometry):
            return latents.curve(self.entry, group, geometry, weights, statistics)
        return mlp.curve(self._sizes(group, geometry), weights, statistics)

    def begin_curve(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics
    ) -> mlp.EliminatedChannels:
        """Eliminate channels of an MLP, as `mlp.begin`."""
        return mlp.begin(self._sizes(group, geometry), weights, statistics)

    def curve_pieces(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        elimination: mlp.EliminatedChannels,
        numbers: Sequence[int],
    ) -> list[mlp.Piece]:
        """Compare the ranks of some widths of an MLP, as `mlp.piece`."""
        return mlp.piece(self._sizes(group, geometry), weights, statistics, elimination, numbers)

    def join_curve(
        self, group: Group, geometry: LayerGeometry, elimination: mlp.EliminatedChannels, pieces: Sequence[mlp.Piece]
    ) -> Curve:
        """Return the curve of an MLP from all of its pieces."""
        return mlp.join(self._sizes(group, geometry), elimination, pieces)

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return none: ranks are points of curves."""
        return ()

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return none: ranks are points of curves."""
        return {}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Return the factors at chosen ranks."""
        return next(self.compress_sizes(group, geometry, weights, statistics, [ranks]))

    def compress_sizes(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, sizes: Sequence[Ranks]
    ) -> Iterator[Solution]:
        """Return the factors at several sizes. The sizes of an MLP share the elimination of channels."""
        if group.name in PARTS:
            part = PARTS[group.name]
            return (part.solve(self.entry, geometry, weights, statistics, ranks) for ranks in sizes)
        if latents.is_latent(group, geometry):
            return (latents.solve(self.entry, group, geometry, weights, statistics, ranks) for ranks in sizes)
        return mlp.solve(self._sizes(group, geometry), weights, statistics, sizes)

    def correct(
        self,
        group: Group,
        geometry: LayerGeometry,
        weights: Weights,
        statistics: Statistics,
        ranks: Ranks,
        before: Weights,
    ) -> Solution:
        """Apply one correction, as `Correcting.correct`."""
        if group.name in PARTS:
            return PARTS[group.name].correct(self.entry, geometry, weights, statistics, ranks, before)
        if latents.is_latent(group, geometry):
            return latents.correct(self.entry, group, geometry, weights, statistics, ranks, before)
        return mlp.correct(self._sizes(group, geometry), weights, statistics, ranks, before)
