"""Bits chosen with ranks: every point of a curve at every number of bits. docs/methods.md#rounding.

Legend: O outputs, I inputs; C the moment of the inputs and G the diagonal of the gradients', per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from manifests.quantize import QUANTIZED_ROLES, Quantize
from manifests.records import Curve
from pipeline.kernels.rounding import round_with_feedback
from pipeline.methods.method import Group, Moment, Statistics
from pipeline.methods.rounded_size import beside, rounded_share
from pipeline.ranks.curves import Point, from_columns, frontier, to_columns
from pipeline.rounding.solutions import INPUTS, fitting_group

BITS = "bits"  # among the ranks of a point
CHOICES = (3, 4, 8)


def gradient_moments(roles: Sequence[str]) -> tuple[Moment, ...]:
    """What the loss feels of each number that these roles give."""
    return tuple(_felt(role) for role in roles if role in INPUTS)


def with_bits(
    curve: Curve, group: Group, quantize: Quantize, weights: Mapping[str, Tensor], statistics: Statistics, bits: int
) -> Curve:
    """The curve with a point at each of CHOICES in place of each, `bits` among its ranks.

    `numbers` become bytes in numbers of the dtype (of `bits` bits), codes, scales and shapes counted; to the loss comes
    ½ Σ_o G_o (Δ C Δᵀ)_oo of the group's dense matrices, rounded with error feedback: whatever the ranks, the error is
    about that share of what is stored.
    """
    roles = [role for role in group.roles if role in QUANTIZED_ROLES and role not in quantize.skip]
    plain = sum(weights[name].numel() for name in weights if name.removesuffix(".weight") not in roles)
    shapes = [tuple(weights[f"{role}.weight"].shape) for role in roles]
    points = []
    for choice in CHOICES:
        share = rounded_share(choice, quantize.group, bits)
        extra = math.ceil(beside(shapes, choice, quantize.group, bits))
        loss = sum(_loss(role, weights[f"{role}.weight"], statistics, quantize, choice) for role in roles)
        for point in from_columns(curve):
            rounded = max(0, point.numbers - plain)
            numbers = math.ceil(rounded * share) + min(plain, point.numbers) + extra
            points.append(Point({**point.ranks, BITS: choice}, numbers, point.loss + loss, point.cache))
    return to_columns(frontier(points))


def _loss(role: str, weight_OI: Tensor, statistics: Statistics, quantize: Quantize, bits: int) -> float:
    """What rounding a dense matrix is predicted to cost, in nats per token."""
    moment_II, felt_O = statistics.mean(INPUTS[role])[0], statistics.mean(_felt(role))[0]
    fitting = fitting_group(weight_OI.shape[1], quantize.group)
    change_OI = round_with_feedback(weight_OI, moment_II, bits, fitting, weight_OI.dtype).values - weight_OI.double()
    return max(0.0, 0.5 * float(((change_OI @ moment_II) * change_OI).sum(dim=1) @ felt_O))


def _felt(role: str) -> Moment:
    return Moment(f"{role}.out", kind="gradient", diagonal=True)
