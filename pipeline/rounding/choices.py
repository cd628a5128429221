"""Bits chosen with ranks: every point of a curve at every number of bits. docs/methods.md#rounding.

Legend: O outputs, I inputs; C the moment of the inputs and G the diagonal of the gradients', per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import Curve
from pipeline.families.blocks import Matrix, MLPBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.gptq import round_with_feedback
from pipeline.kernels.interpolation import interpolate
from pipeline.kernels.refit import evenly_spread
from pipeline.methods.base import Group
from pipeline.methods.method import Moment, Solution, Statistics
from pipeline.methods.moments import input_moment, output_gradient, pull
from pipeline.methods.rounded_size import INDEX_BITS, rounded_share, rounding_overhead
from pipeline.methods.unchanged import BITS
from pipeline.methods.work import tried_tokens
from pipeline.ranks.curves import Point, from_columns, spread, to_columns, up_to_whole
from pipeline.rounding.outputs import output_moments, outputs_moment
from pipeline.rounding.solutions import (
    RIDGE,
    Feedbacks,
    RoundedSolution,
    fitting_group,
    multiplied,
    readers_of_firsts,
    roles_of_odd_groups,
    round_solution,
)

MOST_GAIN = 100.0  # limits the gain of channels that down hardly read before its refit
TINY = 1e-150
SAMPLED = 2  # sizes that are rounded among points with the same full ranks; factors lose more than dense matrices
FINEST = 8  # bits whose loss follows from that of fewer bits, because it is too small to matter
UNDERSTATED = 1.3  # measured divergence of ranks, relative to the prediction; that of rounding is as predicted


def gradient_moments(roles: Sequence[str], geometry: LayerGeometry) -> tuple[Moment, ...]:
    """Return the moments of gradients that predict the loss of rounding these roles: at their outputs, and at the
    common input of an MLP's readers. (Methods that factor q and k need those at their common input anyway.)"""
    matrices = [geometry.matrices[role] for role in roles if role in geometry.matrices]
    gradients = tuple(map(output_gradient, matrices))
    pulls = [
        pull(readers)
        for block in geometry.mlps
        if (readers := [matrix for matrix in block.readers if matrix.role in roles])
    ]
    return (*gradients, *pulls)


def with_bits(curve: Curve, group: Group[Any], quantize: Quantize) -> Curve:
    """Return the curve with each point repeated at each of `quantize.choices`, with `bits` among its ranks.

    `numbers` become bytes, in numbers of the layer's dtype, including codes, scales and shapes. The loss is UNDERSTATED
    times that of the ranks, plus that of rounding with error feedback, ½ tr(G Δ C Δᵀ). The latter is computed at
    SAMPLED sizes, at which the group is solved and rounded, and interpolated between points with the same factored
    matrices. For FINEST bits it is that of the next fewer bits, times the squared ratio of their steps.
    """
    group = group.with_data(group.weights, _with_smaller_samples(group.statistics))
    weights, statistics, geometry = group.weights, group.statistics, group.geometry
    bits, choices = geometry.bits, quantize.choices
    roles = [role for role in group.roles if role in geometry.matrices and not quantize.skips(role)]
    others = [weight for name, weight in weights.items() if name.removesuffix(".weight") not in roles]
    plain = sum(weight.numel() for weight in others)
    wider = math.ceil(sum(weight.numel() * (8 * weight.itemsize - bits) for weight in others) / bits)
    if not roles:
        return _with_bits_of_nothing(curve, choices[0], wider)
    scale = max(8 * weights[f"{role}.weight"].itemsize / bits for role in roles)
    feedbacks = Feedbacks(quantize)
    outputs = output_moments(roles, geometry) if quantize.feedback == "both" else {}
    tried = [choice for choice in choices if choice < FINEST]
    predictors = {choice: _Predictor(group, quantize, choice, feedbacks) for choice in tried}

    def rounding(solution: Solution, choice: int) -> RoundedSolution:
        moments, reads = statistics.moments, geometry.reads
        return round_solution(solution, quantize, choice, moments, weights, reads, feedbacks, outputs)

    points = []
    for line in _alike(from_columns(curve)):
        sampled, sampled_losses = spread(line, SAMPLED), []
        indexed, odd = set[str](), set[str]()
        for point in sampled:  # one at a time: dense matrices
            solution = group.solve(point.ranks)
            indexed |= {form.group for form in solution.forms.values() if form.form == "pivoted" and form.group}
            odd |= roles_of_odd_groups(solution, quantize)
            before = multiplied(solution, {})
            each = ((choice, rounding(solution, choice)) for choice in tried)
            losses = [predictors[choice].loss_of(solution, before, rounded) for choice, rounded in each]
            sampled_losses.append([*losses, losses[-1] * _finer(tried[-1])])
        shapes = [_counted_shape(weights[f"{role}.weight"], quantize.group, role in odd) for role in roles]
        sizes = torch.tensor([point.numbers for point in line])
        losses_SB = torch.tensor(sampled_losses, dtype=torch.float64)
        losses_PB = interpolate([point.numbers for point in sampled], losses_SB, sizes)
        for point, lost in zip(line, losses_PB.tolist(), strict=True):
            unrounded = plain + sum(math.ceil(INDEX_BITS * point.ranks[name] / bits) for name in indexed)
            for choice, loss in zip(choices, lost, strict=True):
                codes = math.ceil(
                    max(0, point.numbers - unrounded) * rounded_share(choice, quantize.group, bits, scale)
                )
                more = math.ceil(max(1.0, scale) * rounding_overhead(shapes, choice, quantize, bits))
                numbers = codes + min(unrounded, point.numbers) + wider + more
                ranks = {**point.ranks, BITS: choice}
                points.append(Point(ranks, numbers, UNDERSTATED * point.loss + loss, point.cache))
    return to_columns(up_to_whole(points), curve.hint, few=curve.few)


