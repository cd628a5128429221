"""Latent attention: narrower latents, fewer values per head, and a rank of the output projection.

docs/methods.md#latent-attention.

Legend: D hidden, L numbers of a latent, r kept numbers, H heads, n keys and v values of a head, F = H·v, K outputs of
the latent's reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Latent, LatentAttentionBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.narrow_latent import narrowed_latent
from pipeline.kernels.sensitivity import (
    Directions,
    input_directions,
    least_losses,
    losses_by_rank,
    output_directions,
)
from pipeline.methods.loss_aware.attention import BASES, Heads, ValueFits, solving_metric
from pipeline.methods.loss_aware.pairs import carry, complete
from pipeline.methods.loss_aware.stacks import Stack
from pipeline.methods.method import Group, Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import input_moment, output_gradient, pair, pull
from pipeline.methods.tensors import biases_of
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, frontier, steps, to_columns, up_to_whole

VALUES = "latent_values"  # the group of the cached latent, its values, and the output projection
LATENT, VALUE, OUTPUT = "latent", "value", "o_proj"  # ranks; a pivoted form is stored under the name of its rank
WIDTHS = 64  # how many widths of a latent are compared at most
NORM_EPS = 1e-6  # epsilon of the norms of latents, which the config does not set
Weights = Mapping[str, Tensor]


def groups(layer: LayerGeometry, output: bool, corrects: bool = False) -> tuple[Group, ...]:
    """Return the groups of a layer's latent attention, or none.

    `output`: put the latent of keys and values into one group with the output projection, whose rank and values can be
    cut. `corrects`: correct groups at the input of the latents' writers, and at that of the output projection.
    """
    block = layer.latent_attention
    if block is None:
        return ()
    written = input_moment(block.writer), output_gradient(block.writer)
    read, mixed = ((pair(block.input),), (pair(block.writer.reads),)) if corrects else ((), ())
    return tuple(
        Group(layer.index, VALUES, (*latent.roles, block.writer.role), (*_moments(latent), *written), (*read, *mixed))
        if latent.cached and output
        else Group(layer.index, latent.name, latent.roles, _moments(latent), read)
        for latent in block.latents
    )


def is_latent(group: Group, layer: LayerGeometry) -> bool:
    """Return True if a group belongs to latent attention."""
    block = layer.latent_attention
    return block is not None and group.name in (VALUES, *(latent.name for latent in block.latents))


def curve(entry: LossAware, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics) -> Curve:
    """Return a point for each width of a latent; with the output projection, for each width, value width and rank."""
    points = _latent_points(entry, _latent(geometry, group), geometry, weights, statistics)
    if group.name != VALUES:
        return to_columns(points)
    block = _block(geometry)
    choices = [*_value_points(entry, block, geometry, weights, statistics)]
    return to_columns(up_to_whole([_joined(block, point, choice) for point in points for choice in choices]))


def _joined(block: LatentAttentionBlock, point: Point, choice: Point) -> Point:
    """Combine a width of the latent with a choice of values and output. The latent's reader has fewer value rows."""
    removed = point.ranks[LATENT] * block.heads * (block.value_width - choice.ranks[VALUE])
    numbers = point.numbers + choice.numbers - removed
    return Point({**point.ranks, **choice.ranks}, numbers, point.loss + choice.loss, point.cache)


def least_numbers(entry: LossAware, group: Group, geometry: LayerGeometry) -> int:
    """Count the numbers stored at the smallest size of a group."""
    latent, block = _latent(geometry, group), _block(geometry)
    width = steps(latent.width, _multiple(entry, latent, geometry), WIDTHS)[0]
    if group.name != VALUES:
        return latent_numbers(latent, width)
    multiple = entry.multiple(geometry.hidden)
    values = min(multiple, block.value_width)
    stored = _stack(entry, block, geometry, values).least(multiple) + block.writer.biases
    return latent_numbers(latent, width) - width * block.heads * (block.value_width - values) + stored


def latent_numbers(latent: Latent, width: float) -> int:
    """Count the numbers that a latent's writer, norm and reader store, biases included."""
    written = latent.writer.outputs - latent.width + width
    return round(written * (latent.writer.inputs + latent.writer.bias) + width + latent.reader.outputs * width)


