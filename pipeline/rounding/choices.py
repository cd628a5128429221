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
from manifests.records import Curve
from pipeline.kernels.interpolation import interpolated
from pipeline.kernels.rounding import round_with_feedback
from pipeline.methods.method import Group, Moment, Ranks, Solution, Statistics, Weights
from pipeline.methods.rounded_size import INDEX_BITS, beside, rounded_share
from pipeline.methods.unchanged import BITS
from pipeline.ranks.curves import Point, from_columns, frontier, to_columns
from pipeline.rounding.solutions import INPUTS, RoundedSolution, fitting_group, multiplied, round_solution

CHOICES = (3, 4, 8)
METRICS = {"o": Moment("mid", kind="gradient"), "down": Moment("out", kind="gradient")}  # of what enters the stream
SAMPLED = 3  # sizes of points that have the same ranks full; factors lose more by rounding than what stays whole
UNDERSTATED = 1.3  # measured divergence over what ranks are predicted to lose, where rounding's comes out as predicted


def gradient_moments(roles: Sequence[str]) -> tuple[Moment, ...]:
    """What the loss feels of what these roles give: of each number, or of all together where they enter the stream; and
    of what reads the MLP's input together, what it feels of that. (Who factors q and k asks for theirs.)"""
    felt = [METRICS.get(role, _felt(role)) for role in roles if role in QUANTIZED_ROLES]
    reading = tuple(role for role in ("gate", "up") if role in roles)
    return (*felt, _pull(reading)) if reading else tuple(felt)


def with_bits(
    curve: Curve,
    group: Group,
    quantize: Quantize,
    weights: Weights,
    statistics: Statistics,
    solve: Callable[[Ranks], Solution],
    bits: int,
) -> Curve:
    """The curve with a point at each of CHOICES in place of each, `bits` among its ranks.

    `numbers` become bytes in numbers of the dtype (of `bits` bits), codes, scales and shapes counted. The loss is what
    the ranks lose, times UNDERSTATED, and what rounding with error feedback loses, ½ tr(G Δ C Δᵀ). That is known at
    SAMPLED sizes, at which the group is solved and rounded, and interpolated between them, among points of which the
    same matrices are factors. `solve`: ranks -> solution.
    """
    roles = [role for role in group.roles if role in QUANTIZED_ROLES and role not in quantize.skip]
    plain = sum(weights[name].numel() for name in weights if name.removesuffix(".weight") not in roles)
    shapes = [tuple(weights[f"{role}.weight"].shape) for role in roles]
    readers = {choice: _Readers.rounded(roles, weights, statistics, quantize, choice) for choice in CHOICES}
    points = []
    for line in _alike(from_columns(curve)):
        sampled, known, indexed = _sampled(line), [], set[str]()
        for point in sampled:  # one at a time: dense matrices
            solution = solve(point.ranks)
            indexed |= {form.group for form in solution.forms.values() if form.form == "pivoted" and form.group}
            before = multiplied(solution, {})
            each = (
                (choice, round_solution(solution, quantize, choice, statistics.moments, weights)) for choice in CHOICES
            )
            known.append([readers[choice].loss_of(solution, before, rounded, statistics) for choice, rounded in each])
        sizes = torch.tensor([point.numbers for point in line])
        losses_PB = interpolated([point.numbers for point in sampled], torch.tensor(known, dtype=torch.float64), sizes)
        for point, lost in zip(line, losses_PB.tolist(), strict=True):
            kept = plain + sum(math.ceil(INDEX_BITS * point.ranks[name] / bits) for name in indexed)
            for choice, loss in zip(CHOICES, lost, strict=True):
                codes = math.ceil(max(0, point.numbers - kept) * rounded_share(choice, quantize.group, bits))
                numbers = codes + min(kept, point.numbers) + math.ceil(beside(shapes, choice, quantize.group, bits))
                ranks = {**point.ranks, BITS: choice}
                points.append(Point(ranks, numbers, UNDERSTATED * point.loss + loss, point.cache))
    return to_columns(frontier(points))


