"""Values and the output projection: a basis of each KV head's values, o refitted to it, then o cut to a rank.

docs/methods.md#curves.

Legend: D hidden, H query heads, G key/value heads, d head_dim, F = H·d, r kept directions of a head, R = H·r.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import AttentionBlock, Matrix, roles_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.heads import diagonal_blocks, project_heads, repeat_groups
from pipeline.kernels.moments import head_moment
from pipeline.kernels.sensitivity import (
    change_loss,
    factored,
    gram_losses,
    least_losses,
    losses_by_rank,
    output_directions,
    pushforward,
)
from pipeline.kernels.spectra import weighted_head_pca
from pipeline.kernels.value_output import fit_value_output, output_of, value_output_problem
from pipeline.methods.loss_aware.pairs import carry, complete
from pipeline.methods.loss_aware.stacks import Stack
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import input_moment, output_gradient, pair
from pipeline.methods.tensors import biases_of, encoded_values
from pipeline.ranks.curves import Point, steps, to_columns, up_to_whole

VALUE, OUTPUT = "value", "output"
CURVE_GAIN = 1e-2  # for curves, a fit stops after an iteration that gains less than this share of the loss
BASES = 16  # how many ranks of the value basis are compared at most; each takes the eigenvalues of a D × D matrix


class Reduced(NamedTuple):
    """v and o with r numbers per KV head: `encode` (G, r, d), None at full rank; the refitted W_o (D, R), and the
    moment (R, R) of its input.

    The error after W_o's refit is uncorrelated with its input, so the loss of a rank of o adds exactly to the basis's.
    """

    encode: Tensor | None
    output: Tensor
    moment: Tensor


def moments(block: AttentionBlock) -> tuple[Moment, ...]:
    """Return the moments of o's input and of the gradient at its output."""
    return input_moment(block.writer), output_gradient(block.writer)


def corrections(block: AttentionBlock) -> tuple[Moment, ...]:
    """Return the pairs for `correct`, in order: at v's input, and at o's input."""
    return pair(block.input), pair(block.writer.reads)


def curve(entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics) -> Curve:
    """Compare every rank of o at each of a few ranks of the value basis."""
    fits, options = _fits(entry, geometry.attention, weights, statistics), []
    for rank in steps(geometry.attention.head_dim, entry.multiple(geometry.hidden), count=BASES):
        dropped, losses = fits.losses(rank)
        stack = _stack(entry, geometry, rank)
        numbers, cache = _other_numbers(geometry, rank), geometry.attention.kv_heads * rank
        options += [
            Point({VALUE: rank, **point.ranks}, numbers + point.numbers, dropped + point.loss, cache)
            for point in stack.points(losses, entry.multiple(geometry.hidden))
        ]
    return to_columns(up_to_whole(options))


def least_numbers(entry: LossAware, geometry: LayerGeometry) -> int:
    """Count the numbers stored at the smallest ranks."""
    multiple = entry.multiple(geometry.hidden)
    rank = min(multiple, geometry.attention.head_dim)
    return _stack(entry, geometry, rank).least(multiple) + _other_numbers(geometry, rank)


def solve(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics, ranks: Ranks
) -> Solution:
    """Reduce v and o to a basis of rank `value`, then o to rank `output`."""
    rank, stack = ranks[VALUE], _stack(entry, geometry, ranks[VALUE])
    block = geometry.attention
    whole_basis, whole_output = rank >= block.head_dim, ranks[OUTPUT] >= stack.full
    if whole_basis and whole_output:
        return Solution(dict(weights), {}, {"dense": True})
    reduced, based = _based(entry, block, weights, statistics, rank)
    cut = _cut(entry, geometry, reduced.output, reduced.moment, statistics, ranks)
    others = {key: tensor for key, tensor in based.tensors.items() if key != block.writer.weight_key}
    tensors = {**others, **cut.tensors, **biases_of(weights, (block.writer,))}
    return Solution(tensors, based.forms | cut.forms, inputs={block.writer.role: lambda: reduced.moment})


def correct(
    entry: LossAware,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
) -> Solution:
    """Apply the correction of the pair at v's input, with o at full rank, or else the one at o's input."""
    block = geometry.attention
    read, written = corrections(block)
    if read in statistics.moments:
        moved = carry(statistics, read, weights, (block.value,))
        return _based(entry, block, moved.weights, statistics, ranks[VALUE])[1]
    completed = complete(statistics, written, before[block.writer.weight_key])
    cut = _cut(entry, geometry, completed.weight, completed.moment, statistics, ranks)
    return Solution({**cut.tensors, **biases_of(weights, (block.writer,))}, cut.forms)


def _based(
    entry: LossAware, block: AttentionBlock, weights: Mapping[str, Tensor], statistics: Statistics, rank: int
) -> tuple[Reduced, Solution]:
    """Reduce v and o to a basis of a rank, without cutting o."""
    tensors, (value, writer) = dict(weights), block.value_output
    if rank >= block.head_dim:
        moment_FF = statistics.mean(input_moment(writer))[0]
        return Reduced(None, weights[writer.weight_key].double(), moment_FF), Solution(tensors, {})
    reduced = _fits(entry, block, weights, statistics).reduced(rank)
    assert reduced.encode is not None
    tensors |= encoded_values(weights, value, reduced.encode) | {writer.weight_key: reduced.output}
    form = FormSpec(form="head_pca", rank=rank)
    return reduced, Solution(tensors, dict.fromkeys(roles_of(block.value_output), form))


