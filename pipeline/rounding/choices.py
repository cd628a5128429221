"""Bits chosen with ranks: every point of a curve at every number of bits. docs/methods.md#rounding.

Legend: O outputs, I inputs; C the moment of the inputs and G the diagonal of the gradients', per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.quantize import QUANTIZED_ROLES, Quantize
from manifests.records import Curve
from pipeline.kernels.interpolation import interpolated
from pipeline.kernels.rounding import round_with_feedback
from pipeline.methods.method import Group, Moment, Ranks, Solution, Statistics, Weights
from pipeline.methods.rounded_size import INDEX_BITS, beside, rounded_share
from pipeline.methods.unchanged import BITS, bits_name
from pipeline.ranks.curves import Point, from_columns, frontier, to_columns
from pipeline.rounding.solutions import (
    INPUTS,
    RIDGE,
    Feedbacks,
    RoundedSolution,
    fitting_group,
    multiplied,
    readers_of_firsts,
    roles_of_odd_groups,
    round_solution,
)

CHOICES = (3, 4, 8)
METRICS = {"o": Moment("mid", kind="gradient"), "down": Moment("out", kind="gradient")}  # of what enters the stream
CHANNELS = ("gate", "up")
MOST_GAIN = 100.0  # of a channel that down hardly read before it was fitted again
TINY = 1e-150
SAMPLED = 3  # sizes of points that have the same ranks full; factors lose more by rounding than what stays whole
UNDERSTATED = 1.3  # measured divergence over what ranks are predicted to lose, where rounding's comes out as predicted


def gradient_moments(roles: Sequence[str]) -> tuple[Moment, ...]:
    """What the loss feels of what these roles give: of each number, or of all together where they enter the stream; and
    of what reads the MLP's input together, what it feels of that. (Who factors q and k asks for theirs.)"""
    felt = [METRICS.get(role, _felt(role)) for role in roles if role in QUANTIZED_ROLES]
    reading = tuple(role for role in ("gate", "up") if role in roles)
    return (*felt, _pull(reading)) if reading else tuple(felt)


class Sizes(NamedTuple):
    """What a method makes of a group at some ranks: `solve` gives the solution; `written`, as `Writing` has it, how
    many numbers of it the role takes that writes to the stream (None: all roles have the same bits)."""

    solve: Callable[[Ranks], Solution]
    written: Callable[[Ranks], int] | None = None


def with_bits(
    curve: Curve, group: Group, quantize: Quantize, weights: Weights, statistics: Statistics, sizes: Sizes, bits: int
) -> Curve:
    """The curve with a point at each of CHOICES in place of each, `bits` among its ranks; where some roles read the
    stream and one writes to it, at each pair of them.

    `numbers` become bytes in numbers of the dtype (of `bits` bits), codes, scales and shapes counted. The loss is what
    the ranks lose, times UNDERSTATED, and what rounding with error feedback loses, ½ tr(G Δ C Δᵀ). That is known at
    SAMPLED sizes, at which the group is solved and rounded, and interpolated between them, among points of which the
    same matrices are factors.
    """
    roles = [role for role in group.roles if role in QUANTIZED_ROLES and role not in quantize.skip]
    counts = _Counts(roles, quantize, weights, sizes, bits)
    feedbacks = Feedbacks()
    predictors = {choice: _Predictor(roles, weights, statistics, quantize, choice, feedbacks) for choice in CHOICES}
    points = []
    for line in _alike(from_columns(curve)):
        sampled, known = _sampled(line), []
        pivoted, odd = dict[str, str](), set[str]()
        for point in sampled:  # one at a time: dense matrices
            solution = sizes.solve(point.ranks)
            pivoted |= {
                form.group: role for role, form in solution.forms.items() if form.form == "pivoted" and form.group
            }
            odd |= roles_of_odd_groups(solution, quantize)
            before = multiplied(solution, {})
            each = (
                (choice, round_solution(solution, quantize, choice, statistics.moments, weights, feedbacks))
                for choice in CHOICES
            )
            lost = [predictors[choice].losses_of(solution, before, rounded) for choice, rounded in each]
            known.append(
                [[math.fsum(found.get(role, 0.0) for role in side) for found in lost] for side in counts.sides]
            )
        places = torch.tensor([point.numbers for point in line])
        losses_PSB = interpolated(
            [point.numbers for point in sampled], torch.tensor(known, dtype=torch.float64), places
        )
        for point, losses_SB in zip(line, losses_PSB.tolist(), strict=True):
            for numbers, places_S in counts.options(point, pivoted, odd):
                loss = math.fsum(losses_B[place] for losses_B, place in zip(losses_SB, places_S, strict=True))
                ranks = {**point.ranks, **counts.names(places_S)}
                points.append(Point(ranks, numbers, UNDERSTATED * point.loss + loss, point.cache))
    return to_columns(frontier(points))


