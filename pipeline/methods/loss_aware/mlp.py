"""An MLP: channels are removed, then the readers are cut to a joint rank and the writer to its own rank.

docs/methods.md#curves. Workers can share the curve by widths: `begin` orders the channels, `piece` computes the losses
of some widths, and `join` returns the points. A width's result does not depend on the other widths of its worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from manifests.records import Curve
from pipeline.families.blocks import MLPBlock, roles_of
from pipeline.kernels.interpolation import interpolate
from pipeline.methods.loss_aware.mlp_sample import probed_ranks, probed_widths, routing_sample, sample_of
from pipeline.methods.loss_aware.mlp_sizes import WIDTH, Sizes, encode_widths
from pipeline.methods.loss_aware.mlp_solver import CACHE_BYTES, Solver
from pipeline.methods.loss_aware.pairs import carry, complete
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import input_moment, output_gradient, pair
from pipeline.ranks.curves import Point, merged, to_columns, up_to_whole


class EliminatedChannels(TypedDict):
    """The elimination of channels.

    `order`: the channels, the last removed first. `losses`: those of the widths without cut ranks, by ascending width.
    `probed`: the widths at which the sample is run through the activation.
    """

    order: list[int]
    losses: list[float]
    probed: list[int]


class Piece(TypedDict):
    """Predicted losses at one width by rank: those of the readers, assuming a linear activation, and of the writer.

    `bends`: for each of `PROBES`, the measured loss over the readers' predicted one; empty at widths without a probe.
    """

    readers: list[float]
    writer: list[float]
    bends: list[float]


def moments(block: MLPBlock) -> tuple[Moment, ...]:
    """Return the moments and samples that curve and solution need."""
    whole = (input_moment(block.readers[0]), input_moment(block.writer), output_gradient(block.writer))
    samples = (sample_of(block), routing_sample(block)) if block.routing else (sample_of(block),)
    return (*whole, *samples, *map(output_gradient, block.readers))


def corrections(block: MLPBlock) -> tuple[Moment, ...]:
    """Return the pairs for `correct`, in order: at the readers, and at the writer."""
    return pair(block.input), pair(block.writer.reads)


def pieces(sizes: Sizes) -> int:
    """Return the number of pieces of the curve: one for each width."""
    return len(sizes.widths)


def curve(sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics) -> Curve:
    """Compare ranks of the readers and of the writer at each of a few widths.

    The curve's hint encodes the channels that each width keeps.
    """
    solver = Solver(sizes, weights, statistics, min(sizes.widths))
    elimination = _eliminated(solver)
    return join(sizes, elimination, _pieces(solver, elimination, _by_work(sizes)))


def begin(sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics) -> EliminatedChannels:
    """Eliminate channels. Memory: the statistics and one copy of their largest moment."""
    return _eliminated(Solver(sizes, weights, statistics, min(sizes.widths)))


def piece(
    sizes: Sizes,
    weights: Mapping[str, Tensor],
    statistics: Statistics,
    elimination: EliminatedChannels,
    numbers: Sequence[int],
) -> list[Piece]:
    """Compute the losses of the widths with these `numbers`, one width after another.

    Memory: the statistics, one copy of their largest moment, and a batch of the sample. Each call repeats the work that
    widths share (a factor of that moment, and products with it), but not the elimination.
    """
    widths = _by_work(sizes)
    solver = Solver(sizes, weights, statistics, min(widths), elimination["order"])
    return _pieces(solver, elimination, [widths[number] for number in numbers])


def join(sizes: Sizes, elimination: EliminatedChannels, pieces: Sequence[Piece]) -> Curve:
    """Return the points of all widths, from all pieces in order."""
    by_width = dict(zip(_by_work(sizes), pieces, strict=True))
    points = up_to_whole([*_options(sizes, elimination, by_width), dense_point(sizes)])
    return to_columns(points, encode_widths(elimination["order"], sizes.widths))


def dense_point(sizes: Sizes) -> Point:
    """Return the dense MLP, which loses nothing."""
    width = sizes.block.width
    stacks = (sizes.reader_stack(width), sizes.writer_stack(width))
    numbers = sum(stack.numbers(stack.full) for stack in stacks) + sizes.bias_numbers(width)
    return Point({WIDTH: width, **{stack.name: stack.full for stack in stacks}}, numbers, 0.0)


def _eliminated(solver: Solver) -> EliminatedChannels:
    losses = [float(solver.width_losses[width]) for width in solver.sizes.widths]
    probed = probed_widths(solver.sizes, len(solver.sample.inputs))
    return EliminatedChannels(order=solver.priority.tolist(), losses=losses, probed=probed)


def _pieces(solver: Solver, elimination: EliminatedChannels, widths: Sequence[int]) -> list[Piece]:
    pruned = dict(zip(solver.sizes.widths, elimination["losses"], strict=True))
    by_width = {}
    for width, linear, writer in solver.losses(widths, elimination["probed"]):
        bends = solver.bends(solver.kept(width), linear, pruned[width]) if width in elimination["probed"] else []
        by_width[width] = Piece(readers=linear.tolist(), writer=writer.tolist(), bends=bends)
    return [by_width[width] for width in widths]


def _options(sizes: Sizes, elimination: EliminatedChannels, by_width: Mapping[int, Piece]) -> Iterator[Point]:
    for width, loss in zip(sizes.widths, elimination["losses"], strict=True):
        pruned = Point({WIDTH: width}, sizes.bias_numbers(width), loss)
        losses = _reader_losses(sizes.block, elimination, by_width, width)
        readers = sizes.reader_stack(width).points(losses, sizes.multiple)
        writer = sizes.writer_stack(width).points(_column(by_width[width]["writer"]), sizes.multiple)
        yield from merged([pruned], merged(readers, writer))


def _reader_losses(
    block: MLPBlock, elimination: EliminatedChannels, by_width: Mapping[int, Piece], width: int
) -> Tensor:
    """Predict the loss of the readers at each rank: the linear prediction, times the bend measured at a few ranks.

    Bends are interpolated between the probed widths.
    """
    linear, ranks = _column(by_width[width]["readers"]), probed_ranks(block, width)
    probed = elimination["probed"]
    if not probed or not ranks or width > probed[-1]:
        return linear
    measured_at = [width] if width in probed else probed
    measured = torch.stack([_column(by_width[other]["bends"]) for other in measured_at])
    (by_share,) = interpolate(measured_at, measured, torch.tensor([width]))
    by_place = by_share[list(ranks.values())]
    # Below the smallest measured rank, predict no less than the linear prediction.
    bends = torch.cat((by_place[:1].clamp_min(1.0), by_place))
    by_rank = linear * interpolate([0, *ranks], bends, torch.arange(len(linear)))
    return by_rank.flip(0).cummax(0).values.flip(0)  # measured losses are noisy, but a larger rank never loses more


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _by_work(sizes: Sizes) -> list[int]:
    """Return the widths in descending order of work: those to probe first, and within each part the largest first."""
    probed = probed_widths(sizes)
    return sorted(sizes.widths, key=lambda width: (width not in probed, -width))


def least_numbers(sizes: Sizes) -> int:
    """Count the numbers stored at the smallest width and ranks."""
    width = min(sizes.widths)
    stacks = (sizes.reader_stack(width), sizes.writer_stack(width))
    return sum(stack.least(sizes.multiple) for stack in stacks) + sizes.bias_numbers(width)


def solve(
    sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics, choices: Sequence[Ranks]
) -> Iterator[Solution]:
    """Prune to each choice's `width`, refit the writer, then cut readers and writer to their ranks.

    Channels are eliminated once, down to the least width; the outputs of the dense MLP on the sample are computed once.
    """
    cache_bytes = CACHE_BYTES if len(choices) > 1 else 0
    least = min(ranks[WIDTH] for ranks in choices)
    solver = Solver(sizes, weights, statistics, least, cache_bytes=cache_bytes)
    return (_solution(solver, ranks) for ranks in choices)


def _solution(solver: Solver, ranks: Ranks) -> Solution:
    sizes, block, width = solver.sizes, solver.block, ranks[WIDTH]
    full_rank = sizes.reader_stack(width).full
    full_ranks = ranks[block.reader_group] >= full_rank and ranks[block.writer_group] >= sizes.writer_stack(width).full
    if width >= block.width and full_ranks:
        return Solution(dict(solver.weights), {}, {"dense": True})
    kept = solver.kept(width)
    read = solver.read(kept, ranks)
    refit_Dk, report = solver.refit(kept)
    moment_kk = solver.moment(kept)
    if ranks[block.reader_group] < full_rank and solver.has_tokens_for(width):
        on_sample = solver.refit_on_sample(kept, ranks[block.reader_group])
        refit_Dk, moment_kk = on_sample.weight, on_sample.moment
        report = {**report, "refit_tokens": solver.fitted_tokens(width)}
    written = solver.written(refit_Dk, moment_kk, ranks)
    inputs, outputs = {block.writer.role: lambda: moment_kk}, dict.fromkeys(roles_of(block.readers), kept)
    return Solution({**read.tensors, **written.tensors}, read.forms | written.forms, report, inputs, outputs)


def correct(
    sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics, ranks: Ranks, before: Mapping[str, Tensor]
) -> Solution:
    """Apply the correction of the pair at the readers, with the writer at full rank, or else the one at the writer."""
    block = sizes.block
    read_pair, written_pair = corrections(block)
    if read_pair not in statistics.moments:
        solver = Solver(sizes, weights, statistics, ranks[WIDTH])
        others_kk = solver.others_moment(ranks[WIDTH])
        completed = complete(statistics, written_pair, before[block.writer.weight_key], others_kk)
        return solver.written(completed.weight, completed.moment, ranks)
    moved = carry(statistics, read_pair, weights, block.readers)
    compressed_statistics = statistics.with_mean(input_moment(block.readers[0]), moved.moment[None])
    solver = Solver(sizes, moved.weights, compressed_statistics, ranks[WIDTH])
    kept = solver.kept(ranks[WIDTH])
    read = solver.read(kept, ranks)
    refit_Dk, report = solver.refit(kept)
    full = {**ranks, block.writer_group: sizes.writer_stack(ranks[WIDTH]).full}
    written = solver.written(refit_Dk, solver.moment(kept), full)
    return Solution({**read.tensors, **written.tensors}, read.forms | written.forms, report)
