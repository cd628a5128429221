"""An MLP: channels are removed, then the readers are cut to a joint rank and the writer to its own rank.

docs/methods.md#curves. Workers can share the curve by widths; the result of a width does not depend on the other widths
of its worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.blocks import MLPBlock, roles_of
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.interpolation import interpolate
from pipeline.methods.loss_aware.mlp_sample import routing_sample, sample_of
from pipeline.methods.loss_aware.mlp_sizes import WIDTH, Sizes, encode_widths
from pipeline.methods.loss_aware.mlp_solver import CACHE_BYTES, Solver
from pipeline.methods.method import Ranks, Solution, Weights
from pipeline.methods.moments import input_moment, output_gradient, pair
from pipeline.methods.pairs import carry, complete
from pipeline.methods.work import Work, elimination, is_narrow, mlp_curve, mlp_fit, spectra
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


def mlp_group(entry: LossAware, layer: LayerGeometry, block: MLPBlock, corrects: bool) -> MLP:
    """Return the group of an MLP. It has a piece of its curve for each width.

    `corrects`: correct it at the readers, and at the writer.
    """
    whole = (input_moment(block.readers[0]), input_moment(block.writer), output_gradient(block.writer))
    samples = (sample_of(block), routing_sample(block)) if block.routing else (sample_of(block),)
    moments = (*whole, *samples, *map(output_gradient, block.readers))
    pairs = (pair(block.input), pair(block.writer.reads)) if corrects else ()
    group = MLP(entry, layer, block.name, block.roles, moments, pairs)
    return replace(group, pieces=len(group.widths))


class MLP(Sizes):
    """An MLP or an expert."""

    def least_numbers(self) -> int:
        """Count the numbers stored at the smallest width and ranks."""
        width = min(self.widths)
        stacks = (self.reader_stack(width), self.writer_stack(width))
        return sum(stack.least(self.multiple) for stack in stacks) + self.bias_numbers_at(width)

    # -- the curve ---------------------------------------------------------------------------------------------------

    def curve(self) -> Curve:
        """Compare ranks of the readers and of the writer at each of a few widths.

        The curve's hint encodes the channels that each width keeps.
        """
        solver = Solver(self, min(self.widths))
        elimination = _eliminated(solver)
        return self.join_curve(elimination, _pieces(solver, elimination, self._by_work()))

    def begin_curve(self) -> EliminatedChannels:
        """Eliminate channels down to the smallest width."""
        return _eliminated(Solver(self, min(self.widths)))

    def curve_pieces(self, shared: EliminatedChannels, numbers: Sequence[int]) -> list[Piece]:
        """Return the pieces of some widths, given by their positions in order of work.

        A worker needs at most a copy of their largest moment, and a batch of the sample. Each call repeats the work
        that widths share (a factor of that moment, and products with it), but not the elimination.
        """
        widths = self._by_work()
        return _pieces(Solver(self, min(widths), shared["order"]), shared, [widths[number] for number in numbers])

    def join_curve(self, shared: EliminatedChannels, pieces: Sequence[Piece]) -> Curve:
        """Return the points of all widths, from all pieces in order."""
        by_width = dict(zip(self._by_work(), pieces, strict=True))
        points = up_to_whole([*self._points(shared, by_width), self.dense_point()])
        return to_columns(points, encode_widths(shared["order"], self.widths))

    def dense_point(self) -> Point:
        """Return the dense MLP, which loses nothing."""
        width = self.mlp.width
        stacks = (self.reader_stack(width), self.writer_stack(width))
        numbers = sum(stack.numbers(stack.full) for stack in stacks) + self.bias_numbers_at(width)
        return Point({WIDTH: width, **{stack.name: stack.full for stack in stacks}}, numbers, 0.0)

    def _points(self, elimination: EliminatedChannels, by_width: Mapping[int, Piece]) -> Iterator[Point]:
        for width, loss in zip(self.widths, elimination["losses"], strict=True):
            pruned = Point({WIDTH: width}, self.bias_numbers_at(width), loss)
            losses = self._reader_losses(elimination, by_width, width)
            readers = self.reader_stack(width).points(losses, self.multiple)
            writer = self.writer_stack(width).points(_column(by_width[width]["writer"]), self.multiple)
            yield from merged([pruned], merged(readers, writer))

    def _reader_losses(self, elimination: EliminatedChannels, by_width: Mapping[int, Piece], width: int) -> Tensor:
        """Predict the loss of the readers at each rank: the linear prediction, times the bend measured at a few ranks.

        Bends are interpolated between the probed widths.
        """
        linear, ranks = _column(by_width[width]["readers"]), self.probed_ranks(width)
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

    def _by_work(self) -> list[int]:
        """Return the widths in descending order of work: those to probe first, and within each part the largest
        first."""
        probed = self.probed_widths()
        return sorted(self.widths, key=lambda width: (width not in probed, -width))

    # -- solutions ---------------------------------------------------------------------------------------------------

    def solve(self, ranks: Ranks) -> Solution:
        """Return the factors at chosen ranks."""
        return next(self.solve_sizes([ranks]))

    def solve_sizes(self, sizes: Sequence[Ranks]) -> Iterator[Solution]:
        """Prune to the `width` of each size, refit the writer, then cut readers and writer to their ranks.

        Channels are eliminated once, down to the least width; the outputs of the dense MLP on the sample are computed
        once.
        """
        least, cache_bytes = min(ranks[WIDTH] for ranks in sizes), CACHE_BYTES if len(sizes) > 1 else 0
        solver = Solver(self, least, cache_bytes=cache_bytes)
        return (self._solution(solver, ranks) for ranks in sizes)

    def _solution(self, solver: Solver, ranks: Ranks) -> Solution:
        block, width, full_rank = self.mlp, ranks[WIDTH], self.reader_stack(ranks[WIDTH]).full
        full_writer = ranks[block.writer_group] >= self.writer_stack(width).full
        if width >= block.width and ranks[block.reader_group] >= full_rank and full_writer:
            return self.dense()
        kept = solver.kept(width)
        read = solver.read(kept, ranks)
        refit_Dk, moment_kk, report = self._refit(solver, kept, ranks)
        written = solver.written(refit_Dk, moment_kk, ranks)
        inputs, outputs = {block.writer.role: lambda: moment_kk}, dict.fromkeys(roles_of(block.readers), kept)
        return Solution({**read.tensors, **written.tensors}, read.forms | written.forms, report, inputs, outputs)

    def _refit(self, solver: Solver, kept_k: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the writer fitted to the dense MLP's outputs, the moment of its inputs, and figures for the report."""
        refit_Dk, report = solver.refit(kept_k)
        cut = ranks[self.mlp.reader_group] < self.reader_stack(ranks[WIDTH]).full
        if not (cut and solver.has_tokens_for(ranks[WIDTH])):
            return refit_Dk, solver.moment(kept_k), report
        on_sample = solver.refit_on_sample(kept_k, ranks[self.mlp.reader_group])
        return on_sample.weight, on_sample.moment, {**report, "refit_tokens": solver.fitted_tokens(ranks[WIDTH])}

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Apply the correction of the pair at the readers, with the writer at full rank, or else the one at the
        writer.

        The writer is first fitted on the dense model's inputs, as without corrections. Readers that are fitted to the
        compressed inputs give it about the same channels.
        """
        block, (read_pair, written_pair) = self.mlp, self.corrections
        readers, writers = self.entry.correct_ridges
        if read_pair not in self.statistics.moments:
            solver = Solver(self, ranks[WIDTH])
            others_kk = solver.others_moment(ranks[WIDTH])
            completed = complete(self.statistics, written_pair, before[block.writer.weight_key], writers, others_kk)
            return solver.written(completed.weight, completed.moment, ranks)
        dense = Solver(self, ranks[WIDTH])
        kept = dense.kept(ranks[WIDTH])
        refit_Dk, moment_kk, report = self._refit(dense, kept, ranks)
        moved = carry(self.statistics, read_pair, self.weights, block.readers, readers)
        statistics = self.statistics.with_mean(input_moment(block.readers[0]), moved.moment[None])
        solver = Solver(self.with_data(moved.weights, statistics), ranks[WIDTH])
        read = solver.read(kept, ranks)
        full = {**ranks, block.writer_group: self.writer_stack(ranks[WIDTH]).full}
        written = solver.written(refit_Dk, moment_kk, full)
        return Solution({**read.tensors, **written.tensors}, read.forms | written.forms, report)

    # -- work --------------------------------------------------------------------------------------------------------

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the fit on the sample, the eigenproblems of inputs and outputs, and the elimination, unless the kept
        channels are known."""
        block, (read, _, written, sample, *_) = self.mlp, self.moments
        fit = mlp_fit(block, min(sample.tokens, tokens))
        if not is_narrow(block):
            fit += spectra((read, written), self.geometry)
        return fit if hinted else fit + elimination(block)

    def curve_work(self, tokens: int) -> Work:
        """Count the curve with its pieces."""
        return mlp_curve(self.mlp, self.pieces, min(sample_of(self.mlp).tokens, tokens))


def _eliminated(solver: Solver) -> EliminatedChannels:
    losses = [float(solver.width_losses[width]) for width in solver.sizes.widths]
    probed = solver.sizes.probed_widths(len(solver.sample.inputs))
    return EliminatedChannels(order=solver.priority.tolist(), losses=losses, probed=probed)


def _pieces(solver: Solver, elimination: EliminatedChannels, widths: Sequence[int]) -> list[Piece]:
    pruned = dict(zip(solver.sizes.widths, elimination["losses"], strict=True))
    by_width = {}
    for width, linear, writer in solver.losses(widths, elimination["probed"]):
        bends = solver.bends(solver.kept(width), linear, pruned[width]) if width in elimination["probed"] else []
        by_width[width] = Piece(readers=linear.tolist(), writer=writer.tolist(), bends=bends)
    return [by_width[width] for width in widths]


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
