"""A baseline: ranks the channels of all MLPs together by the loss of removing each alone. docs/methods.md#baselines.

Legend: D hidden, N intermediate, k channels kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from manifests.methods import HEAPr
from manifests.records import Curve, FormSpec
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.channel_ranking import RankedChannels, rank_channels
from pipeline.kernels.nystrom import nystrom_refit
from pipeline.methods.base import Group, Method
from pipeline.methods.method import Ranks, Solution
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.methods.tensors import kept_channels
from pipeline.methods.work import REMOVED_SHARE, Work, refit_flops
from pipeline.ranks.curves import Point, steps, to_columns

WIDTH = "width"  # the rank of a point


class Channels(Group[HEAPr]):
    """An MLP or an expert, whose channels are ranked by loss."""

    def least_numbers(self) -> int:
        """Count the numbers stored at the smallest width."""
        return round(self.mlp.numbers(min(self.multiple, self.mlp.width)))

    def curve(self) -> Curve:
        """Return the sum of the losses of the removed channels at each width."""
        block, losses = self.mlp, self._ranked().losses.tolist()
        widths = steps(block.width, self.multiple)
        return to_columns([Point({WIDTH: width}, round(block.numbers(width)), losses[width]) for width in widths])

    def forms(self, ranks: Ranks) -> dict[str, FormSpec]:
        """Map each role to `pruned` at the width, if channels are removed."""
        width = ranks[WIDTH]
        return dict.fromkeys(self.roles, FormSpec(form="pruned", rank=width)) if width < self.mlp.width else {}

    def solve(self, ranks: Ranks) -> Solution:
        """Keep the channels with the largest losses; with `refit`, refit the writer to them."""
        width, writer = ranks[WIDTH], self.mlp.writer
        if width >= self.mlp.width:
            return self.dense()
        kept_k, written_DN = self._ranked().kept(width), self.weight(writer)
        report: dict[str, Any] = {}
        written_Dk = written_DN[:, kept_k]
        if self.entry.refit:
            written_Dk, refit = nystrom_refit(written_DN, self.mean(input_moment(writer)), kept_k)
            report |= refit
        return Solution(kept_channels(self.weights, self.mlp, kept_k, written_Dk), self.forms(ranks), report)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the losses of all channels, and a refit."""
        refit = refit_flops(self.mlp, (1 - REMOVED_SHARE) * self.mlp.width) if self.entry.refit else 0.0
        return Work(2.0 * self.mlp.width * self.geometry.hidden**2 + refit)

    def _ranked(self) -> RankedChannels:
        writer = self.mlp.writer
        squares_N = self.mean(input_moment(writer)).diagonal()
        return rank_channels(squares_N, self.weight(writer), self.mean(output_gradient(writer)))


@dataclass(frozen=True)
class HEAPrMethod(Method[HEAPr]):
    """`method: heapr`."""

    name: ClassVar[str] = "heapr"

    def groups(self, layer: LayerGeometry) -> Iterator[Channels]:
        """Claim the MLPs, or the experts."""
        for block in layer.mlps:
            moments = (input_moment(block.writer), output_gradient(block.writer))
            yield Channels(self.entry, layer, block.name, block.roles, moments)
