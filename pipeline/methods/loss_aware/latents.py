"""Latent attention: narrower latents, fewer values per head, and a rank of the output projection.

docs/methods.md#latent-attention.

Legend: D hidden, L numbers of a latent, r kept numbers, H heads, n keys and v values of a head, F = H·v, K outputs of
the latent's reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve, FormSpec
from pipeline.families.blocks import Latent, LatentAttentionBlock
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.narrow_latent import narrowed_latent
from pipeline.kernels.sensitivity import Directions, input_directions, least_losses, losses_by_rank
from pipeline.methods.loss_aware.attention import VALUE, Heads, HeadValues
from pipeline.methods.loss_aware.stacks import Stacked
from pipeline.methods.method import Moment, Ranks, Solution, Weights
from pipeline.methods.moments import input_moment, output_gradient, pair, pull
from pipeline.methods.pairs import carry, complete
from pipeline.methods.tensors import biases_of
from pipeline.methods.work import Work, directed_output, directed_stack, direction_losses, directions
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import Point, frontier, steps, to_columns, up_to_whole

VALUES = "latent_values"  # the group of the cached latent, its values, and the output projection
LATENT = "latent"  # the rank of a latent
WIDTHS = 64  # how many widths of a latent are compared at most
NORM_EPS = 1e-6  # epsilon of the norms of latents, which the config does not set


def latent_groups(
    entry: LossAware, layer: LayerGeometry, output: bool, corrects: bool = False
) -> Iterator[NarrowLatent]:
    """Yield the groups of a layer's latent attention, if it has one.

    `output`: put the latent of keys and values into one group with the output projection, whose rank and values can be
    cut. `corrects`: correct groups at the input of the latents' writers, and at that of the output projection.
    """
    block = layer.latent_attention
    if block is None:
        return
    written = input_moment(block.writer), output_gradient(block.writer)
    read, mixed = ((pair(block.input),), (pair(block.writer.reads),)) if corrects else ((), ())
    for latent in block.latents:
        moments = input_moment(latent.reader), pull((latent.reader,)), _spread(latent)
        if latent.cached and output:
            roles = (*latent.roles, block.writer.role)
            yield LatentValues(entry, layer, VALUES, roles, (*moments, *written), (*read, *mixed))
        else:
            yield NarrowLatent(entry, layer, latent.name, latent.roles, moments, read)


class NarrowLatent(Stacked):
    """A latent, which may become narrower."""

    @property
    def block(self) -> LatentAttentionBlock:
        """Return the attention block."""
        block = self.geometry.latent_attention
        assert block is not None
        return block

    @property
    def latent(self) -> Latent:
        """Return the latent."""
        return next(latent for latent in self.block.latents if {*latent.roles} <= {*self.roles})

    def numbers(self, width: float) -> int:
        """Count the numbers that the latent's writer, norm and reader store, biases included."""
        writer, reader, whole = self.latent.writer, self.latent.reader, self.latent.width
        written = writer.outputs - whole + width
        return round(written * (writer.inputs + writer.bias) + width + reader.outputs * width)

    @property
    def widths(self) -> list[int]:
        """Return the widths to compare."""
        step, multiple = self.latent.step, self.multiple
        return steps(self.latent.width, multiple if multiple % step == 0 else multiple * step, WIDTHS)

    def variables(self) -> tuple[RankVariable, ...]:
        """Return the width, by which layers of one width are tied with `shapes: stock`."""
        if self.entry.shapes != "stock":
            return ()
        return (self.variable(LATENT, self.latent.width, self.numbers, multiple=1),)

    def least_numbers(self) -> int:
        """Count the numbers stored at the smallest width."""
        return self.numbers(self.widths[0])

    def curve(self) -> Curve:
        """Return a point for each width."""
        return to_columns(self.points())

    def points(self) -> list[Point]:
        """Return a point for each width of the latent."""
        latent = self.latent
        metric_LL, moment_LL = self._pulled, self.mean(input_moment(latent.reader))
        if self.by_loss:
            losses = least_losses(moment_LL, metric_LL)
        else:
            losses = losses_by_rank(self._directions(), moment_LL, metric_LL)
        passed = latent.writer.outputs - latent.width
        return [
            Point(
                {LATENT: rank},
                self.numbers(rank),
                0.0 if rank == latent.width else float(losses[rank]),
                rank + passed if latent.cached else 0,
            )
            for rank in self.widths
        ]

    def solve(self, ranks: Ranks) -> Solution:
        """Narrow the latent."""
        return self.narrowed(ranks[LATENT])

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Apply the correction of the pair at the latent's input."""
        return self.carried().solve(ranks)

    def carried(self) -> Self:
        """Return the group with its writer fitted to the compressed model's inputs."""
        readers, _ = self.entry.correct_ridges
        moved = carry(self.statistics, self.corrections[0], self.weights, (self.latent.writer,), readers)
        return replace(self, weights=moved.weights)

    def narrowed(self, rank: int, values: int | None = None) -> Solution:
        """Narrow the latent. `values`: the number of values of each head, if the reader has already been cut to
        fewer."""
        latent, weights, bias = self.latent, self.weights, self.latent.writer.bias_key
        writer, norm, reader = (f"{role}.weight" for role in latent.roles)
        form = FormSpec(form="narrow", rank=rank, value_rank=values)
        if rank >= latent.width:
            kept = {key: weights[key] for key in (writer, bias, norm, reader) if key in weights}
            forms = {} if values is None else dict.fromkeys(latent.roles, form)
            return Solution(kept, forms, {} if forms else {"dense": True})
        directions = self._directions()
        parts = narrowed_latent(
            weights[writer],
            weights.get(bias),
            weights[norm],
            weights[reader],
            Directions(directions.values, directions.encode[:rank], directions.decode[:, :rank]),
            self.mean(_spread(latent))[: latent.width, : latent.width],
            NORM_EPS,
        )
        tensors = {writer: parts.writer, norm: parts.norm, reader: parts.reader}
        tensors |= {bias: parts.bias} if parts.bias is not None else {}
        inputs = {latent.reader.role: lambda: parts.read @ self.mean(input_moment(latent.reader)) @ parts.read.T}
        return Solution(tensors, dict.fromkeys(latent.roles, form), {"beside": parts.beside}, inputs=inputs)

    @property
    def _pulled(self) -> Tensor:
        return self.mean(pull((self.latent.reader,)))

    def _directions(self) -> Directions:
        """Return the directions of the normed latent, in the metric of the loss or of the reader's outputs."""
        moment_LL = self.mean(input_moment(self.latent.reader))
        if self.by_loss:
            return input_directions(moment_LL, self._pulled)
        reader_KL = self.weight(self.latent.reader).double()
        return input_directions(moment_LL, reader_KL.T @ reader_KL)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the directions of the latent, and its stored form."""
        outputs = sum(self.geometry.weight_shape(role)[0] for role in self.roles)
        return directed_stack(outputs, self.latent.width)

    def curve_work(self, tokens: int) -> Work:
        """Count the losses of all widths."""
        return direction_losses(self.latent.width)


class LatentValues(NarrowLatent, HeadValues):
    """The latent of keys and values, with the values of the heads and the output projection."""

    output_rank = "o_proj"  # a pivoted form is stored under the name of its rank

    @property
    def heads(self) -> Heads:
        """Return the heads, each with values of its own."""
        return Heads(self.block.heads, self.block.heads, self.block.value_width)

    def form(self, rank: int) -> FormSpec:
        """Return the form of an uncut o."""
        return FormSpec(form="narrow", value_rank=rank)

    def curve(self) -> Curve:
        """Return a point for each width, value width and rank of the output projection."""
        biases = self.block.writer.biases
        choices = [
            replace(choice, numbers=choice.numbers + biases)
            for values in self.value_ranks
            for choice in frontier(self.output_points(values))
        ]
        return to_columns(up_to_whole([self._joined(point, choice) for point in self.points() for choice in choices]))

    def _joined(self, point: Point, choice: Point) -> Point:
        """Combine a width of the latent with a choice of values and output."""
        numbers = point.numbers + choice.numbers - self._removed(point.ranks[LATENT], choice.ranks[VALUE])
        return Point({**point.ranks, **choice.ranks}, numbers, point.loss + choice.loss, point.cache)

    def _removed(self, width: int, values: int) -> int:
        """Count the numbers of the value rows that the latent's reader no longer has."""
        return width * self.block.heads * (self.block.value_width - values)

    def least_numbers(self) -> int:
        """Count the numbers stored at the smallest size."""
        width, values = self.widths[0], min(self.multiple, self.block.value_width)
        stored = self.output_stack(values).least(self.multiple) + self.block.writer.biases
        return self.numbers(width) - self._removed(width, values) + stored

    def solve(self, ranks: Ranks) -> Solution:
        """Narrow the latent, reduce the values to a basis, and cut the output projection to its rank."""
        writer, reader, values = self.block.writer, self.latent.reader, ranks[VALUE]
        reduced = self.reduced(values)
        if reduced.encode is None:
            solution = self.narrowed(ranks[LATENT])
        else:
            encoded_KL = _encoded(self.block, self.weight(reader).double(), reduced.encode)
            weights = {**self.weights, reader.weight_key: encoded_KL}
            solution = replace(self, weights=weights).narrowed(ranks[LATENT], values)
        cut = self.cut(reduced.output, reduced.moment, ranks)
        whole = {} if cut.forms else {writer.weight_key: self.weight(writer)}
        tensors = {**solution.tensors, **cut.tensors, **whole, **biases_of(self.weights, (writer,))}
        forms = {**solution.forms, **cut.forms}
        report = {} if forms else {"dense": True}
        inputs = {**solution.inputs, writer.role: lambda: reduced.moment}
        return Solution(tensors, forms, {**solution.report, **report}, inputs=inputs)

    def correct(self, ranks: Ranks, before: Weights) -> Solution:
        """Apply the correction of the pair at the latent's input, with the output projection at full rank, or else the
        one at the output projection's input."""
        read, mixed = self.corrections
        if read in self.statistics.moments:
            return self.carried().solve({**ranks, self.output_rank: self.output_stack(ranks[VALUE]).full})
        completed = complete(self.statistics, mixed, before[self.block.writer.weight_key], self.entry.correct_ridges[1])
        cut = self.cut(completed.weight, completed.moment, ranks)
        return Solution({**cut.tensors, **biases_of(self.weights, (self.block.writer,))}, cut.forms)

    def solve_work(self, tokens: int, hinted: bool = False) -> Work:
        """Count the directions of the latent, a fit of values and o, and the cut of o."""
        return directions(self.latent.width) + directed_output(self.block.writer, self.heads.width)

    def curve_work(self, tokens: int) -> Work:
        """Count the fits at each rank of the values."""
        return HeadValues.curve_work(self, tokens)


def _encoded(block: LatentAttentionBlock, reader_KL: Tensor, encode_Hrv: Tensor) -> Tensor:
    """Return the reader of keys and values with E V_h, r values per head, in place of the v of V_h."""
    by_head_HXL = reader_KL.unflatten(0, (block.heads, -1))
    keys_HnL, values_HvL = by_head_HXL.split([block.key_width, block.value_width], dim=1)
    return torch.cat((keys_HnL, encode_Hrv @ values_HvL), dim=1).flatten(0, 1)


def _spread(latent: Latent) -> Moment:
    """Return the moment of a latent before its norm."""
    return Moment(f"{latent.writer.role}.out")