class _Counts:
    """What the options of a point store. `sides`: the roles that have the same bits: those that read the stream, and
    the one that writes to it."""

    def __init__(self, roles: Sequence[str], quantize: Quantize, weights: Weights, sizes: Sizes, bits: int) -> None:
        assert quantize.group is not None, "auto has groups"
        self.group, self.bits, self.written = quantize.group, bits, sizes.written
        reading, writing = ([role for role in roles if (role in METRICS) == writes] for writes in (False, True))
        self.sides = [reading, writing] if reading and writing and sizes.written else [[*roles]]
        self.shapes = {role: (weights[f"{role}.weight"].shape[0], weights[f"{role}.weight"].shape[1]) for role in roles}
        self.plain = sum(weights[name].numel() for name in weights if name.removesuffix(".weight") not in roles)

    def options(
        self, point: Point, pivoted: Mapping[str, str], odd: Collection[str]
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Stored numbers of the dtype, and of each side the place of its bits in CHOICES. `pivoted`: the names of ranks
        that are stored so, and one of their roles. `odd`: roles of which some columns `group` does not divide."""
        indices = {name: math.ceil(INDEX_BITS * point.ranks[name] / self.bits) for name in pivoted}
        kept = self.plain + sum(indices.values())
        coded = [point.numbers - kept]
        if len(self.sides) > 1:
            assert self.written is not None
            own = sum(numbers for name, numbers in indices.items() if pivoted[name] in self.sides[1])
            writing = self.written(point.ranks) - own
            coded = [coded[0] - writing, writing]
        each = [
            [self._stored(side, numbers, choice, odd) for choice in CHOICES]
            for side, numbers in zip(self.sides, coded, strict=True)
        ]
        for places in product(range(len(CHOICES)), repeat=len(self.sides)):
            found = sum(stored[place] for stored, place in zip(each, places, strict=True))
            yield min(kept, point.numbers) + found, places

    def _stored(self, side: Sequence[str], coded: float, choice: int, odd: Collection[str]) -> int:
        codes = math.ceil(max(0, coded) * rounded_share(choice, self.group, self.bits))
        shapes = [self.shapes[role] if role in odd else (self.shapes[role][0], self.group) for role in side]
        return codes + math.ceil(beside(shapes, choice, self.group, self.bits))

    def names(self, places: Sequence[int]) -> dict[str, int]:
        """The bits as they stand among ranks."""
        chosen = {BITS: CHOICES[places[0]]}
        return chosen | {bits_name(role): CHOICES[places[1]] for role in self.sides[1]} if places[1:] else chosen


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


class _Predictor:
    """What rounding solutions of a group to some bits is predicted to lose, in nats per token.

    ½ tr(G Δ C Δᵀ). Of what is written to the stream G is whole. Of what reads it G is known of the dense outputs, one
    by one: right for errors that are each row's own, as those of whole matrices and of second factors are. The error
    of a first factor errs in all outputs together, and counts by what the loss feels of their common input. Behind gate
    and up, channels that stay are felt more where down is fitted again for those that went: by how much, its columns
    tell. Value heads in another basis, whose G is not known, count by the share of their squares that is lost.
    """

    def __init__(
        self,
        roles: Sequence[str],
        weights: Weights,
        statistics: Statistics,
        quantize: Quantize,
        bits: int,
        feedbacks: Feedbacks,
    ) -> None:
        self.weights, self.statistics = weights, statistics
        # By role, of the dense one: predicted loss, share of squares lost.
        self.whole: dict[str, tuple[float, float]] = {}
        for role in (role for role in roles if role not in METRICS):
            weight_OI = weights[f"{role}.weight"].to(torch.float64)
            moment_II, felt_O = statistics.mean(INPUTS[role])[0], statistics.mean(_felt(role))[0]
            group = fitting_group(weight_OI.shape[1], quantize.group)
            feedback, dtype = feedbacks.of(INPUTS[role], moment_II), weights[f"{role}.weight"].dtype
            rounded = round_with_feedback(weight_OI, feedback, bits, group, dtype)
            errors_O = _squares(rounded.values - weight_OI, moment_II)
            share = float(errors_O.sum()) / max(float(_squares(weight_OI, moment_II).sum()), TINY)
            self.whole[role] = 0.5 * float(errors_O @ felt_O), share

    def losses_of(
        self, solution: Solution, before: Mapping[tuple[str, ...], Tensor], rounded: RoundedSolution
    ) -> dict[str, float]:
        """Of a rounded solution, by role (the first of those that share a matrix); `before`: the exact one, multiplied
        out."""
        felt = self._felt_outputs(solution, before)
        firsts = self._first_errors(solution, rounded, felt)
        found = {role: first.loss for role, first in firsts.items()}
        for roles, after_OI in multiplied(solution, rounded.rounded).items():
            role, change_OI = roles[0], after_OI - before[roles]
            moment_II = self.statistics.mean(INPUTS[role])[0]
            if role in solution.inputs:
                moment_II = solution.inputs[role].to(torch.float64)
            if not change_OI.any():
                continue  # a role that is skipped
            if role in METRICS:
                felt_OO = self.statistics.mean(METRICS[role])[0]
                loss = 0.5 * float(((felt_OO @ change_OI) * (change_OI @ moment_II)).sum())
            else:
                if role in firsts:
                    change_OI = change_OI - before[roles] @ firsts[role].turn
                errors_O = _squares(change_OI, moment_II)
                felt_O = torch.cat([felt[role] for role in roles])
                loss = (
                    0.5 * float(errors_O @ felt_O)
                    if len(felt_O) == len(errors_O)
                    else self._by_share(
                        role, float(errors_O.sum()) / max(float(_squares(before[roles], moment_II).sum()), TINY)
                    )
                )
            found[role] = found.get(role, 0.0) + loss
        return {role: max(0.0, loss) for role, loss in found.items()}

    def _by_share(self, role: str, lost: float) -> float:
        """Of a share of squares that is lost, as the dense one loses."""
        loss, share = self.whole[role]
        return loss * lost / share if share > 0.0 else 0.0

    def _felt_outputs(self, solution: Solution, before: Mapping[tuple[str, ...], Tensor]) -> dict[str, Tensor]:
        """By role that reads the stream, G of each output that the solution gives."""
        found = {}
        gain_k = self._gain(solution, before)
        for role in self.whole:
            felt_O = self.statistics.mean(_felt(role))[0]
            if role in solution.outputs:
                felt_O = felt_O[solution.outputs[role]]
            found[role] = felt_O * gain_k if role in CHANNELS and gain_k is not None else felt_O
        return found

    def _gain(self, solution: Solution, before: Mapping[tuple[str, ...], Tensor]) -> Tensor | None:
        """(k,): how much more the loss feels of each channel that stays, by the columns of down before and now."""
        if ("down",) not in before:
            return None
        felt_DD, dense_DN = self.statistics.mean(METRICS["down"])[0], self.weights["down.weight"].to(torch.float64)
        kept = solution.outputs.get("up")
        dense_Dk = dense_DN if kept is None else dense_DN[:, kept]
        if dense_Dk.shape != before["down",].shape:
            return None
        now_k, then_k = (((felt_DD @ down_Dk) * down_Dk).sum(dim=0) for down_Dk in (before["down",], dense_Dk))
        return (now_k / then_k.clamp_min(TINY)).clamp(max=MOST_GAIN)

    def _first_errors(
        self, solution: Solution, rounded: RoundedSolution, felt: Mapping[str, Tensor]
    ) -> dict[str, _FirstError]:
        """By role, of those whose first factor is rounded and of whose common input the gradient is known.

        With P_A = C Aᵀ (A C Aᵀ)⁻¹ A, the second factors are W P_A of the dense W, and W' T x = W Q x with T = P_Â − I
        and Q = P_A T: the loss is ½ tr(J Q C Qᵀ), J = E[j jᵀ] of the pull j = Wᵀ g, times the share of what the loss
        feels of the dense outputs that it feels of those that the solution gives.
        """
        found: dict[str, _FirstError] = {}
        for key, roles in readers_of_firsts(solution).items():
            pull = _pull(roles)
            if key not in rounded.rounded or pull not in self.statistics.moments:
                continue
            moment_II, pull_II = self.statistics.mean(INPUTS[roles[0]])[0], self.statistics.mean(pull)[0]
            turn_II = _projection(rounded.rounded[key].values, moment_II)
            turn_II.diagonal().sub_(1.0)
            change_II = _projection(solution.tensors[key].to(torch.float64), moment_II) @ turn_II
            loss = 0.5 * float(((pull_II @ change_II) * (change_II @ moment_II)).sum())
            share = self._share(solution, roles, moment_II, felt)
            found |= {role: _FirstError(share * loss if role == roles[0] else 0.0, turn_II) for role in roles}
        return found

    def _share(self, solution: Solution, roles: Sequence[str], moment_II: Tensor, felt: Mapping[str, Tensor]) -> float:
        """Of Σ_o G_o E[y_o²] over the dense outputs y, what the outputs that the solution gives have."""
        now = dense = 0.0
        for role in roles:
            squares_O = _squares(self.weights[f"{role}.weight"].to(torch.float64), moment_II)
            dense += float(squares_O @ self.statistics.mean(_felt(role))[0])
            squares_O = squares_O[solution.outputs[role]] if role in solution.outputs else squares_O
            now += float(squares_O @ felt[role]) if len(squares_O) == len(felt[role]) else 0.0
        return now / dense if dense > 0.0 else 1.0


class _FirstError(NamedTuple):
    """Of a first factor A that is rounded to Â: `turn` T (I, I), so that second factors that are fitted again give
    W' + W' T of W' = B A; and of the first role of those that share it the predicted loss, of others 0."""

    loss: float
    turn: Tensor


def _projection(first_rI: Tensor, moment_II: Tensor) -> Tensor:
    """C Aᵀ (A C Aᵀ)⁻¹ A."""
    read_Ir = moment_II @ first_rI.T
    latents_rr = first_rI @ read_Ir
    latents_rr.diagonal().add_(RIDGE * latents_rr.diagonal().mean())
    solved_rI: Tensor = torch.linalg.solve(latents_rr, first_rI)
    return read_Ir @ solved_rI


def _squares(matrix_OI: Tensor, moment_II: Tensor) -> Tensor:
    """(O,) mean squares of what each row gives."""
    return ((matrix_OI @ moment_II) * matrix_OI).sum(dim=1).clamp_min(0.0)


def _pull(roles: Sequence[str]) -> Moment:
    return Moment(f"pull:{'+'.join(roles)}", kind="gradient")


def _felt(role: str) -> Moment:
    return Moment(f"{role}.out", kind="gradient", diagonal=True)