def _cut(
    entry: LossAware,
    geometry: LayerGeometry,
    output_DR: Tensor,
    moment_RR: Tensor,
    statistics: Statistics,
    ranks: Ranks,
) -> Solution:
    """Cut o, already in the basis, to its own rank."""
    stack, rank = _stack(entry, geometry, ranks[VALUE]), ranks[OUTPUT]
    block, writer = geometry.attention, geometry.attention.writer
    if rank >= stack.full:
        basis = FormSpec(form="head_pca", rank=ranks[VALUE])
        forms = {writer.role: basis} if ranks[VALUE] < block.head_dim else {}
        return Solution({writer.weight_key: output_DR}, forms)
    metric_DD = solving_metric(entry, statistics.mean(output_gradient(writer))[0])
    directions = output_directions(output_DR, moment_RR, metric_DD)
    first_rR, second_Dr = directions.encode[:rank] @ output_DR, directions.decode[:, :rank]
    return Solution(*stack.store({writer.role: output_DR}, first_rR, second_Dr))


def _other_numbers(geometry: LayerGeometry, rank: int) -> int:
    """Count the numbers of v at a rank and of the biases."""
    block = geometry.attention
    return block.kv_heads * rank * (geometry.hidden + block.value.bias) + block.writer.biases


def solving_metric(entry: LossAware, metric_DD: Tensor) -> Tensor:
    """Return the metric of output errors that factors minimise: the gradient's moment, or the identity."""
    if entry.weighting == "loss":
        return metric_DD
    return torch.eye(metric_DD.shape[0], dtype=metric_DD.dtype, device=metric_DD.device)


def _fits(entry: LossAware, block: AttentionBlock, weights: Mapping[str, Tensor], statistics: Statistics) -> ValueFits:
    output_DF = weights[block.writer.weight_key]
    return ValueFits(entry, block.writer, Heads(block.heads, block.kv_heads, block.head_dim), output_DF, statistics)


class Heads(NamedTuple):
    """The numbers of query heads and of KV heads, and the width d of a head's values."""

    heads: int
    kv_heads: int
    width: int


class ValueFits:
    """Fits values and o at any rank of the basis, and predicts their loss."""

    def __init__(
        self, entry: LossAware, writer: Matrix, sizes: Heads, output_DF: Tensor, statistics: Statistics
    ) -> None:
        self.output_DF, self.heads, self.width = output_DF.double(), sizes.heads, sizes.width
        self.context_FF = statistics.mean(input_moment(writer))[0]
        self.metric_DD = statistics.mean(output_gradient(writer))[0]
        self.by_loss = entry.weighting == "loss"
        self.solving = factored(solving_metric(entry, self.metric_DD))
        self.problem = value_output_problem(self.output_DF, self.solving, self.context_FF)
        # The joint fit of all heads starts from the leading directions of each KV head by itself.
        gram_Gdd = head_moment(self.problem.weighted, sizes.heads, sizes.kv_heads, torch.float64)
        context_Gdd = diagonal_blocks(self.context_FF, sizes.heads, sizes.kv_heads)
        self.start_Gdd = weighted_head_pca(context_Gdd, gram_Gdd, sizes.width)[0]

    def reduced(self, rank: int) -> Reduced:
        """Return v and o reduced to a rank."""
        if rank >= self.width:
            return Reduced(None, self.output_DF, self.context_FF)
        fitted = fit_value_output(self.problem, self.start_Gdd[:, :rank])
        wide_Hdr = repeat_groups(fitted.encode.mT, self.heads)
        half_FR = project_heads(self.context_FF, wide_Hdr)
        output_DR = output_of(self.output_DF, self.problem, fitted)
        return Reduced(fitted.encode, output_DR, project_heads(half_FR.T.contiguous(), wide_Hdr))

    def losses(self, rank: int) -> tuple[float, Tensor]:
        """Return the loss of the basis, in nats per token, and the additional loss of each rank of o."""
        if not self.by_loss:
            reduced = self.reduced(rank)
            directions = output_directions(reduced.output, reduced.moment, self.solving)
            spread_DD = pushforward(reduced.output, reduced.moment)
            return self._dropped(reduced), losses_by_rank(directions, spread_DD, self.metric_DD)
        if rank >= self.width:
            return 0.0, least_losses(self.solving, pushforward(self.output_DF, self.context_FF))
        fitted = fit_value_output(self.problem, self.start_Gdd[:, :rank], least_gain=CURVE_GAIN)
        return fitted.loss, gram_losses(fitted.outputs, self.problem.scale)

    def _dropped(self, reduced: Reduced) -> float:
        """Return ½ tr(G Δ C Δᵀ)."""
        if reduced.encode is None:
            return 0.0
        wide_Hrd = repeat_groups(reduced.encode, self.heads)
        change_DF = self.output_DF - project_heads(reduced.output, wide_Hrd)
        return max(0.0, change_loss(change_DF, self.context_FF, self.metric_DD))


def _stack(entry: LossAware, geometry: LayerGeometry, rank: int) -> Stack:
    block = geometry.attention
    widths = {} if rank >= block.head_dim else {"value_rank": rank}
    inputs = block.heads * rank
    return Stack(
        OUTPUT, (block.writer.role,), geometry.hidden, inputs, geometry.bits, entry.factors == "pivoted", widths
    )
