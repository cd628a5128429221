"""Bits chosen with ranks: every point of a curve at every number of bits. docs/methods.md#rounding.

Legend: O outputs, I inputs; C the moment of the inputs and G the diagonal of the gradients', per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.quantize import QUANTIZED_ROLES, Quantize
from pipeline.kernels.interpolation import interpolated
from pipeline.kernels.rounding import round_with_feedback
from pipeline.methods.method import Curve, Group, Moment, Ranks, Solution, Statistics, Weights
from pipeline.methods.rounded_size import beside, rounded_share
from pipeline.ranks.curves import Point, from_columns, frontier, to_columns
from pipeline.rounding.solutions import INPUTS, RoundedSolution, SquaredError, fitting_group, round_solution

BITS = "bits"  # among the ranks of a point
CHOICES = (3, 4, 8)
SAMPLED = (0.5, 0.8)  # of a curve's most numbers
UNDERSTATED = 1.7  # measured divergence over what ranks are predicted to lose, where rounding's comes out as predicted


def gradient_moments(roles: Sequence[str]) -> tuple[Moment, ...]:
    """What the loss feels of each number that these roles give."""
    return tuple(_felt(role) for role in roles if role in INPUTS)


def with_bits(
    curve: Curve,
    group: Group,
    quantize: Quantize,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    solve: Callable[[Ranks], Solution],
    bits: int,
) -> Curve:
    """The curve with a point at each of CHOICES in place of each, `bits` among its ranks.

    `numbers` become bytes in numbers of the dtype (of `bits` bits), codes, scales and shapes counted. The loss is what
    the ranks lose, times UNDERSTATED, and what rounding loses: ½ Σ_o G_o (Δ C Δᵀ)_oo of the group's dense matrices,
    rounded with error feedback, times how much larger the errors of its factors are. These are known at SAMPLED sizes
    of the curve, at which the group is solved and rounded, and interpolated between them. `solve`: ranks -> solution.
    """
    roles = [role for role in group.roles if role in QUANTIZED_ROLES and role not in quantize.skip]
    plain = sum(weights[name].numel() for name in weights if name.removesuffix(".weight") not in roles)
    shapes = [tuple(weights[f"{role}.weight"].shape) for role in roles]
    ranked = from_columns(curve)
    solved = [(point.numbers, solve(point.ranks)) for point in _sampled(ranked)]
    points = []
    for choice in CHOICES:
        share = rounded_share(choice, quantize.group, bits)
        extra = math.ceil(beside(shapes, choice, quantize.group, bits))
        dense = _Dense.rounded(roles, weights, statistics, quantize, choice)
        known = {
            numbers: dense.loss_of(
                round_solution(solution, quantize, choice, statistics.moments, weights), statistics.tokens
            )
            for numbers, solution in solved
        } | {ranked[-1].numbers: sum(dense.losses.values())}
        at = torch.tensor([point.numbers for point in ranked])
        losses = interpolated(sorted(known), torch.tensor([known[n] for n in sorted(known)], dtype=torch.float64), at)
        for point, loss in zip(ranked, losses.tolist(), strict=True):
            rounded = max(0, point.numbers - plain)
            numbers = math.ceil(rounded * share) + min(plain, point.numbers) + extra
            ranks = {**point.ranks, BITS: choice}
            points.append(Point(ranks, numbers, UNDERSTATED * point.loss + loss, point.cache))
    return to_columns(frontier(points))


def _sampled(points: Sequence[Point]) -> list[Point]:
    """The points nearest to SAMPLED shares of the most numbers, without the one that has them; ascending."""
    most = points[-1]
    nearest = (min(points, key=lambda point: abs(point.numbers - share * most.numbers)) for share in SAMPLED)
    found = {point.numbers: point for point in nearest if point.numbers < most.numbers}
    return [found[numbers] for numbers in sorted(found)]


class _Dense(NamedTuple):
    """Dense matrices, rounded: by role the predicted loss in nats per token, and the squared errors."""

    losses: dict[str, float]
    errors: dict[str, SquaredError]

    @classmethod
    def rounded(
        cls, roles: Sequence[str], weights: Weights, statistics: Statistics, quantize: Quantize, bits: int
    ) -> _Dense:
        """With error feedback."""
        found = cls({}, {})
        for role in roles:
            weight_OI = weights[f"{role}.weight"].to(torch.float64)
            (moment_II,), felt_O = statistics.mean(INPUTS[role]), statistics.mean(_felt(role))[0]
            fitting = fitting_group(weight_OI.shape[1], quantize.group)
            rounded = round_with_feedback(weight_OI, moment_II, bits, fitting, weights[f"{role}.weight"].dtype)
            change_OI = rounded.values - weight_OI
            errors_O = ((change_OI @ moment_II) * change_OI).sum(dim=1).clamp_min(0.0)
            given = float(((weight_OI @ moment_II) * weight_OI).sum())
            found.losses[role] = 0.5 * float(errors_O @ felt_O)
            found.errors[role] = SquaredError(float(errors_O.sum()), given)
        return found

    def loss_of(self, solution: RoundedSolution, tokens: int) -> float:
        """Of factors, by how much larger their errors are; value heads in another basis count by relative errors."""
        total = 0.0
        for roles, error in solution.errors.items():
            dense = sum((self.errors[role] for role in roles), SquaredError())
            in_latents = roles == ("v",) and "o" in solution.solution.inputs
            lost = error.relative * dense.given if in_latents else error.lost / tokens
            total += sum(self.losses[role] for role in roles) * (lost / dense.lost if dense.lost > 0.0 else 1.0)
        return total


def _felt(role: str) -> Moment:
    return Moment(f"{role}.out", kind="gradient", diagonal=True)
