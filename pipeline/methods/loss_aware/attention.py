"""Values and the output projection: a basis of each KV head's values, o refitted to it, then o cut to a rank.

docs/methods.md#curves.

Legend: D hidden, H query heads, G key/value heads, d head_dim, F = H·d, r kept directions of a head, R = H·r.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, LatentAttentionBlock, roles_of
from pipeline.kernels.heads import diagonal_blocks, project_heads, repeat_groups
from pipeline.kernels.moments import head_moment
from pipeline.kernels.sensitivity import (
    Factored,
    change_loss,
    factored,
    gram_losses,
    least_losses,
    losses_by_rank,
    output_directions,
    pushforward,
)
from pipeline.kernels.spectra import weighted_head_pca
from pipeline.kernels.value_output import ValueOutputProblem, fit_value_output, output_of, value_output_problem
from pipeline.methods.loss_aware.stacks import NO_WIDTHS, Stack, Stacked
from pipeline.methods.method import Ranks, Solution, Weights
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.methods.pairs import carry, complete
from pipeline.methods.tensors import biases_of, encoded_values
from pipeline.methods.work import BASES, Work, directed_output, value_curve
from pipeline.ranks.curves import Point, steps, to_columns, up_to_whole

VALUE, OUTPUT = "value", "output"
CURVE_GAIN = 1e-2  # for curves, a fit stops after an iteration that gains less than this share of the loss


class Heads(NamedTuple):
    """The numbers of query heads and of KV heads, and the width d of a head's values."""

    heads: int
    kv_heads: int
    width: int


class Reduced(NamedTuple):
    """v and o with r numbers per KV head: `encode` (G, r, d), None at full rank; the refitted W_o (D, R), and the
    moment (R, R) of its input.

    The error after W_o's refit is uncorrelated with its input, so the loss of a rank of o adds exactly to the basis's.
    """

    encode: Tensor | None
    output: Tensor
    moment: Tensor


class HeadValues(Stacked):
    """Values of heads with the output projection: fits both at any rank of the basis, and predicts their loss."""

    output_rank: ClassVar[str]  # the name of the projection's rank

    @property
    @abstractmethod
    def block(self) -> AttentionBlock | LatentAttentionBlock:
        """Return the attention block."""

    @property
    @abstractmethod
    def heads(self) -> Heads:
        """Return the heads of the block."""

    @abstractmethod
    def form(self, rank: int) -> FormSpec:
        """Return the form of a matrix in a basis of the values, without a rank of its own."""

    def output_stack(self, rank: int) -> Stack:
        """Return the stack of o at a rank of the values."""
        writer, widths = self.block.writer, {"value_rank": rank} if rank < self.heads.width else NO_WIDTHS
        return self.stack(self.output_rank, (writer.role,), writer.outputs, self.heads.heads * rank, widths)

    def output_points(self, rank: int) -> list[Point]:
        """Return a point for each rank of o at a rank of the values, with the numbers of o without its bias."""
        dropped, losses = self.losses(rank)
        points = self.output_stack(rank).points(losses, self.multiple)
        return [Point({VALUE: rank, **each.ranks}, each.numbers, dropped + each.loss) for each in points]

    @property
    def value_ranks(self) -> list[int]:
        """Return the ranks of the values to compare; each takes the eigenvalues of a D × D matrix."""
        return steps(self.heads.width, self.multiple, count=BASES)

    def cut(self, output_DR: Tensor, moment_RR: Tensor, ranks: Ranks) -> Solution:
        """Cut o, already in the basis, to its own rank."""
        stack, rank, writer = self.output_stack(ranks[VALUE]), ranks[self.output_rank], self.block.writer
        if rank >= stack.full:
            whole = ranks[VALUE] >= self.heads.width
            return Solution({writer.weight_key: output_DR}, {} if whole else {writer.role: self.form(ranks[VALUE])})
        directions = output_directions(output_DR, moment_RR, self._solving_metric)
        first_rR, second_Dr = directions.encode[:rank] @ output_DR, directions.decode[:, :rank]
        return Solution(*stack.store({writer.role: output_DR}, first_rR, second_Dr))

    def reduced(self, rank: int) -> Reduced:
        """Return v and o reduced to a rank."""
        if rank >= self.heads.width:
            return Reduced(None, self._output, self._context)
        fitted = fit_value_output(self._problem, self._start[:, :rank])
        wide_Hdr = repeat_groups(fitted.encode.mT, self.heads.heads)
        half_FR = project_heads(self._context, wide_Hdr)
        output_DR = output_of(self._output, self._problem, fitted)
        return Reduced(fitted.encode, output_DR, project_heads(half_FR.T.contiguous(), wide_Hdr))

    def losses(self, rank: int) -> tuple[float, Tensor]:
        """Return the loss of the basis, in nats per token, and the additional loss of each rank of o."""
        if not self.by_loss:
            reduced = self.reduced(rank)
            directions = output_directions(reduced.output, reduced.moment, self._solving)
            spread_DD = pushforward(reduced.output, reduced.moment)
            return self._dropped(reduced), losses_by_rank(directions, spread_DD, self._metric)
        if rank >= self.heads.width:
            return 0.0, least_losses(self._solving, pushforward(self._output, self._context))
        fitted = fit_value_output(self._problem, self._start[:, :rank], least_gain=CURVE_GAIN)
        return fitted.loss, gram_losses(fitted.outputs, self._problem.scale)

    def _dropped(self, reduced: Reduced) -> float:
        """Return ½ tr(G Δ C Δᵀ)."""
        if reduced.encode is None:
            return 0.0
        wide_Hrd = repeat_groups(reduced.encode, self.heads.heads)
        change_DF = self._output - project_heads(reduced.output, wide_Hrd)
        return max(0.0, change_loss(change_DF, self._context, self._metric))

    @property
    def _output(self) -> Tensor:
        return self.weight(self.block.writer).double()

    @property
    def _context(self) -> Tensor:
        """Return the moment of o's input."""
        return self.mean(input_moment(self.block.writer))

    @property
    def _metric(self) -> Tensor:
        return self.mean(output_gradient(self.block.writer))

    @property
    def _solving_metric(self) -> Tensor:
        """Return the metric of output errors that factors minimise: the gradient's moment, or the identity."""
        metric_DD = self._metric
        return metric_DD if self.by_loss else torch.eye(len(metric_DD), dtype=metric_DD.dtype, device=metric_DD.device)

    @cached_property
    def _solving(self) -> Factored:
        return factored(self._solving_metric)

    @cached_property
    def _problem(self) -> ValueOutputProblem:
        return value_output_problem(self._output, self._solving, self._context)

    @cached_property
    def _start(self) -> Tensor:
        """Return the leading directions of each KV head by itself, from which the joint fit of all heads starts."""
        gram_Gdd = head_moment(self._problem.weighted, self.heads.heads, self.heads.kv_heads, torch.float64)
        context_Gdd = diagonal_blocks(self._context, self.heads.heads, self.heads.kv_heads)
        return weighted_head_pca(context_Gdd, gram_Gdd, self.heads.width)[0]

    def curve_work(self, tokens: int) -> Work:
        """Count the fits at each rank of the values."""
        return value_curve(self.block.writer, self.heads.width, self.multiple)