def _finer(bits: int) -> float:
    """Return the loss of FINEST bits relative to that of fewer `bits`, both with uniform levels."""
    ratio: float = (2**bits - 1) / (2**FINEST - 1)
    return ratio**2


def _with_smaller_samples(statistics: Statistics) -> Statistics:
    """Return statistics with an evenly spread part of each sample. A fit to it has other errors than one to the whole
    sample, but loses nearly as much when it is rounded."""

    def part(values_1TF: Tensor) -> Tensor:
        tokens = values_1TF.shape[1]
        places = evenly_spread(0, tokens, tokens, tried_tokens(tokens))
        return values_1TF[:, places.to(values_1TF.device)] if len(places) < tokens else values_1TF

    moments = {moment: part(sum_) if moment.kind == "sample" else sum_ for moment, sum_ in statistics.moments.items()}
    return replace(statistics, moments=moments)


def _with_bits_of_nothing(curve: Curve, bits: int, wider: int) -> Curve:
    """Return the curve of a group whose roles are all skipped, with unused `bits`, and `wider` more numbers."""
    points = [
        Point({**point.ranks, BITS: bits}, point.numbers + wider, UNDERSTATED * point.loss, point.cache)
        for point in from_columns(curve)
    ]
    return to_columns(up_to_whole(points), curve.hint, few=curve.few)


def _counted_shape(weight_OI: Tensor, group: int | None, odd: bool) -> tuple[int, int]:
    """Return the shape that `rounding_overhead` counts for a role: one group wide, unless some groups are smaller."""
    rows, columns = weight_OI.shape
    return (rows, columns) if odd or group is None else (rows, group)


