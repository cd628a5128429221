"""An MLP: channels are removed, then the readers are cut to a joint rank and the writer to a rank of its own.

docs/methods.md#curves. The curve may be cut by widths among workers: `begin` tells in which order channels go, `piece`
what one width loses, `join` makes the points of it. Nothing of a width depends on which others a worker is given.
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
from pipeline.methods.loss_aware.mlp_solver import REMEMBERED_BYTES, Solver
from pipeline.methods.loss_aware.pairs import carry, complete
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.methods.moments import input_moment, output_gradient, pair
from pipeline.ranks.curves import Point, frontier, merged, to_columns


class Begun(TypedDict):
    """The channels in `order`, the last removed first; the `losses` of the widths alone, ascending; and the widths at
    which a sample is `probed` through the activation."""

    order: list[int]
    losses: list[float]
    probed: list[int]


class Piece(TypedDict):
    """Predicted losses at one width by rank: those of the readers, assuming a linear activation, and of down.

    `bends`: for each of `PROBES`, the measured loss over the readers' predicted one; empty at widths without a probe.
    """

    gate_up: list[float]
    down: list[float]
    bends: list[float]


def moments(block: MLPBlock) -> tuple[Moment, ...]:
    """Return the moments and the sample that curve and solution need."""
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
    """Compare ranks of the readers and of the writer on each of a few widths.

    The curve's hint encodes the channels that each width keeps.
    """
    solver = Solver(sizes, weights, statistics, min(sizes.widths))
    begun = _begun(solver)
    return join(sizes, begun, _pieces(solver, begun, _by_work(sizes)))


def begin(sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics) -> Begun:
    """Eliminate channels. Takes memory for the statistics and one copy of their largest moment."""
    return _begun(Solver(sizes, weights, statistics, min(sizes.widths)))


def piece(
    sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics, begun: Begun, numbers: Sequence[int]
) -> list[Piece]:
    """Compute some widths, one after another, by their numbers among `pieces`, in descending order of work.

    Takes memory for the statistics, one copy of their largest moment, and a batch of the sample. Each call repeats the
    work that widths share (a factor of that moment, and products with it), but not the elimination.
    """
    widths = _by_work(sizes)
    solver = Solver(sizes, weights, statistics, min(widths), begun["order"])
    return _pieces(solver, begun, [widths[number] for number in numbers])


def join(sizes: Sizes, begun: Begun, each: Sequence[Piece]) -> Curve:
    """Return the points of all widths, from all `pieces` in order."""
    by_width = dict(zip(_by_work(sizes), each, strict=True))
    points = frontier(list(_options(sizes, begun, by_width)))
    return to_columns(points, encode_widths(begun["order"], sizes.widths))


def _begun(solver: Solver) -> Begun:
    losses = [float(solver.width_losses[width]) for width in solver.sizes.widths]
    probed = probed_widths(solver.sizes, len(solver.sample.inputs))
    return Begun(order=solver.priority.tolist(), losses=losses, probed=probed)


def _pieces(solver: Solver, begun: Begun, widths: Sequence[int]) -> list[Piece]:
    pruned = dict(zip(solver.sizes.widths, begun["losses"], strict=True))
    by_width = {}
    for width, linear, down in solver.losses(widths, begun["probed"]):
        bends = solver.bends(solver.kept(width), linear, pruned[width]) if width in begun["probed"] else []
        by_width[width] = Piece(gate_up=linear.tolist(), down=down.tolist(), bends=bends)
    return [by_width[width] for width in widths]


def _options(sizes: Sizes, begun: Begun, each: Mapping[int, Piece]) -> Iterator[Point]:
    for width, loss in zip(sizes.widths, begun["losses"], strict=True):
        pruned = Point({WIDTH: width}, sizes.bias_numbers(width), loss)
        upper = sizes.reader_stack(width).points(_bent(sizes.block, begun, each, width), sizes.multiple)
        lower = sizes.writer_stack(width).points(_column(each[width]["down"]), sizes.multiple)
        yield from merged([pruned], merged(upper, lower))


def _bent(block: MLPBlock, begun: Begun, each: Mapping[int, Piece], width: int) -> Tensor:
    """Predict the loss of the readers by rank: the linear prediction, times the bend measured at a few ranks.

    Bends are interpolated between the probed widths.
    """
    linear, ranks = _column(each[width]["gate_up"]), probed_ranks(block, width)
    probed = begun["probed"]
    if not probed or not ranks or width > probed[-1]:
        return linear
    near = [width] if width in probed else probed
    measured = torch.stack([_column(each[other]["bends"]) for other in near])
    (by_share,) = interpolate(near, measured, torch.tensor([width]))
    by_place = by_share[list(ranks.values())]
    # Nothing was measured below the smallest of these ranks: predict no less than the linear prediction there.
    bends = torch.cat((by_place[:1].clamp_min(1.0), by_place))
    by_rank = linear * interpolate([0, *ranks], bends, torch.arange(len(linear)))
    return by_rank.flip(0).cummax(0).values.flip(0)  # measured losses are noisy, but a larger rank never loses more


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _by_work(sizes: Sizes) -> list[int]:
    """Return the widths: first those to probe, if the sample has enough tokens, then the others, the largest first."""
    probed = probed_widths(sizes)
    return sorted(sizes.widths, key=lambda width: (width not in probed, -width))


def least_numbers(sizes: Sizes) -> int:
    """Count the numbers stored at the smallest width and ranks."""
    width = min(sizes.widths)
    stacks = (sizes.reader_stack(width), sizes.writer_stack(width))
    return sum(stack.least(sizes.multiple) for stack in stacks) + sizes.bias_numbers(width)


def solve(
    sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics, each: Sequence[Ranks]
) -> Iterator[Solution]:
    """Prune to `width`, refit the writer, then cut readers and writer to their ranks; one solution for each of `each`.

    Channels are eliminated once, down to the least width; the outputs of the dense MLP on the sample are computed once.
    """
    remembered_bytes = REMEMBERED_BYTES if len(each) > 1 else 0
    least = min(ranks[WIDTH] for ranks in each)
    solver = Solver(sizes, weights, statistics, least, remembered_bytes=remembered_bytes)
    return (_solution(solver, ranks) for ranks in each)


def _solution(solver: Solver, ranks: Ranks) -> Solution:
    sizes, block, width = solver.sizes, solver.block, ranks[WIDTH]
    upper, lower = sizes.reader_stack(width), sizes.writer_stack(width)
    full_ranks = ranks[block.reader_group] >= upper.full and ranks[block.writer_group] >= lower.full
    if width >= block.width and full_ranks:
        return Solution(dict(solver.weights), {}, {"dense": True})
    kept = solver.kept(width)
    read = solver.read(kept, ranks)
    refit_Dk, report = solver.refit(kept)
    moment_kk = solver.moment(kept)
    if ranks[block.reader_group] < upper.full and solver.sees(width):
        again = solver.refit_again(kept, ranks[block.reader_group])
        refit_Dk, moment_kk = again.weight, again.moment
        report = {**report, "refit_tokens": solver.fitted_tokens(width)}
    written = solver.written(refit_Dk, moment_kk, ranks)
    inputs, outputs = {block.writer.role: lambda: moment_kk}, dict.fromkeys(roles_of(block.readers), kept)
    return Solution({**read.tensors, **written.tensors}, read.forms | written.forms, report, inputs, outputs)


def correct(
    sizes: Sizes, weights: Mapping[str, Tensor], statistics: Statistics, ranks: Ranks, before: Mapping[str, Tensor]
) -> Solution:
    """Fit the readers to the compressed model's inputs, with a full writer; then fit the writer to the remaining
    error."""
    block = sizes.block
    read_pair, written_pair = corrections(block)
    if read_pair not in statistics.moments:
        now = complete(statistics, written_pair, before[block.writer.weight_key])
        return Solver(sizes, weights, statistics, ranks[WIDTH]).written(now.weight, now.moment, ranks)
    moved = carry(statistics, read_pair, weights, block.readers)
    behind = statistics.with_mean(input_moment(block.readers[0]), moved.moment[None])
    solver = Solver(sizes, moved.weights, behind, ranks[WIDTH])
    kept = solver.kept(ranks[WIDTH])
    read = solver.read(kept, ranks)
    refit_Dk, report = solver.refit(kept)
    full = {**ranks, block.writer_group: sizes.writer_stack(ranks[WIDTH]).full}
    written = solver.written(refit_Dk, solver.moment(kept), full)
    return Solution({**read.tensors, **written.tensors}, read.forms | written.forms, report)
