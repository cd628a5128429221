"""What a worker has summed of a layer's moments over the shards that it did (docs/methods.md#sums-without-an-order).

Legend: F features, G groups, d = F / heads, b rows of a band.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from manifests.errors import NumericsError
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.kernels.checks import require_finite
from pipeline.kernels.exact_pairs import PairSum, choose_pair_grid
from pipeline.kernels.exact_sums import DiagonalSum, Grid, MomentSum, choose_grid, product_tokens, sample_squares
from pipeline.kernels.gradients import sample_square_norms
from pipeline.methods.method import Moment
from pipeline.units.sums import SUMMED, Collect, CollectDone
from pipeline.units.units import Forward, Summable
from workers.block import Tap, overflow_advice
from workers.tensor_transfer import TensorTransfer

NORMS = "norms-"  # how the names of what is given besides a sum's bands begin


class LayerSums:
    """A worker's sums of passes of shards: a single triangle of each moment, on the device, and which shards.

    While the sums of one pass are given away, in another thread, those of the next are made.
    """

    def __init__(self, transfer: TensorTransfer, device: torch.device, geometry: Geometry) -> None:
        self.transfer = transfer
        self.geometry = geometry
        self.node = platform.node()
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.passes: dict[str, _PassSums] = {}
        self.latest = ""  # the name of the pass that was begun last

    def taps(self, unit: Forward) -> list[tuple[str, Tap]]:
        """What adds a unit's moments, at their points; none for a shard that is in the sums already."""
        add = self.adder(unit)
        if add is None:
            return []
        return [(moment.point, _checked(unit.layer, moment, add)) for moment in _summed(unit)]

    def adder(self, unit: Summable) -> Callable[..., None] | None:
        """What adds the values of a micro-batch, or of a pair both, to a unit's moments; None for a shard that is in
        the sums already.

        Of the passes that were begun before, only the last stays: others were given up.
        """
        if unit.sums is None:
            return None
        moments = _summed(unit)
        if unit.sums.name not in self.passes:
            grids = {moment: Grid.unpacked(self.transfer.get(unit.sums.grids[moment])) for moment in moments}
            for name in self.passes.keys() - {self.latest}:
                self.passes.pop(name, None)
            self.latest = unit.sums.name
            self.passes[unit.sums.name] = _PassSums(grids, self.device, self.geometry.layers[unit.layer])
        passed = self.passes[unit.sums.name]
        return None if unit.shard in passed.shards else passed.add

    @contextmanager
    def adding(self, unit: Summable) -> Iterator[None]:
        """In here a shard goes through: at the end it is in the sums, or there are none any more."""
        passed = None if unit.sums is None else self.passes[unit.sums.name]
        try:
            yield
            if passed is not None:
                passed.end(unit.shard)
        except BaseException:
            if unit.sums is not None:
                self.passes.pop(unit.sums.name, None)
            raise

    def collect(self, unit: Collect) -> CollectDone:
        """Gives the sums of a pass away; beside what is computed, on a stream of its own."""
        passed = self.passes.pop(unit.sums, None)
        if passed is None:
            return CollectDone({}, {}, ())
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.default_stream(self.device))
            partials = {moment: self._cut(passed.named(moment), unit.parts) for moment in unit.moments}
            diagonals = {
                moment: self.transfer.put({"squares": passed.sum_of(moment).squares()}) for moment in unit.moments
            }
        tokens = {moment: passed.tokens.get(moment, 0) for moment in unit.moments}
        return CollectDone(partials, diagonals, tuple(sorted(passed.shards)), self.node, tokens)

    def _cut(self, named: dict[str, Tensor], parts: int) -> tuple[Any, ...]:
        """Handles of parts of much the same size: every worker deals the bands alike, and what else it has last."""
        names = sorted(named)
        dealt = min(parts, sum(not name.startswith(NORMS) for name in names))
        return tuple(self.transfer.put({name: named[name] for name in names[part::dealt]}) for part in range(dealt))