def _alike(points: Sequence[Point]) -> list[list[Point]]:
    """Group the points by which of their ranks are full, in order."""
    most = {name: max(point.ranks[name] for point in points) for name in points[0].ranks}
    groups: dict[tuple[bool, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(rank == most[name] for name, rank in point.ranks.items()), []).append(point)
    return list(groups.values())


class _Predictor:
    """Predicts the loss of rounding solutions of a group, in nats per token: ½ tr(G Δ C Δᵀ).

    For a matrix that writes to the stream, the whole G is known. For readers, only the diagonal of G at the dense
    outputs is known, which suffices if the errors of rows are independent, as in dense matrices and second factors;
    with feedback on both sides, where they are not, G is known in sections. The error of a first factor affects all
    outputs, so it is weighted by the gradient at their common input. If down was refitted to the kept channels, these
    are weighted by the gain of down's columns. The G of value heads in another basis is unknown; their loss is
    estimated from the lost share of their squares.
    """

    def __init__(self, group: Group[Any], quantize: Quantize, bits: int, feedbacks: Feedbacks) -> None:
        geometry, weights, statistics = group.geometry, group.weights, group.statistics
        self.weights, self.statistics = weights, statistics
        # A skipped role may share a rounded factor with another.
        self.matrices = {role: geometry.matrices[role] for role in group.roles if role in geometry.matrices}
        self.mlps = [block for block in geometry.mlps if not {*block.roles}.isdisjoint(group.roles)]
        # For each dense role: the predicted loss, and the lost share of squares.
        self.whole: dict[str, tuple[float, float]] = {}
        self.reading = [matrix for matrix in self.matrices.values() if not matrix.writes_stream]
        for matrix in (matrix for matrix in self.reading if not quantize.skips(matrix.role)):
            role, read = matrix.role, input_moment(matrix)
            weight_OI = weights[matrix.weight_key].to(torch.float64)
            moment_II, gradient_O = statistics.mean(read)[0], statistics.mean(output_gradient(matrix))[0]
            columns = fitting_group(weight_OI.shape[1], quantize.group)
            feedback, dtype = feedbacks.of(read.point, moment_II, cached=True), weights[matrix.weight_key].dtype
            rounded = round_with_feedback(weight_OI, feedback, bits, columns, dtype, quantize.kinds_of_levels[-1])
            errors_O = _squares(rounded.values - weight_OI, moment_II)
            share = float(errors_O.sum()) / max(float(_squares(weight_OI, moment_II).sum()), TINY)
            self.whole[role] = 0.5 * float(errors_O @ gradient_O), share

    def loss_of(self, solution: Solution, before: Mapping[tuple[str, ...], Tensor], rounded: RoundedSolution) -> float:
        """Predict the loss of a rounded solution. `before`: the exact solution, multiplied out."""
        gradients = self._output_gradients(solution, before)
        firsts = self._first_errors(solution, rounded, gradients)
        total = sum(first.loss for first in firsts.values())
        for roles, after_OI in multiplied(solution, rounded.rounded).items():
            role, change_OI = roles[0], after_OI - before[roles]
            if not change_OI.any():
                continue  # a role that is skipped, whose inputs may not have been summed
            matrix = self.matrices[role]
            moment_II = self.statistics.mean(input_moment(matrix))[0]
            if role in solution.inputs:
                moment_II = solution.inputs[role]().to(torch.float64)
            if matrix.writes_stream:
                metric_OO = self.statistics.mean(output_gradient(matrix))[0]
                total += 0.5 * float(((metric_OO @ change_OI) * (change_OI @ moment_II)).sum())
                continue
            if role in firsts:
                change_OI = change_OI - before[roles] @ firsts[role].turn
            sections_nss = self.statistics.moments.get(outputs_moment(matrix))
            if sections_nss is not None and role not in solution.outputs and len(change_OI) == matrix.outputs:
                total += 0.5 * _weighted(change_OI, moment_II, sections_nss)
                continue
            errors_O = _squares(change_OI, moment_II)
            gradient_O = torch.cat([gradients[role] for role in roles])
            if len(gradient_O) == len(errors_O):
                total += 0.5 * float(errors_O @ gradient_O)
            else:
                loss, share = self.whole[role]
                lost = float(errors_O.sum()) / max(float(_squares(before[roles], moment_II).sum()), TINY)
                total += loss * lost / share if share > 0.0 else 0.0
        return max(0.0, total)

    def _output_gradients(self, solution: Solution, before: Mapping[tuple[str, ...], Tensor]) -> dict[str, Tensor]:
        """Map each role that reads the stream to G of each output of the solution."""
        gradients, gains = (
            {},
            {role: gain for block in self.mlps for role, gain in self._gains(block, solution, before).items()},
        )
        for matrix in self.reading:
            gradient_O = self.statistics.mean(output_gradient(matrix))[0]
            if matrix.role in solution.outputs:
                gradient_O = gradient_O[solution.outputs[matrix.role]]
            gradients[matrix.role] = gradient_O * gains[matrix.role] if matrix.role in gains else gradient_O
        return gradients

    def _gains(
        self, block: MLPBlock, solution: Solution, before: Mapping[tuple[str, ...], Tensor]
    ) -> dict[str, Tensor]:
        """Map the readers of an MLP to (k,): by how much the weight of each kept channel in the loss grows.

        It follows from the writer's columns before and after the refit. Empty if the solution does not hold the writer.
        """
        writer = block.writer
        if (writer.role,) not in before:
            return {}
        metric_DD = self.statistics.mean(output_gradient(writer))[0]
        dense_DN = self.weights[writer.weight_key].to(torch.float64)
        channels_k = solution.outputs.get(block.readers[-1].role)
        dense_Dk = dense_DN if channels_k is None else dense_DN[:, channels_k]
        if dense_Dk.shape != before[writer.role,].shape:
            return {}
        now_k, then_k = (((metric_DD @ down_Dk) * down_Dk).sum(dim=0) for down_Dk in (before[writer.role,], dense_Dk))
        gain_k = (now_k / then_k.clamp_min(TINY)).clamp(max=MOST_GAIN)
        return {reader.role: gain_k for reader in block.readers}

    def _first_errors(
        self, solution: Solution, rounded: RoundedSolution, gradients: Mapping[str, Tensor]
    ) -> dict[str, _FirstError]:
        """Map the roles whose first factor is rounded, and whose common input has a gradient moment, to its error.

        With P_A = C Aᵀ (A C Aᵀ)⁻¹ A, the second factors are W P_A for the dense W, and W' T x = W Q x with T = P_Â − I
        and Q = P_A T. The loss is ½ tr(J Q C Qᵀ) with J = E[j jᵀ] of the pull j = Wᵀ g, times the `_share` of the
        solution's outputs.
        """
        errors: dict[str, _FirstError] = {}
        for key, roles in readers_of_firsts(solution).items():
            matrices = [self.matrices[role] for role in roles]
            if key not in rounded.rounded or pull(matrices) not in self.statistics.moments:
                continue
            moment_II = self.statistics.mean(input_moment(matrices[0]))[0]
            pull_II = self.statistics.mean(pull(matrices))[0]
            turn_II = _projection(rounded.rounded[key].values, moment_II)
            turn_II.diagonal().sub_(1.0)
            change_II = _projection(solution.tensors[key].to(torch.float64), moment_II) @ turn_II
            loss = 0.5 * float(((pull_II @ change_II) * (change_II @ moment_II)).sum())
            share = self._share(solution, matrices, moment_II, gradients)
            errors |= {role: _FirstError(share * loss if role == roles[0] else 0.0, turn_II) for role in roles}
        return errors

    def _share(
        self, solution: Solution, matrices: Sequence[Matrix], moment_II: Tensor, gradients: Mapping[str, Tensor]
    ) -> float:
        """Return Σ_o G_o E[y_o²] over the solution's outputs y, divided by that over the dense outputs."""
        now = dense = 0.0
        for matrix in matrices:
            role = matrix.role
            squares_O = _squares(self.weights[matrix.weight_key].to(torch.float64), moment_II)
            dense += float(squares_O @ self.statistics.mean(output_gradient(matrix))[0])
            squares_O = squares_O[solution.outputs[role]] if role in solution.outputs else squares_O
            now += float(squares_O @ gradients[role]) if len(squares_O) == len(gradients[role]) else 0.0
        return now / dense if dense > 0.0 else 1.0


class _FirstError(NamedTuple):
    """The error of a first factor A that is rounded to Â.

    Attributes:
        loss: the predicted loss, for the first of the roles that share the factor; 0 for the others.
        turn: T (I, I): with refitted second factors, W' = B A becomes W' + W' T.
    """

    loss: float
    turn: Tensor


def _projection(first_rI: Tensor, moment_II: Tensor) -> Tensor:
    """Return C Aᵀ (A C Aᵀ)⁻¹ A."""
    read_Ir = moment_II @ first_rI.T
    latents_rr = first_rI @ read_Ir
    latents_rr.diagonal().add_(RIDGE * latents_rr.diagonal().mean())
    solved_rI: Tensor = torch.linalg.solve(latents_rr, first_rI)
    return read_Ir @ solved_rI


def _weighted(change_OI: Tensor, moment_II: Tensor, gradient_nss: Tensor) -> float:
    """Return tr(G Δ C Δᵀ), with G of n sections of s outputs."""
    change_nsI = change_OI.unflatten(0, gradient_nss.shape[:2])
    return float(((gradient_nss.to(torch.float64) @ change_nsI) * (change_nsI @ moment_II)).sum())


def _squares(matrix_OI: Tensor, moment_II: Tensor) -> Tensor:
    """Return the mean square of each output, (O,)."""
    return ((matrix_OI @ moment_II) * matrix_OI).sum(dim=1).clamp_min(0.0)