def variables(group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
    """Return a latent's width as a variable, by which layers of one width are tied."""
    latent = _latent(geometry, group)
    return (RankVariable(group.layer, group.name, LATENT, latent.width, 1, partial(latent_numbers, latent)),)


def solve(
    entry: LossAware, group: Group, geometry: LayerGeometry, weights: Weights, statistics: Statistics, ranks: Ranks
) -> Solution:
    """Narrow a latent; with the output projection, also reduce the values to a basis and the projection to its rank."""
    latent = _latent(geometry, group)
    if group.name != VALUES:
        return _narrowed(entry, latent, weights, statistics, ranks[LATENT], None)
    block = _block(geometry)
    values = ranks[VALUE]
    stack = _stack(entry, block, geometry, values)
    reduced = _fits(entry, block, weights, statistics).reduced(values)
    encode_Hrv = reduced.encode
    if encode_Hrv is not None:
        reader = latent.reader.weight_key
        weights = {**weights, reader: _encoded(block, weights[reader].double(), encode_Hrv)}
    solution = _narrowed(entry, latent, weights, statistics, ranks[LATENT], None if encode_Hrv is None else values)
    writer = block.writer
    cut = _cut(entry, block, stack, reduced.output, reduced.moment, statistics, ranks)
    whole = {} if cut.forms else {writer.weight_key: weights[writer.weight_key]}
    tensors = {**solution.tensors, **cut.tensors, **whole, **biases_of(weights, (writer,))}
    forms = {**solution.forms, **cut.forms}
    report = {} if forms else {"dense": True}
    inputs = {**solution.inputs, writer.role: lambda: reduced.moment}
    return Solution(tensors, forms, {**solution.report, **report}, inputs=inputs)


def correct(
    entry: LossAware,
    group: Group,
    geometry: LayerGeometry,
    weights: Weights,
    statistics: Statistics,
    ranks: Ranks,
    before: Weights,
) -> Solution:
    """Apply the correction of the pair at the latent's input, with the output projection at full rank, or else the one
    at the output projection's input.
    """
    block, latent = _block(geometry), _latent(geometry, group)
    read, mixed = pair(block.input), pair(block.writer.reads)
    if read in statistics.moments:
        moved = carry(statistics, read, weights, (latent.writer,)).weights
        full = {**ranks, OUTPUT: _stack(entry, block, geometry, ranks[VALUE]).full} if group.name == VALUES else ranks
        return solve(entry, group, geometry, moved, statistics, full)
    completed = complete(statistics, mixed, before[block.writer.weight_key])
    stack = _stack(entry, block, geometry, ranks[VALUE])
    cut = _cut(entry, block, stack, completed.weight, completed.moment, statistics, ranks)
    return Solution({**cut.tensors, **biases_of(weights, (block.writer,))}, cut.forms)


def _cut(
    entry: LossAware,
    block: LatentAttentionBlock,
    stack: Stack,
    output_DF: Tensor,
    moment_FF: Tensor,
    statistics: Statistics,
    ranks: Ranks,
) -> Solution:
    """Cut the output projection, whose values are already reduced, to its rank."""
    writer, rank = block.writer, ranks[OUTPUT]
    if rank < stack.full:
        metric_DD = solving_metric(entry, statistics.mean(output_gradient(writer))[0])
        directions = output_directions(output_DF, moment_FF, metric_DD)
        first_rF, second_Dr = directions.encode[:rank] @ output_DF, directions.decode[:, :rank]
        return Solution(*stack.store({writer.role: output_DF}, first_rF, second_Dr))
    narrow = FormSpec(form="narrow", value_rank=ranks[VALUE])
    return Solution({writer.weight_key: output_DF}, {writer.role: narrow} if ranks[VALUE] < block.value_width else {})


def _latent_points(
    entry: LossAware, latent: Latent, geometry: LayerGeometry, weights: Weights, statistics: Statistics
) -> list[Point]:
    metric_LL, moment_LL = _metric(latent, statistics), statistics.mean(input_moment(latent.reader))[0]
    if entry.weighting == "loss":
        losses = least_losses(moment_LL, metric_LL)
    else:
        losses = losses_by_rank(_directions(entry, latent, weights, statistics), moment_LL, metric_LL)
    passed = latent.writer.outputs - latent.width
    return [
        Point(
            {LATENT: rank},
            latent_numbers(latent, rank),
            0.0 if rank == latent.width else float(losses[rank]),
            rank + passed if latent.cached else 0,
        )
        for rank in steps(latent.width, _multiple(entry, latent, geometry), WIDTHS)
    ]


def _value_points(
    entry: LossAware, block: LatentAttentionBlock, geometry: LayerGeometry, weights: Weights, statistics: Statistics
) -> Iterator[Point]:
    """Yield a point for each width of the values and rank of the output projection, with the projection's numbers."""
    fits, multiple = _fits(entry, block, weights, statistics), entry.multiple(geometry.hidden)
    for values in steps(block.value_width, multiple, count=BASES):
        dropped, losses = fits.losses(values)
        stack = _stack(entry, block, geometry, values)
        points = [
            Point({VALUE: values, **point.ranks}, point.numbers, dropped + point.loss)
            for point in stack.points(losses, multiple)
        ]
        for point in frontier(points):
            yield Point(point.ranks, point.numbers + block.writer.biases, point.loss)


def _narrowed(
    entry: LossAware, latent: Latent, weights: Weights, statistics: Statistics, rank: int, values: int | None
) -> Solution:
    """Narrow a latent. `values`: the number of values of each head, if the reader has already been cut to fewer."""
    writer, norm, reader = (f"{role}.weight" for role in latent.roles)
    kept = {key: weights[key] for key in (writer, latent.writer.bias_key, norm, reader) if key in weights}
    if rank >= latent.width:
        forms = (
            {} if values is None else dict.fromkeys(latent.roles, FormSpec(form="narrow", rank=rank, value_rank=values))
        )
        return Solution(kept, forms, {} if forms else {"dense": True})
    directions = _directions(entry, latent, weights, statistics)
    parts = narrowed_latent(
        weights[writer],
        weights.get(latent.writer.bias_key),
        weights[norm],
        weights[reader],
        Directions(directions.values, directions.encode[:rank], directions.decode[:, :rank]),
        statistics.mean(_spread(latent))[0, : latent.width, : latent.width],
        NORM_EPS,
    )
    tensors = {writer: parts.writer, norm: parts.norm, reader: parts.reader}
    tensors |= {latent.writer.bias_key: parts.bias} if parts.bias is not None else {}
    form, read = FormSpec(form="narrow", rank=rank, value_rank=values), input_moment(latent.reader)
    inputs = {latent.reader.role: lambda: parts.read @ statistics.mean(read)[0] @ parts.read.T}
    return Solution(tensors, dict.fromkeys(latent.roles, form), {"beside": parts.beside}, inputs=inputs)


def _encoded(block: LatentAttentionBlock, reader_KL: Tensor, encode_Hrv: Tensor) -> Tensor:
    """Return the reader of keys and values with E V_h, r values per head, in place of the v of V_h."""
    by_head_HXL = reader_KL.unflatten(0, (block.heads, -1))
    keys_HnL, values_HvL = by_head_HXL.split([block.key_width, block.value_width], dim=1)
    return torch.cat((keys_HnL, encode_Hrv @ values_HvL), dim=1).flatten(0, 1)


def _fits(entry: LossAware, block: LatentAttentionBlock, weights: Weights, statistics: Statistics) -> ValueFits:
    sizes = Heads(block.heads, block.heads, block.value_width)
    return ValueFits(entry, block.writer, sizes, weights[block.writer.weight_key], statistics)


def _stack(entry: LossAware, block: LatentAttentionBlock, geometry: LayerGeometry, values: int) -> Stack:
    """Return the stack of the output projection."""
    writer = block.writer
    widths = {} if values >= block.value_width else {"value_rank": values}
    inputs, pivoted = block.heads * values, entry.factors == "pivoted"
    return Stack(writer.role, (writer.role,), writer.outputs, inputs, geometry.bits, pivoted, widths)


def _moments(latent: Latent) -> tuple[Moment, ...]:
    """Return the moments of the normed latent, of the gradient at it, and of the latent before its norm."""
    return input_moment(latent.reader), pull((latent.reader,)), _spread(latent)


def _spread(latent: Latent) -> Moment:
    return Moment(f"{latent.writer.role}.out")


def _metric(latent: Latent, statistics: Statistics) -> Tensor:
    return statistics.mean(pull((latent.reader,)))[0]


def _directions(entry: LossAware, latent: Latent, weights: Weights, statistics: Statistics) -> Directions:
    """Return the directions of the normed latent, in the metric of the loss or of the reader's outputs."""
    moment_LL = statistics.mean(input_moment(latent.reader))[0]
    if entry.weighting == "loss":
        return input_directions(moment_LL, _metric(latent, statistics))
    reader_KL = weights[latent.reader.weight_key].double()
    return input_directions(moment_LL, reader_KL.T @ reader_KL)


def _multiple(entry: LossAware, latent: Latent, geometry: LayerGeometry) -> int:
    """Return the multiple of all widths."""
    multiple = entry.multiple(geometry.hidden)
    return multiple if multiple % latent.step == 0 else multiple * latent.step


def _block(geometry: LayerGeometry) -> LatentAttentionBlock:
    block = geometry.latent_attention
    assert block is not None
    return block


def _latent(geometry: LayerGeometry, group: Group) -> Latent:
    latents = _block(geometry).latents
    return next(latent for latent in latents if {*latent.roles} <= {*group.roles})