class _PassSums:
    """The sums of one pass, and how many tokens passed the point of each moment. No token may pass a rare one."""

    def __init__(self, grids: dict[Moment, Grid], device: torch.device, layer: LayerGeometry) -> None:
        self.grids = grids
        self.device = device
        self.layer = layer
        self.tokens: dict[Moment, int] = {}
        self.sums: dict[Moment, MomentSum | DiagonalSum | PairSum] = {}
        self.waiting: dict[Moment, list[tuple[Tensor, ...]]] = {}  # rows of the shard at hand, too few for a product
        self.norms: dict[Moment, list[Tensor]] = {}  # of gradients: of the samples (G,) of the shard at hand
        self.norms_of: dict[Moment, dict[int, Tensor]] = {}  # of shards (M, G)
        self.shards: set[int] = set()

    def add(self, moment: Moment, *values: Tensor) -> None:
        """Adds a micro-batch, or keeps it until the shard has enough for a product, or ends: adding to float64 sums
        costs as much for few tokens as for many. `values`: (..., F), of gradients a sample's; of a pair x and e."""
        if moment.kind == "gradient":
            norms_G = sample_square_norms(values[0], moment.heads, moment.groups, moment.diagonal)
            self.norms.setdefault(moment, []).append(norms_G)
        waiting = self.waiting.setdefault(moment, [])
        waiting.append(tuple(each.detach().reshape(-1, each.shape[-1]) for each in values))
        self.tokens[moment] = self.tokens.get(moment, 0) + len(waiting[-1][0])
        if sum(len(rows[0]) for rows in waiting) >= product_tokens(moment.heads, moment.groups):
            self._multiply(moment)

    def end(self, shard: int) -> None:
        """All of a shard is through."""
        for moment in self.waiting:
            self._multiply(moment)
        for moment, norms in self.norms.items():
            self.norms_of.setdefault(moment, {})[shard] = torch.stack(norms)
        self.norms.clear()
        self.shards.add(shard)

    def named(self, moment: Moment) -> dict[str, Tensor]:
        """What is given away of a sum: its bands by their place, and what shards have besides, by the shard."""
        bands = {f"{place:05d}": band for place, band in enumerate(self.sum_of(moment).bands())}
        return bands | {f"{NORMS}{shard:05d}": norms for shard, norms in self.norms_of.get(moment, {}).items()}

    def _multiply(self, moment: Moment) -> None:
        parts, self.waiting[moment] = self.waiting[moment], []
        if not parts:
            return
        total = self.sum_of(moment)
        if isinstance(total, PairSum):
            total.add_(*((values, errors) for values, errors in parts))
        else:
            total.add_(*(values for (values,) in parts))

    def sum_of(self, moment: Moment) -> MomentSum | DiagonalSum | PairSum:
        """Return the sum of a moment; of one whose point no token passed yet, zeros."""
        if moment not in self.sums:
            self.sums[moment] = self._new_sum(moment)
        return self.sums[moment]

    def _new_sum(self, moment: Moment) -> MomentSum | DiagonalSum | PairSum:
        grid, features = self.grids[moment], self.layer.features(moment.point)
        if moment.kind == "pair":
            return PairSum(grid, features, self.device)
        if moment.diagonal:
            return DiagonalSum(grid, moment.heads, self.device)
        return MomentSum(grid, moment.heads, self.device)


class Squares:
    """Sums of squares of a first micro-batch, by which the grids are chosen of sums over `tokens` tokens.

    `silent`: moments of which nothing was seen but zeros.
    """

    def __init__(self, tokens: int, layer: LayerGeometry) -> None:
        self.tokens = tokens
        self.layer = layer
        self.found: dict[Moment, Grid] = {}
        self.silent: set[Moment] = set()

    def taps(self, unit: Forward) -> list[tuple[str, Tap]]:
        """At the points of all moments that are summed."""
        return [(moment.point, _checked(unit.layer, moment, self.see)) for moment in _summed(unit)]

    def see_pair(self, moment: Moment, values: Tensor, errors: Tensor) -> None:
        """Of a pair, whose values are finite."""
        self.found[moment] = choose_pair_grid(values, errors, self.tokens)

    def grids(self, unit: Summable) -> dict[Moment, Grid]:
        """Return the grid of every moment of the unit; a point that no token has passed yet counts as silent."""
        for moment in _summed(unit):
            if moment not in self.found:
                self._see_nothing(moment)
        return self.found

    def _see_nothing(self, moment: Moment) -> None:
        values_1F = torch.zeros(1, self.layer.features(moment.point))
        if moment.kind == "pair":
            self.see_pair(moment, values_1F, torch.zeros(1, self.layer.hidden))
        else:
            self.see(moment, values_1F)

    def see(self, moment: Moment, values: Tensor) -> None:
        """What passes a point; once more for a moment that was silent."""
        if moment in self.found and moment not in self.silent:
            return
        heads_of_a_group = moment.heads // moment.groups
        rows = values.numel() // values.shape[-1] * heads_of_a_group
        squares_Gd = sample_squares(values, moment.heads, moment.groups)
        self.found[moment] = choose_grid(squares_Gd, rows, self.tokens * heads_of_a_group, values.dtype)
        (self.silent.discard if bool(squares_Gd.any()) else self.silent.add)(moment)


def _summed(unit: Summable) -> tuple[Moment, ...]:
    """Those of a unit's moments of which the worker keeps a sum."""
    return tuple(moment for moment in unit.moments if moment.kind in SUMMED)


def _checked(layer: int, moment: Moment, take: Callable[[Moment, Tensor], None]) -> Tap:
    """A tap that takes finite values only. It raises NumericsError, naming layer and point."""

    def see(values: Tensor) -> None:
        try:
            require_finite("values", values)
        except ValueError as error:
            advice = overflow_advice(values.dtype)
            raise NumericsError(f"layer {layer}: activations at {moment.point}: {error}; {advice}") from error
        take(moment, values)

    return see
