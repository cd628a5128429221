"""Values and the output projection: a basis for each KV head, o refitted behind it, then a rank of o.

docs/methods.md#curves.

Legend: D hidden, H query heads, G key/value heads, d head_dim, F = H·d, r directions kept of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve, FormSpec
from pipeline.families.family import LayerGeometry
from pipeline.kernels.heads import by_heads, diagonal_blocks, encode_heads, of_heads
from pipeline.kernels.moments import head_moment
from pipeline.kernels.sensitivity import (
    change_loss,
    factored,
    least_losses,
    least_losses_of,
    losses_by_rank,
    output_directions,
    pushed,
)
from pipeline.kernels.spectra import weighted_head_pca
from pipeline.kernels.value_output import fit_value_output, output_of, value_output_problem
from pipeline.methods.loss_aware.pairs import carry, complete, pair
from pipeline.methods.loss_aware.stacks import Stack, biases_of
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, frontier, steps, to_columns

ROLES = ("v", "o")
VALUE, OUTPUT = "value", "output"
CONTEXT = Moment("o.in")
METRIC = Moment("mid", kind="gradient")
MOMENTS = (CONTEXT, METRIC)
READ, WRITTEN = pair("attention.in"), pair("o.in")
CORRECTIONS = (READ, WRITTEN)
CURVE_GAIN = 1e-2  # of a base's loss: a turn of its fit that gains less is the last in a curve; a solve goes on
BASES = 16  # ranks of the value basis that are compared at most; each takes the eigenvalues of a D × D matrix


class Reduced(NamedTuple):
    """v and o at r numbers a KV head: `encode` (G, r, d), None at the full rank; W_o (D, R) and the moment (R, R) of
    its input behind it. The refit of W_o leaves an error that is uncorrelated with what it reads, so what a rank of o
    costs adds to what the basis costs exactly.
    """

    encode: Tensor | None
    output: Tensor
    moment: Tensor


def curve(entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics) -> Curve:
    """Every rank of o on each of a few ranks of the value basis."""
    fits, options = _Fits(entry, geometry, weights, found), []
    for rank in steps(geometry.head_dim, entry.multiple(geometry.hidden), count=BASES):
        dropped, losses = fits.losses(rank)
        stack = _stack(entry, geometry, rank)
        numbers, cache = _other_numbers(geometry, rank), geometry.kv_heads * rank
        options += [
            Point({VALUE: rank, **point.ranks}, numbers + point.numbers, dropped + point.loss, cache)
            for point in stack.points(losses, entry.multiple(geometry.hidden))
        ]
    return to_columns(frontier(options))


def least_numbers(entry: LossAware, geometry: LayerGeometry) -> int:
    """Stored at the smallest ranks."""
    multiple = entry.multiple(geometry.hidden)
    rank = min(multiple, geometry.head_dim)
    return _stack(entry, geometry, rank).least(multiple) + _other_numbers(geometry, rank)


def solve(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics, ranks: Ranks
) -> Solution:
    """v and o on the basis of rank `value`; then o at rank `output`."""
    rank, stack = ranks[VALUE], _stack(entry, geometry, ranks[VALUE])
    whole_basis, whole_output = rank >= geometry.head_dim, ranks[OUTPUT] >= stack.full
    if whole_basis and whole_output:
        return Solution(dict(weights), {}, {"dense": True})
    reduced, based = _based(entry, geometry, weights, found, rank)
    cut = _cut(entry, geometry, reduced.output, reduced.moment, found, ranks)
    biases = biases_of(weights, ("o",))
    tensors = _without_output(based.tensors) | cut.tensors | biases
    return Solution(tensors, based.forms | cut.forms, inputs={"o": lambda: reduced.moment})


def correct(
    entry: LossAware,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    found: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
) -> Solution:
    """First v and its basis for the input as it now comes, with a full-rank o; then o, by what is missing behind it."""
    if READ in found.moments:
        return _based(entry, geometry, carry(found, READ, weights, ("v",)).weights, found, ranks[VALUE])[1]
    now = complete(found, WRITTEN, before["o.weight"])
    cut = _cut(entry, geometry, now.weight, now.moment, found, ranks)
    return Solution(cut.tensors | biases_of(weights, ("o",)), cut.forms)


def _based(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics, rank: int
) -> tuple[Reduced, Solution]:
    """v and o on the basis of a rank; o is not cut."""
    tensors = dict(weights)
    if rank >= geometry.head_dim:
        return Reduced(None, weights["o.weight"].double(), found.mean(CONTEXT)[0]), Solution(tensors, {})
    reduced = _Fits(entry, geometry, weights, found).reduced(rank)
    assert reduced.encode is not None
    tensors["v.weight"] = encode_heads(reduced.encode, weights["v.weight"])
    if "v.bias" in weights:
        tensors["v.bias"] = encode_heads(reduced.encode, weights["v.bias"][:, None])[:, 0]
    tensors["o.weight"] = reduced.output
    form = FormSpec(form="head_pca", rank=rank)
    return reduced, Solution(tensors, dict.fromkeys(ROLES, form))


def _cut(
    entry: LossAware, geometry: LayerGeometry, output_DR: Tensor, moment_RR: Tensor, found: Statistics, ranks: Ranks
) -> Solution:
    """o behind the basis at its own rank."""
    stack, rank = _stack(entry, geometry, ranks[VALUE]), ranks[OUTPUT]
    if rank >= stack.full:
        basis = FormSpec(form="head_pca", rank=ranks[VALUE])
        return Solution({"o.weight": output_DR}, {"o": basis} if ranks[VALUE] < geometry.head_dim else {})
    directions = output_directions(output_DR, moment_RR, _solving_metric(entry, found.mean(METRIC)[0]))
    first_rR, second_Dr = directions.encode[:rank] @ output_DR, directions.decode[:, :rank]
    return Solution(*stack.store({"o": output_DR}, first_rR, second_Dr))


def _without_output(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "o.weight"}


def _other_numbers(geometry: LayerGeometry, rank: int) -> int:
    """Of v at a rank, and of the biases."""
    rows = geometry.kv_heads * rank
    return rows * (geometry.hidden + ("v" in geometry.biases)) + geometry.hidden * ("o" in geometry.biases)


def _solving_metric(entry: LossAware, metric_DD: Tensor) -> Tensor:
    """What errors of the output are weighed by where factors are chosen: the gradient, or nothing."""
    if entry.weighting == "loss":
        return metric_DD
    return torch.eye(metric_DD.shape[0], dtype=metric_DD.dtype, device=metric_DD.device)


class _Fits:
    """Values and o at any rank of the basis, and what they cost."""

    def __init__(
        self, entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics
    ) -> None:
        self.output_DF, self.heads, self.width = weights["o.weight"].double(), geometry.heads, geometry.head_dim
        self.context_FF, self.metric_DD = found.mean(CONTEXT)[0], found.mean(METRIC)[0]
        self.by_loss = entry.weighting == "loss"
        self.solving = factored(_solving_metric(entry, self.metric_DD))
        self.problem = value_output_problem(self.output_DF, self.solving, self.context_FF)
        # Of each KV head by itself, leading rows first: where the fit of all heads together starts.
        gram_Gdd = head_moment(self.problem.seen, geometry.heads, geometry.kv_heads, torch.float64)
        context_Gdd = diagonal_blocks(self.context_FF, geometry.heads, geometry.kv_heads)
        self.start_Gdd = weighted_head_pca(context_Gdd, gram_Gdd, geometry.head_dim)[0]

    def reduced(self, rank: int) -> Reduced:
        """At a rank."""
        if rank >= self.width:
            return Reduced(None, self.output_DF, self.context_FF)
        fitted = fit_value_output(self.problem, self.start_Gdd[:, :rank])
        wide_Hdr = of_heads(fitted.encode.mT, self.heads)
        half_FR = by_heads(self.context_FF, wide_Hdr)
        output_DR = output_of(self.output_DF, self.problem, fitted)
        return Reduced(fitted.encode, output_DR, by_heads(half_FR.T.contiguous(), wide_Hdr))

    def losses(self, rank: int) -> tuple[float, Tensor]:
        """What the basis costs, in nats per token, and what o does besides by its rank."""
        if not self.by_loss:
            reduced = self.reduced(rank)
            directions = output_directions(reduced.output, reduced.moment, self.solving)
            spread_DD = pushed(reduced.output, reduced.moment)
            return self._dropped(reduced), losses_by_rank(directions, spread_DD, self.metric_DD)
        if rank >= self.width:
            return 0.0, least_losses(self.solving, pushed(self.output_DF, self.context_FF))
        fitted = fit_value_output(self.problem, self.start_Gdd[:, :rank], least_gain=CURVE_GAIN)
        return fitted.loss, least_losses_of(fitted.felt, self.problem.scale)

    def _dropped(self, reduced: Reduced) -> float:
        """½ tr(G Δ C Δᵀ)."""
        if reduced.encode is None:
            return 0.0
        wide_Hrd = of_heads(reduced.encode, self.heads)
        change_DF = self.output_DF - by_heads(reduced.output, wide_Hrd)
        return max(0.0, change_loss(change_DF, self.context_FF, self.metric_DD))


def _stack(entry: LossAware, geometry: LayerGeometry, rank: int) -> Stack:
    widths = {} if rank >= geometry.head_dim else {"value_rank": rank}
    inputs = geometry.heads * rank
    return Stack(OUTPUT, ("o",), geometry.hidden, inputs, geometry.bits, entry.factors == "pivoted", widths)
