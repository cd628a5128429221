"""A baseline: ranks the channels of all MLPs together by the loss of removing each alone. docs/methods.md#baselines.

Legend: D hidden, N intermediate, k channels kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from manifests.methods import HEAPr
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import MLPBlock
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.channel_ranking import RankedChannels, rank_channels
from pipeline.kernels.nystrom import nystrom_refit
from pipeline.methods.base import MethodBase
from pipeline.methods.method import Group, Key, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, steps, to_columns

WIDTH = "width"  # the rank of a point


@dataclass(frozen=True)
class HEAPrMethod(MethodBase[HEAPr]):
    """`method: heapr`."""

    name: ClassVar[str] = "heapr"

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim the MLPs, or the experts, of every chosen layer."""
        return tuple(
            Group(layer.index, block.name, block.roles, (input_moment(block.writer), output_gradient(block.writer)))
            for layer in self.chosen_layers(geometry)
            for block in layer.mlps
        )

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers stored at the smallest width."""
        block = geometry.mlp_of(group.roles[0])
        return round(block.numbers(min(self.entry.multiple(geometry.hidden), block.width)))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Return the sum of the losses of the removed channels at each width."""
        block = geometry.mlp_of(group.roles[0])
        losses = _ranked(block, weights, statistics).losses.tolist()
        widths = steps(block.width, self.entry.multiple(geometry.hidden))
        return to_columns([Point({WIDTH: width}, round(block.numbers(width)), losses[width]) for width in widths])

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return none: widths are points of curves."""
        return ()

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return none: widths are points of curves."""
        return {}

    def forms(self, group: Group, geometry: LayerGeometry, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to `pruned` at the width, if channels are removed."""
        width = ranks[WIDTH]
        pruned = width < geometry.mlp_of(group.roles[0]).width
        return dict.fromkeys(group.roles, FormSpec(form="pruned", rank=width)) if pruned else {}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Keep the channels with the largest losses; with `refit`, refit the writer to them."""
        block, width = geometry.mlp_of(group.roles[0]), ranks[WIDTH]
        if width >= block.width:
            return Solution(dict(weights), {}, {"dense": True})
        kept_k, writer = _ranked(block, weights, statistics).kept(width), block.writer
        report: dict[str, Any] = {}
        written_Dk = weights[writer.weight_key][:, kept_k]
        if self.entry.refit:
            moment_NN = statistics.mean(input_moment(writer))[0]
            written_Dk, refit = nystrom_refit(weights[writer.weight_key], moment_NN, kept_k)
            report |= refit
        whole = (writer.weight_key, writer.bias_key)
        tensors = {key: tensor if key in whole else tensor[kept_k] for key, tensor in weights.items()}
        return Solution({**tensors, writer.weight_key: written_Dk}, self.forms(group, geometry, ranks), report)


def _ranked(block: MLPBlock, weights: Weights, statistics: Statistics) -> RankedChannels:
    squares_N = statistics.mean(input_moment(block.writer))[0].diagonal()
    metric_DD = statistics.mean(output_gradient(block.writer))[0]
    return rank_channels(squares_N, weights[block.writer.weight_key], metric_DD)
