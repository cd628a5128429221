"""`shapes: layer | stock`: a number of experts and one width, for each mixture or for all, and widths of latents.

docs/methods.md#mixtures, docs/methods.md#latent-attention.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.source_config import shared_padding, shares_width
from pipeline.kernels.mixture_refit import SWEEPS
from pipeline.methods.capabilities import Visits
from pipeline.methods.experts.method import ExpertsMethod, mixture_of, routed, sampled
from pipeline.methods.experts.mixture import Mixture, width_losses
from pipeline.methods.experts.removal import refitted_counts, remaining_shares, removal_losses, removal_span
from pipeline.methods.experts.scores import REMOVAL_LOSS_BY_EXPERT
from pipeline.methods.experts.shapes import EXPERTS, WIDTH, shape_points
from pipeline.methods.experts.solutions import metric_of
from pipeline.methods.loss_aware import latents
from pipeline.methods.method import Group, Key, Ranks, Scores, Solution, Statistics, Weights
from pipeline.methods.moments import factored_mean
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import steps, to_columns, up_to_whole

WIDTHS = 64  # how many widths are compared at most
WIDE_EXPERT, FUSED_MULTIPLE = 512, 128  # widths of experts with at least 512 channels suit fused kernels
ROW_BITS = 128  # transformers' grouped product needs rows of a multiple of so many


@dataclass(frozen=True)
class ShapedExperts(ExpertsMethod[LossAware]):
    """`method: loss_aware` with one shape for all experts of a layer, and one width for each of its latents."""

    name: ClassVar[str] = "loss_aware"
    by_loss: ClassVar[bool] = True
    scored_by: ClassVar[str] = REMOVAL_LOSS_BY_EXPERT

    @property
    def uniform(self) -> bool:
        """Return True if all layers get one shape."""
        return self.entry.shapes == "stock"

    @property
    def refits(self) -> bool:
        """Return True."""
        return True

    def claimable(self, geometry: Geometry) -> tuple[Group, ...]:
        """Claim the experts, and the latents of latent attention. Raises ValueError if no layer has a mixture."""
        experts = super().claimable(geometry) if self.entry.mlp else ()
        if self.routed_only or not self.entry.attention:
            return experts
        layers = self.chosen_layers(geometry)
        return (*experts, *(group for layer in layers for group in latents.groups(layer, output=False)))

    def widths(self, layer: LayerGeometry) -> list[int]:
        """Return the widths to compare, the full one last; only the full one if the config has no field for others."""
        if self.uniform and shares_width(layer):
            return [routed(layer)[0].width]
        return steps(routed(layer)[0].width, self.multiple(layer), WIDTHS)

    def multiple(self, layer: LayerGeometry) -> int:
        """Return the multiple of all widths: the manifest's, else one that suits the kernels that read the experts."""
        usual = self.entry.multiple(layer.hidden)
        if self.entry.rank_multiple:
            return usual
        if routed(layer)[0].width >= WIDE_EXPERT:
            return FUSED_MULTIPLE
        return max(usual, ROW_BITS // layer.bits) if self.uniform else usual

    def least_numbers(self, group: Group, geometry: LayerGeometry) -> int:
        """Count the numbers of the smallest shape."""
        if latents.is_latent(group, geometry):
            return latents.least_numbers(self.entry, group, geometry)
        return round(self.numbers(geometry, self.counts(geometry)[0], self.widths(geometry)[0]))

    def curve(self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
        """Return the shapes on the frontier; with `stock` all shapes, because the layers' curves are added by shape."""
        if latents.is_latent(group, geometry):
            return latents.curve(self.entry, group, geometry, weights, statistics)
        mixture, inputs_TD = mixture_of(geometry, weights), self.inputs(geometry, statistics)
        metric, widths = factored_mean(statistics, metric_of(routed(geometry))), self.widths(geometry)
        removal_E, counts = removal_losses(mixture, inputs_TD, metric), self.counts(geometry)
        losses_En, output_TD = width_losses(mixture, inputs_TD, metric, widths)
        remaining_C = remaining_shares(mixture, inputs_TD, metric, removal_E, counts, output_TD)
        points = shape_points(removal_E, losses_En, widths, counts, 1, mixture.rule.groups, remaining_C.tolist())
        counted = [
            replace(point, numbers=round(self.stored_numbers(geometry, point.ranks[EXPERTS], point.ranks[WIDTH])))
            for point in points
        ]
        # The hint: the solve need not compute the losses of removal again.
        return to_columns(counted if self.uniform else up_to_whole(counted), json.dumps(removal_E.tolist()))

    def visits(self, layer: LayerGeometry, tokens: int) -> Visits:
        """Return how often each expert is read.

        A curve reads it for the losses of widths, for those of removals once per span of tokens, and, if a refit keeps
        it or it follows one that is kept and is read ahead, for the start and each sweep. A solve reads it for
        the target of the refit, to narrow it, in each sweep, and to store it.
        """
        sample, experts = min(tokens, sampled(layer)), len(routed(layer))
        spans = -(-sample // removal_span(sample, dict(layer.routing)["top_k"]))
        most = max(refitted_counts(self.counts(layer), experts), default=0)  # smaller numbers keep some of the same
        kept = most / experts
        return Visits(1 + spans + kept * (2 - kept) * (1 + SWEEPS), 3 + SWEEPS)

    def stored_numbers(self, layer: LayerGeometry, count: float, width: float) -> float:
        """Count the numbers of a shape. With `stock` the padding of the shared expert in an export counts, too, unless
        the budget is one of routed experts alone."""
        if not self.uniform or self.routed_only:
            return self.numbers(layer, count, width)
        return self.numbers(layer, count, width) + shared_padding(layer, round(width))

    def group_variables(self, group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
        """Return the variables by which layers of one shape are tied. Shapes themselves are points of curves."""
        if latents.is_latent(group, geometry):
            return latents.variables(group, geometry) if self.uniform else ()
        experts = routed(geometry)
        cost = partial(self.numbers, geometry, width=experts[0].width)
        return (RankVariable(group.layer, group.name, EXPERTS, len(experts), 1, cost),) if self.uniform else ()

    def target_ranks(self, geometry: Geometry, ratio: float, scores: Scores) -> dict[Key, float]:
        """Return none: shapes are points of curves."""
        return {}

    def compress(
        self, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
    ) -> Solution:
        """Keep the experts with the largest removal losses, or narrow a latent."""
        if latents.is_latent(group, geometry):
            return latents.solve(self.entry, group, geometry, weights, statistics, ranks)
        return super().compress(group, geometry, weights, statistics, ranks)

    def expert_scores(
        self, mixture: Mixture, inputs_TD: Tensor, layer: LayerGeometry, statistics: Statistics
    ) -> Tensor:
        """Return the predicted loss of each expert's removal, nats per token."""
        if statistics.hint:
            return torch.tensor(json.loads(statistics.hint), dtype=torch.float64, device=inputs_TD.device)
        return removal_losses(mixture, inputs_TD, factored_mean(statistics, metric_of(routed(layer))))
