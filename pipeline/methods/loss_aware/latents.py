"""Latent attention: narrower latents and a low rank of the output projection. docs/methods.md#latent-attention.

Legend: D hidden, L numbers of a latent, r numbers that stay, R outputs of its writer, K outputs of its reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Latent, LatentAttentionBlock
from pipeline.families.family import LayerGeometry
from pipeline.kernels.latents import narrowed_latent
from pipeline.kernels.sensitivity import (
    Directions,
    factored,
    input_directions,
    least_losses,
    losses_by_rank,
    output_directions,
    pushforward,
)
from pipeline.methods.loss_aware.stacks import Stack
from pipeline.methods.method import Group, Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import input_moment, output_gradient, pull
from pipeline.methods.tensors import biases_of
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, frontier, steps, to_columns

OUTPUT, RANK = "latent_output", "rank"
NORM_EPS = 1e-6  # of the norms of latents, whatever the config's epsilon


def groups(layer: LayerGeometry, output: bool) -> tuple[Group, ...]:
    """Return the groups of a layer's latent attention, with its output projection or without; none of another kind."""
    block = layer.latent_attention
    if block is None:
        return ()
    latents = tuple(Group(layer.index, each.name, each.roles, _moments(each)) for each in block.latents)
    written = input_moment(block.writer), output_gradient(block.writer)
    return (*latents, *((Group(layer.index, OUTPUT, (block.writer.role,), written),) if output else ()))


def is_latent(group: Group, layer: LayerGeometry) -> bool:
    """Tell whether a group is one of latent attention."""
    block = layer.latent_attention
    return block is not None and group.name in (OUTPUT, *(latent.name for latent in block.latents))


def curve(
    entry: LossAware, group: Group, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics
) -> Curve:
    """Return a point for each width of a latent, or rank of the output projection."""
    block = _block(geometry)
    if group.name == OUTPUT:
        return to_columns(frontier(_output_points(entry, block, geometry, weights, statistics)))
    return to_columns(latent_points(entry, _latent(block, group), geometry, weights, statistics))


def latent_points(
    entry: LossAware, latent: Latent, geometry: LayerGeometry, weights: Mapping[str, Tensor], statistics: Statistics
) -> list[Point]:
    """Return a point for each width of a latent."""
    metric_LL, moment_LL = _metric(latent, statistics), statistics.mean(input_moment(latent.reader))[0]
    if entry.weighting == "loss":
        losses = least_losses(moment_LL, metric_LL)
    else:
        losses = losses_by_rank(_directions(entry, latent, weights, statistics), moment_LL, metric_LL)
    passed = latent.writer.outputs - latent.width
    return [
        Point(
            {RANK: rank},
            latent_numbers(latent, rank),
            0.0 if rank == latent.width else float(losses[rank]),
            rank + passed if latent.cached else 0,
        )
        for rank in steps(latent.width, _multiple(entry, latent, geometry))
    ]


def latent_numbers(latent: Latent, width: float) -> int:
    """Count the numbers that a latent's writer, norm and reader store, biases included."""
    written = latent.writer.outputs - latent.width + width
    return round(written * (latent.writer.inputs + latent.writer.bias) + width + latent.reader.outputs * width)


def least_numbers(entry: LossAware, group: Group, geometry: LayerGeometry) -> int:
    """Count the numbers stored at the smallest size of a group."""
    block = _block(geometry)
    if group.name == OUTPUT:
        return _stack(entry, block, geometry).least(entry.multiple(geometry.hidden)) + block.writer.biases
    latent = _latent(block, group)
    return latent_numbers(latent, steps(latent.width, _multiple(entry, latent, geometry))[0])


def variables(group: Group, geometry: LayerGeometry) -> tuple[RankVariable, ...]:
    """Return the width of a latent, by which layers of one width are tied."""
    latent = _latent(_block(geometry), group)
    return (RankVariable(group.layer, group.name, RANK, latent.width, 1, partial(latent_numbers, latent)),)