class Values(HeadValues):
    """Values and output. `moments`: of o's input, and of the gradient at its output."""

    output_rank = OUTPUT

    @property
    def block(self) -> AttentionBlock:
        """Return the attention block."""
        return self.geometry.attention

    @property
    def heads(self) -> Heads:
        """Return the heads of the block."""
        return Heads(self.block.heads, self.block.kv_heads, self.block.head_dim)

    def form(self, rank: int) -> FormSpec:
        """Return the form of v, and of an uncut o."""
        return FormSpec(form="head_pca", rank=rank)

    def other_numbers(self, rank: int) -> int:
        """Count the numbers of v at a rank and of the biases."""
        block = self.block
        return block.kv_heads * rank * (self.geometry.hidden + block.value.bias) + block.writer.biases

    def curve(self) -> Curve:
        """Compare every rank of o at each of a few ranks of the value basis."""
        points = []
        for rank in self.value_ranks:
            others, cache = self.other_numbers(rank), self.heads.kv_heads * rank
            points += [replace(each, numbers=others + each.numbers, cache=cache) for each in self.output_points(rank)]
        return to_columns(up_to_whole(points))

    def least_numbers(self) -> int:
        """Count the numbers stored at the smallest ranks."""
        rank = min(self.multiple, self.heads.width)
        return self.output_stack(rank).least(self.multiple) + self.other_numbers(rank)

    def solve(self, ranks: Ranks) -> Solution:
        """Reduce v and o to a basis of rank `value`, then o to rank `output`."""
        writer = self.block.writer
        if ranks[VALUE] >= self.heads.width and ranks[OUTPUT] >= self.output_stack(ranks[VALUE]).full:
            return self.dense()
        reduced, based = self.based(ranks[VALUE])
        cut = self.cut(reduced.output, reduced.moment, ranks)
        others = {key: tensor for key, tensor in based.tensors.items() if key != writer.weight_key}
        tensors = {**others, **cut.tensors, **biases_of(self.weights, (writer,))}
        return Solution(tensors, based.forms | cut.forms, inputs={writer.role: lambda: reduced.moment})

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Apply the correction of the pair at v's input, with o at full rank, or else the one at o's input."""
        (read, written), (readers, writers) = self.corrections, self.entry.correct_ridges
        if read in self.statistics.moments:
            moved = carry(self.statistics, read, self.weights, (self.block.value,), readers)
            return replace(self, weights=moved.weights).based(ranks[VALUE])[1]
        completed = complete(self.statistics, written, before[self.block.writer.weight_key], writers)
        cut = self.cut(completed.weight, completed.moment, ranks)
        return Solution({**cut.tensors, **biases_of(self.weights, (self.block.writer,))}, cut.forms)

    def based(self, rank: int) -> tuple[Reduced, Solution]:
        """Reduce v and o to a basis of a rank, without cutting o."""
        tensors, (value, writer) = dict(self.weights), self.block.value_output
        reduced = self.reduced(rank)
        if reduced.encode is None:
            return reduced, Solution(tensors, {})
        tensors |= encoded_values(self.weights, value, reduced.encode) | {writer.weight_key: reduced.output}
        return reduced, Solution(tensors, dict.fromkeys(roles_of((value, writer)), self.form(rank)))

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count a fit of values and o, and the cut of o."""
        return directed_output(self.block.writer, self.heads.width)
