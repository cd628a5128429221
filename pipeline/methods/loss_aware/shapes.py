"""`shapes: layer | stock`: a number of experts and one width, for each mixture or for all, and widths of latents.

docs/methods.md#mixtures, docs/methods.md#latent-attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.source_config import shared_padding, shares_width
from pipeline.kernels.mixture_refit import SWEEPS
from pipeline.kernels.sensitivity import Factored
from pipeline.methods.base import Group, Visits
from pipeline.methods.experts.method import EXPERTS, WIDTH, Experts, ExpertsMethod
from pipeline.methods.experts.mixture import width_losses
from pipeline.methods.experts.removal import refitted_counts, remaining_shares, removal_losses, removal_span
from pipeline.methods.experts.scores import REMOVAL_LOSS_BY_EXPERT, kept_experts
from pipeline.methods.loss_aware.latents import latent_groups
from pipeline.methods.moments import factored_mean
from pipeline.methods.work import Work, mlp_curve
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, steps, to_columns, up_to_whole

WIDTHS = 64  # how many widths are compared at most
WIDE_EXPERT, FUSED_MULTIPLE = 512, 128  # widths of experts with at least 512 channels suit fused kernels
ROW_BITS = 128  # transformers' grouped product needs rows of a multiple of so many


@dataclass(frozen=True)
class Shape(Experts[LossAware]):
    """The experts of a mixture, in one number and width. `moments`: the sample, and the gradient at the output.

    `padded`: the padding of the shared expert in an export counts, too.
    """

    scored_by: ClassVar[str] = REMOVAL_LOSS_BY_EXPERT
    refits: ClassVar[bool] = True
    padded: bool = False

    @property
    def stock(self) -> bool:
        """Return True if all layers get one shape."""
        return self.entry.shapes == "stock"

    @property
    def widths(self) -> list[int]:
        """Return the widths to compare, the full one last; only the full one if the config has no field for others."""
        width = self.routed[0].width
        if self.stock and shares_width(self.geometry):
            return [width]
        return steps(width, self.width_multiple, WIDTHS)

    @property
    def width_multiple(self) -> int:
        """Return the multiple of all widths: the manifest's, else one that suits the kernels that read the experts."""
        if self.entry.rank_multiple:
            return self.multiple
        if self.routed[0].width >= WIDE_EXPERT:
            return FUSED_MULTIPLE
        return max(self.multiple, ROW_BITS // self.geometry.bits) if self.stock else self.multiple

    def variables(self) -> tuple[RankVariable, ...]:
        """Return the number of experts, by which layers of one shape are tied. Shapes themselves are points of
        curves."""
        cost = partial(self.numbers, width=self.routed[0].width)
        return (self.variable(EXPERTS, len(self.routed), cost, multiple=1),) if self.stock else ()

    def least_numbers(self) -> int:
        """Count the numbers of the smallest shape."""
        return round(self.numbers(self.counts[0], self.widths[0]))

    def curve(self) -> Curve:
        """Return the shapes on the frontier; with `stock` all shapes, because the layers' curves are added by shape."""
        sample, metric = self.sample, self._metric
        removal_E = removal_losses(sample, metric)
        losses_En, output_TD = width_losses(sample, metric, self.widths)
        remaining_C = remaining_shares(sample, metric, removal_E, self.counts, output_TD)
        points = self.points(removal_E, losses_En, remaining_C.tolist())
        # The hint: the solve need not compute the losses of removal again.
        return to_columns(points if self.stock else up_to_whole(points), json.dumps(removal_E.tolist()))

    def points(self, removal_E: Tensor, losses_En: Tensor, remaining: Sequence[float]) -> list[Point]:
        """Return a point for each (E', N'): the experts with the largest removal losses are kept, all at one width.

        The loss is the sum of the losses of the removals and of the narrowing, as if they were independent. The full
        count and width lose nothing. `removal_E` (E,): the loss of each expert's removal, nats per token. `losses_En`
        (E, n): of each expert at each of `widths`. `remaining`: for each of `counts`, the share of the removals' loss
        that a refit leaves. Raises ValueError on shapes that do not fit.
        """
        if losses_En.shape != (len(removal_E), len(self.widths)):
            shapes = f"{tuple(losses_En.shape)} and {tuple(removal_E.shape)}"
            raise ValueError(f"losses by width and by removal do not fit {len(self.widths)} widths: {shapes}")
        points = []
        for count, share in zip(self.counts, remaining, strict=True):
            kept = kept_experts(removal_E, count, self.rule["groups"])
            removed = float(removal_E.sum() - removal_E[kept].sum()) * share if count < len(removal_E) else 0.0
            for width, narrowed in zip(self.widths, losses_En[kept].sum(dim=0).tolist(), strict=True):
                numbers = round(self.counted_numbers(count, width))
                points.append(Point({EXPERTS: count, WIDTH: width}, numbers, max(0.0, removed) + narrowed))
        return points

    def counted_numbers(self, count: float, width: float) -> float:
        """Count the numbers of a shape, with its padding."""
        return self.numbers(count, width) + (shared_padding(self.geometry, round(width)) if self.padded else 0)

    def expert_scores(self) -> Tensor:
        """Return the predicted loss of each expert's removal, nats per token."""
        if self.statistics.hint:
            return torch.tensor(json.loads(self.statistics.hint), dtype=torch.float64, device=self.sample.inputs.device)
        return removal_losses(self.sample, self._metric)

    @property
    def _metric(self) -> Factored:
        return factored_mean(self.statistics, self.moments[1])

    def visits(self, tokens: int) -> Visits:
        """Return how often each expert is read.

        A curve reads it for the losses of widths, for those of removals once per span of tokens, and, if a refit keeps
        it or it follows one that is kept and is read ahead, for the start and each sweep. A solve reads it for
        the target of the refit, to narrow it, in each sweep, and to store it.
        """
        sample, experts = min(tokens, self.moments[0].tokens), len(self.routed)
        spans = -(-sample // removal_span(sample, self.rule["top_k"]))
        most = max(refitted_counts(self.counts, experts), default=0)  # smaller numbers keep some of the same
        kept = most / experts
        return Visits(1 + spans + kept * (2 - kept) * (1 + SWEEPS), 3 + SWEEPS)

    def curve_work(self, tokens: int) -> Work:
        """Count the curve of one expert on the sample."""
        return mlp_curve(self.routed[0], 1, min(self.moments[0].tokens, tokens))


@dataclass(frozen=True)
class ShapedExperts(ExpertsMethod[LossAware]):
    """`method: loss_aware` with one shape for all experts of a layer, and one width for each of its latents."""

    name: ClassVar[str] = "loss_aware"
    by_loss: ClassVar[bool] = True

    @property
    def kind(self) -> Callable[..., Shape]:
        """Return `Shape`, padded with `stock`, unless the budget is one of routed experts alone."""
        return partial(Shape, padded=self.uniform and not self.routed_only)

    @property
    def uniform(self) -> bool:
        """Return True if all layers get one shape."""
        return self.entry.shapes == "stock"

    @property
    def claims_experts(self) -> bool:
        """Return the entry's `mlp`."""
        return self.entry.mlp

    def groups(self, layer: LayerGeometry) -> Iterator[Group[Any]]:
        """Claim the experts, and the latents of latent attention."""
        yield from super().groups(layer)
        if self.entry.attention and not self.routed_only:
            yield from latent_groups(self.entry, layer, output=False)