def solve(
    entry: LossAware,
    group: Group,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    ranks: Ranks,
) -> Solution:
    """Narrow a latent, or cut the output projection to its rank."""
    block, rank = _block(geometry), ranks[RANK]
    if group.name == OUTPUT:
        return _cut(entry, block, geometry, weights, statistics, rank)
    latent = _latent(block, group)
    if rank >= latent.width:
        return Solution(dict(weights), {}, {"dense": True})
    directions = _directions(entry, latent, weights, statistics)
    writer, norm, reader = (f"{role}.weight" for role in latent.roles)
    spread_LL = statistics.mean(_spread(latent))[0, : latent.width, : latent.width]
    parts = narrowed_latent(
        weights[writer],
        weights.get(latent.writer.bias_key),
        weights[norm],
        weights[reader],
        Directions(directions.values, directions.encode[:rank], directions.decode[:, :rank]),
        spread_LL,
        NORM_EPS,
    )
    tensors = {writer: parts.writer, norm: parts.norm, reader: parts.reader}
    tensors |= {latent.writer.bias_key: parts.bias} if parts.bias is not None else {}
    return Solution(tensors, dict.fromkeys(latent.roles, FormSpec(form="narrow", rank=rank)), {"beside": parts.beside})


def _moments(latent: Latent) -> tuple[Moment, ...]:
    """Return the moments of the normed latent, of the loss's gradient there, and of the latent before its norm."""
    return input_moment(latent.reader), pull((latent.reader,)), _spread(latent)


def _spread(latent: Latent) -> Moment:
    return Moment(f"{latent.writer.role}.out")


def _metric(latent: Latent, statistics: Statistics) -> Tensor:
    return statistics.mean(pull((latent.reader,)))[0]


def _directions(entry: LossAware, latent: Latent, weights: Mapping[str, Tensor], statistics: Statistics) -> Directions:
    """Return directions of the normed latent, in the metric of the loss or of its reader's outputs."""
    moment_LL = statistics.mean(input_moment(latent.reader))[0]
    if entry.weighting == "loss":
        return input_directions(moment_LL, _metric(latent, statistics))
    reader_KL = weights[latent.reader.weight_key].double()
    return input_directions(moment_LL, reader_KL.T @ reader_KL)


def _output_points(
    entry: LossAware,
    block: LatentAttentionBlock,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
) -> list[Point]:
    weight_DF, context_FF = weights[block.writer.weight_key], statistics.mean(input_moment(block.writer))[0]
    metric_DD, spread_DD = statistics.mean(output_gradient(block.writer))[0], pushforward(weight_DF, context_FF)
    if entry.weighting == "loss":
        losses = least_losses(factored(metric_DD), spread_DD)
    else:
        losses = losses_by_rank(_output_directions(entry, block, weights, statistics), spread_DD, metric_DD)
    stack = _stack(entry, block, geometry)
    return [
        Point({RANK: point.ranks[stack.name]}, point.numbers + block.writer.biases, point.loss)
        for point in stack.points(losses, entry.multiple(geometry.hidden))
    ]


def _output_directions(
    entry: LossAware, block: LatentAttentionBlock, weights: Mapping[str, Tensor], statistics: Statistics
) -> Directions:
    weight_DF, metric_DD = weights[block.writer.weight_key], statistics.mean(output_gradient(block.writer))[0]
    if entry.weighting == "input":
        metric_DD = torch.eye(len(metric_DD), dtype=metric_DD.dtype, device=metric_DD.device)
    return output_directions(weight_DF, statistics.mean(input_moment(block.writer))[0], metric_DD)


def _cut(
    entry: LossAware,
    block: LatentAttentionBlock,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    rank: int,
) -> Solution:
    stack, writer = _stack(entry, block, geometry), block.writer
    if rank >= stack.full:
        return Solution(dict(weights), {}, {"dense": True})
    weight_DF = weights[writer.weight_key].double()
    directions = _output_directions(entry, block, weights, statistics)
    first_rF, second_Dr = directions.encode[:rank] @ weight_DF, directions.decode[:, :rank]
    tensors, forms = stack.store({writer.role: weight_DF}, first_rF, second_Dr)
    return Solution(tensors | biases_of(weights, (writer,)), forms)


def _stack(entry: LossAware, block: LatentAttentionBlock, geometry: LayerGeometry) -> Stack:
    """Return the stack of the output projection, whose tensors lie below its own module."""
    writer = block.writer
    return Stack(writer.role, (writer.role,), writer.outputs, writer.inputs, geometry.bits, entry.factors == "pivoted")


def _multiple(entry: LossAware, latent: Latent, geometry: LayerGeometry) -> int:
    """Return the number of which widths are multiples."""
    multiple = entry.multiple(geometry.hidden)
    return multiple if multiple % latent.step == 0 else multiple * latent.step


def _block(geometry: LayerGeometry) -> LatentAttentionBlock:
    block = geometry.latent_attention
    assert block is not None
    return block


def _latent(block: LatentAttentionBlock, group: Group) -> Latent:
    return next(latent for latent in block.latents if latent.name == group.name)