def _alike(points: Sequence[Point]) -> list[list[Point]]:
    """The points by which of their ranks are at the most, each ascending."""
    most = {name: max(point.ranks[name] for point in points) for name in points[0].ranks}
    found: dict[tuple[bool, ...], list[Point]] = {}
    for point in points:
        found.setdefault(tuple(rank == most[name] for name, rank in point.ranks.items()), []).append(point)
    return list(found.values())


def _sampled(points: Sequence[Point]) -> list[Point]:
    """SAMPLED of them at most, from the first to the last."""
    last, count = len(points) - 1, min(SAMPLED, len(points))
    return [points[last * place // max(1, count - 1)] for place in range(count)]


class _Readers(NamedTuple):
    """Dense matrices that read the stream, rounded: by role the predicted loss, and the squares of what they give wrong
    and of what they give, all per token."""

    losses: dict[str, float]
    lost: dict[str, float]
    given: dict[str, float]

    @classmethod
    def rounded(
        cls, roles: Sequence[str], weights: Weights, statistics: Statistics, quantize: Quantize, bits: int
    ) -> _Readers:
        """With error feedback."""
        found = cls({}, {}, {})
        for role in (role for role in roles if role not in METRICS):
            weight_OI = weights[f"{role}.weight"].to(torch.float64)
            (moment_II,), felt_O = statistics.mean(INPUTS[role]), statistics.mean(_felt(role))[0]
            fitting = fitting_group(weight_OI.shape[1], quantize.group)
            rounded = round_with_feedback(weight_OI, moment_II, bits, fitting, weights[f"{role}.weight"].dtype)
            errors_O = _squares(rounded.values - weight_OI, moment_II)
            found.losses[role] = 0.5 * float(errors_O @ felt_O)
            found.lost[role] = float(errors_O.sum())
            found.given[role] = float(_squares(weight_OI, moment_II).sum())
        return found

    def loss_of(
        self,
        solution: Solution,
        before: Mapping[tuple[str, ...], Tensor],
        rounded: RoundedSolution,
        statistics: Statistics,
    ) -> float:
        """What a rounded solution is predicted to lose; `before`: the exact one, multiplied out.

        What reads the stream may give other numbers than those that G is known of: it counts in proportion to the
        errors of the dense matrices, value heads in another basis to the relative ones.
        """
        total = 0.0
        for roles, after_OI in multiplied(solution, rounded.values).items():
            role, change_OI = roles[0], after_OI - before[roles]
            moment_II = statistics.mean(INPUTS[role])[0]
            if role in solution.inputs:
                moment_II = solution.inputs[role].to(torch.float64)
            if not change_OI.any():
                continue  # a role that is skipped
            if role in METRICS:
                felt_OO = statistics.mean(METRICS[role])[0]
                total += 0.5 * float(((felt_OO @ change_OI) * (change_OI @ moment_II)).sum())
                continue
            lost, scale = float(_squares(change_OI, moment_II).sum()), 1.0
            if roles == ("v",) and "o" in solution.inputs:
                scale = self.given["v"] / float(_squares(before[roles], moment_II).sum())
            dense = sum(self.lost[role] for role in roles)
            total += sum(self.losses[role] for role in roles) * (scale * lost / dense if dense > 0.0 else 0.0)
        return max(0.0, total)


def _squares(matrix_OI: Tensor, moment_II: Tensor) -> Tensor:
    """(O,) mean squares of what each row gives."""
    return ((matrix_OI @ moment_II) * matrix_OI).sum(dim=1).clamp_min(0.0)


def _pull(roles: Sequence[str]) -> Moment:
    return Moment(f"pull:{'+'.join(roles)}", kind="gradient")


def _felt(role: str) -> Moment:
    return Moment(f"{role}.out", kind="gradient", diagonal=True)
