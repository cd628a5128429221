"""The MLP: channels removed, gate and up at a joint rank on those that stay, down at a rank.

docs/methods.md#curves. The curve may be cut by widths among workers: `begin` tells in which order channels go, `piece`
what one width loses, `join` makes the points of it. Nothing of a width depends on which others a worker is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from manifests.methods import LossAware
from manifests.records import Curve
from pipeline.families.family import LayerGeometry
from pipeline.kernels.interpolation import interpolated
from pipeline.methods.loss_aware.mlp_sizes import (
    DOWN,
    GATE_UP,
    WIDTH,
    bias_numbers,
    down_stack,
    reader_stack,
    readers,
    told_widths,
    widths_of,
)
from pipeline.methods.loss_aware.mlp_solver import (
    HIDDEN,
    INPUT,
    METRIC,
    REMEMBERED_BYTES,
    Solver,
    gradient_of,
    probed_ranks,
    probed_widths,
    sample_of,
)
from pipeline.methods.loss_aware.pairs import carry, complete, pair
from pipeline.methods.method import Moment, Ranks, Solution, Statistics
from pipeline.ranks.curves import Point, frontier, merged, to_columns

READ, WRITTEN = pair("mlp.in"), pair("down.in")
CORRECTIONS = (READ, WRITTEN)


class Begun(TypedDict):
    """`order`: the channels, those that stay longest first. `losses`: of the widths, ascending, by themselves.
    `probed`: those at which the activation is looked at."""

    order: list[int]
    losses: list[float]
    probed: list[int]


class Piece(TypedDict):
    """Of one width, by rank: what gate and up are predicted to lose, were the activation linear, and down; and by
    share of `PROBES` what gate and up are seen to lose, by that; empty at widths that are not looked at."""

    gate_up: list[float]
    down: list[float]
    bends: list[float]


def roles(geometry: LayerGeometry) -> tuple[str, ...]:
    """(gate), up, down."""
    return (*readers(geometry), "down")


def moments(geometry: LayerGeometry) -> tuple[Moment, ...]:
    """The diagonal suffices for the gradient at gate and up."""
    return (INPUT, HIDDEN, METRIC, sample_of(geometry), *(gradient_of(role) for role in readers(geometry)))


def pieces(entry: LossAware, geometry: LayerGeometry) -> int:
    """Into how many the curve may be cut: one for each width."""
    return len(widths_of(entry, geometry))


def curve(entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics) -> Curve:
    """Ranks of gate/up and of down on each of a few widths. It tells which channels each width keeps."""
    solver = Solver(entry, geometry, weights, found, min(widths_of(entry, geometry)))
    begun = _begun(solver)
    return join(entry, geometry, begun, _pieces(solver, begun, _by_work(entry, geometry)))


def begin(entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics) -> Begun:
    """Eliminates channels. Holds the statistics, and as many numbers again as their largest moment has."""
    return _begun(Solver(entry, geometry, weights, found, min(widths_of(entry, geometry))))


def piece(
    entry: LossAware,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    found: Statistics,
    begun: Begun,
    numbers: Sequence[int],
) -> list[Piece]:
    """Some widths, one after another, by their numbers among `pieces`, which come by the work that they are.

    Holds the statistics, as many numbers again as their largest moment has, and a batch of the sample. What widths
    share is done again for each call: a factor of that moment and the products with it; the elimination is not.
    """
    widths = _by_work(entry, geometry)
    solver = Solver(entry, geometry, weights, found, min(widths), begun["order"])
    return _pieces(solver, begun, [widths[number] for number in numbers])


def join(entry: LossAware, geometry: LayerGeometry, begun: Begun, each: Sequence[Piece]) -> Curve:
    """The points of all widths, from all `pieces` in their order."""
    by_width = dict(zip(_by_work(entry, geometry), each, strict=True))
    points = frontier(list(_options(entry, geometry, begun, by_width)))
    return to_columns(points, told_widths(begun["order"], widths_of(entry, geometry)))


def _begun(solver: Solver) -> Begun:
    widths = widths_of(solver.entry, solver.geometry)
    losses = [float(solver.width_losses[width]) for width in widths]
    return Begun(
        order=solver.priority.tolist(),
        losses=losses,
        probed=probed_widths(solver.entry, solver.geometry, len(solver.sample_TD)),
    )


def _pieces(solver: Solver, begun: Begun, asked: Sequence[int]) -> list[Piece]:
    pruned = dict(zip(widths_of(solver.entry, solver.geometry), begun["losses"], strict=True))
    found = {}
    for width, linear, down in solver.losses(asked, begun["probed"]):
        bends = solver.bends(solver.kept(width), linear, pruned[width]) if width in begun["probed"] else []
        found[width] = Piece(gate_up=linear.tolist(), down=down.tolist(), bends=bends)
    return [found[width] for width in asked]


def _options(entry: LossAware, geometry: LayerGeometry, begun: Begun, each: Mapping[int, Piece]) -> Iterator[Point]:
    multiple = entry.multiple(geometry.hidden)
    for width, loss in zip(widths_of(entry, geometry), begun["losses"], strict=True):
        pruned = Point({WIDTH: width}, bias_numbers(geometry, width), loss)
        upper = reader_stack(entry, geometry, width).points(_bent(geometry, begun, each, width), multiple)
        lower = down_stack(entry, geometry, width).points(_column(each[width]["down"]), multiple)
        yield from merged([pruned], merged(upper, lower))


def _bent(geometry: LayerGeometry, begun: Begun, each: Mapping[int, Piece], width: int) -> Tensor:
    """What gate and up lose by rank: the linear prediction, times what a few ranks are seen to lose by it; at widths
    between those that were looked at, what is in between."""
    linear, ranks = _column(each[width]["gate_up"]), probed_ranks(geometry, width)
    probed = begun["probed"]
    if not probed or not ranks or width > probed[-1]:
        return linear
    known = [width] if width in probed else probed
    seen = torch.stack([_column(each[other]["bends"]) for other in known])
    (by_share,) = interpolated(known, seen, torch.tensor([width]))
    by_place = by_share[list(ranks.values())]
    # Nothing was seen below the smallest of these ranks: there no more is promised than the linear prediction does.
    bends = torch.cat((by_place[:1].clamp_min(1.0), by_place))
    by_rank = linear * interpolated([0, *ranks], bends, torch.arange(len(linear)))
    return by_rank.flip(0).cummax(0).values.flip(0)  # seen costs waver, but a larger rank never costs more


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _by_work(entry: LossAware, geometry: LayerGeometry) -> list[int]:
    """The widths, those first that are looked at where the sample has tokens enough, and of the others the largest."""
    widths = widths_of(entry, geometry)
    probed = probed_widths(entry, geometry)
    return sorted(widths, key=lambda width: (width not in probed, -width))


def least_numbers(entry: LossAware, geometry: LayerGeometry) -> int:
    """Stored at the smallest width and ranks."""
    width, multiple = min(widths_of(entry, geometry)), entry.multiple(geometry.hidden)
    stacks = (reader_stack(entry, geometry, width), down_stack(entry, geometry, width))
    return sum(stack.least(multiple) for stack in stacks) + bias_numbers(geometry, width)


def solve(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics, ranks: Ranks
) -> Solution:
    """Prunes to `width`, refits down, then cuts gate/up and down to their ranks."""
    return next(solve_sizes(entry, geometry, weights, found, [ranks]))


def solve_sizes(
    entry: LossAware, geometry: LayerGeometry, weights: Mapping[str, Tensor], found: Statistics, sizes: Sequence[Ranks]
) -> Iterator[Solution]:
    """As `solve`, one size after another: channels are eliminated down to the least width, and what the dense MLP gives
    of the sample is computed, once."""
    remembered_bytes = REMEMBERED_BYTES if len(sizes) > 1 else 0
    least = min(ranks[WIDTH] for ranks in sizes)
    solver = Solver(entry, geometry, weights, found, least, remembered_bytes=remembered_bytes)
    return (_solution(solver, ranks) for ranks in sizes)


def _solution(solver: Solver, ranks: Ranks) -> Solution:
    entry, geometry, width = solver.entry, solver.geometry, ranks[WIDTH]
    upper, lower = reader_stack(entry, geometry, width), down_stack(entry, geometry, width)
    if width >= geometry.intermediate and ranks[GATE_UP] >= upper.full and ranks[DOWN] >= lower.full:
        return Solution(dict(solver.weights), {}, {"dense": True})
    kept = solver.kept(width)
    read = solver.read(kept, ranks)
    refit_Dk, report = solver.refit(kept)
    moment_kk = solver.moment(kept)
    if ranks[GATE_UP] < upper.full and solver.sees(width):
        again = solver.refit_again(kept, ranks[GATE_UP])
        refit_Dk, moment_kk = again.weight, again.moment
        report = {**report, "refit_tokens": solver.fitted_tokens(width)}
    written = solver.written(refit_Dk, moment_kk, ranks)
    outputs = dict.fromkeys(readers(geometry), kept)
    return Solution(
        read.tensors | written.tensors, read.forms | written.forms, report, {"down": lambda: moment_kk}, outputs
    )


def correct(
    entry: LossAware,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    found: Statistics,
    ranks: Ranks,
    before: Mapping[str, Tensor],
) -> Solution:
    """First gate and up for the input as it now comes, with a full-rank down; then down, by what is missing behind."""
    if READ not in found.moments:
        now = complete(found, WRITTEN, before["down.weight"])
        return Solver(entry, geometry, weights, found, ranks[WIDTH]).written(now.weight, now.moment, ranks)
    moved = carry(found, READ, weights, readers(geometry))
    behind = replace(found, moments={**found.moments, INPUT: moved.moment[None] * found.tokens})
    solver = Solver(entry, geometry, moved.weights, behind, ranks[WIDTH])
    kept = solver.kept(ranks[WIDTH])
    read = solver.read(kept, ranks)
    refit_Dk, report = solver.refit(kept)
    full = {**ranks, DOWN: down_stack(entry, geometry, ranks[WIDTH]).full}
    written = solver.written(refit_Dk, solver.moment(kept), full)
    return Solution(read.tensors | written.tensors, read.forms | written.forms, report)
