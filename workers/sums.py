"""Sums a layer's moments over the shards of a worker (docs/methods.md#sums-without-an-order).

Legend: F features, G groups, d = F / heads, b rows of a band.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from manifests.errors import NumericsError
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.checks import require_finite
from pipeline.kernels.exact_pairs import PairSum, choose_pair_grid
from pipeline.kernels.exact_sums import DiagonalSum, Grid, MomentSum, choose_grid, product_tokens, sample_squares
from pipeline.kernels.gradients import sample_square_norms
from pipeline.methods.method import Moment
from pipeline.methods.products import summing
from pipeline.units.sums import SUMMED, Collect, CollectDone
from pipeline.units.units import Summable
from workers.tapped_layer import Taps, overflow_advice
from workers.tensor_transfer import TensorTransfer

NORMS = "norms-"  # prefix of the names of samples' norms, which travel with the bands of a sum


class LayerSums:
    """A worker's sums of the current pass: one triangle of each moment, on the device, and the shards in it.

    Another thread collects the sums of one pass while those of the next are computed.
    """

    def __init__(self, transfer: TensorTransfer, device: torch.device, hidden_size: int) -> None:
        self.transfer = transfer
        self.hidden_size = hidden_size
        self.node = platform.node()
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.passes: dict[str, _PassSums] = {}
        self.latest = ""  # name of the latest pass

    def taps(self, unit: Summable) -> Taps:
        """Return taps that add a unit's moments; none if the sums already contain its shard."""
        add = self.adder(unit)
        return [] if add is None else _taps(unit, add)

    def adder(self, unit: Summable) -> Callable[..., None] | None:
        """Return a function that adds a micro-batch to a moment; None if the sums already contain the unit's shard.

        The first unit of a pass discards all passes but the latest: they were abandoned.
        """
        if unit.sums is None:
            return None
        moments = _summed(unit)
        if unit.sums.name not in self.passes:
            grids = {moment: Grid.unpacked(self.transfer.get(unit.sums.grids[moment])) for moment in moments}
            for name in self.passes.keys() - {self.latest}:
                self.passes.pop(name, None)
            self.latest = unit.sums.name
            self.passes[unit.sums.name] = _PassSums(grids, self.device, self.hidden_size)
        passed = self.passes[unit.sums.name]
        return None if unit.shard in passed.shards else passed.add

    @contextmanager
    def adding(self, unit: Summable) -> Iterator[None]:
        """Return a context in which a shard is added. An exception discards the sums, which may contain part of it."""
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
        """Return the sums of a pass and drop them, on a separate CUDA stream, parallel to computation."""
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
        """Put a sum in parts of similar size; return their handles. All workers split the bands in the same way."""
        names = sorted(named)
        count = min(parts, sum(not name.startswith(NORMS) for name in names))
        return tuple(self.transfer.put({name: named[name] for name in names[part::count]}) for part in range(count))


class _PassSums:
    """The sums of one pass, and the number of tokens at the point of each moment, which may be 0."""

    def __init__(self, grids: dict[Moment, Grid], device: torch.device, hidden_size: int) -> None:
        self.grids = grids
        self.device = device
        self.hidden_size = hidden_size
        self.tokens: dict[Moment, int] = {}
        self.sums: dict[Moment, MomentSum | DiagonalSum | PairSum] = {}
        self.waiting: dict[Moment, list[tuple[Tensor, ...]]] = {}  # rows of the current shard, too few for a product
        self.norms: dict[Moment, list[Tensor]] = {}  # of gradients: of each sample (G,) of the current shard
        self.norms_of: dict[Moment, dict[int, Tensor]] = {}  # shard -> (M, G)
        self.shards: set[int] = set()

    def add(self, moment: Moment, *values: Tensor) -> None:
        """Add a micro-batch. `values`: (..., F); for gradients, of one sample; for a pair, x and e.

        Rows are buffered until there are enough for a product, or until the shard ends, because adding to float64 sums
        costs as much for few tokens as for many.
        """
        if moment.kind == "gradient":
            self.norms.setdefault(moment, []).append(_norms(moment, values[0]))
        waiting = self.waiting.setdefault(moment, [])
        if not values[0].numel():
            return
        waiting.append(tuple(each.detach().reshape(-1, each.shape[-1]) for each in values))
        self.tokens[moment] = self.tokens.get(moment, 0) + len(waiting[-1][0])
        if sum(len(rows[0]) for rows in waiting) >= product_tokens(moment.heads, moment.groups):
            self._multiply(moment)

    def end(self, shard: int) -> None:
        """Finish a shard: add the buffered rows."""
        for moment in self.waiting:
            self._multiply(moment)
        for moment, norms in self.norms.items():
            self.norms_of.setdefault(moment, {})[shard] = torch.stack(norms)
        self.norms.clear()
        self.shards.add(shard)

    def named(self, moment: Moment) -> dict[str, Tensor]:
        """Return the bands of a sum, named by their index, and the norms of gradients, named by their shard."""
        bands = {f"{index:05d}": band for index, band in enumerate(self.sum_of(moment).bands())}
        return bands | {f"{NORMS}{shard:05d}": norms for shard, norms in self.norms_of.get(moment, {}).items()}

    def _multiply(self, moment: Moment) -> None:
        parts, self.waiting[moment] = self.waiting[moment], []
        if not parts:
            return
        total = self.sum_of(moment)
        dtype = reduce(torch.promote_types, (values.dtype for part in parts for values in part))
        with summing(dtype, self.device):
            if isinstance(total, PairSum):
                total.add_(*((values, errors) for values, errors in parts))
            else:
                total.add_(*(values for (values,) in parts))

    def sum_of(self, moment: Moment) -> MomentSum | DiagonalSum | PairSum:
        """Return the sum of a moment, which is zero if no token has passed its point yet."""
        if moment not in self.sums:
            self.sums[moment] = self._new_sum(moment)
        return self.sums[moment]

    def _new_sum(self, moment: Moment) -> MomentSum | DiagonalSum | PairSum:
        grid = self.grids[moment]
        if moment.kind == "pair":  # a compressed layer may have fewer features at a point than the dense one
            return PairSum(grid, grid.exponents.shape[1] - self.hidden_size, self.device)
        if moment.diagonal:
            return DiagonalSum(grid, moment.heads, self.device)
        return MomentSum(grid, moment.heads, self.device)


def _norms(moment: Moment, values_SF: Tensor) -> Tensor:
    """Return the squared norms (G,) of a sample's sums: zeros for a diagonal moment, which is never shrunk."""
    if moment.diagonal:
        return torch.zeros(moment.groups, dtype=torch.float64, device=values_SF.device)
    with summing(values_SF.dtype, values_SF.device):
        return sample_square_norms(values_SF, moment.heads, moment.groups)


class Squares:
    """Chooses the grids of sums over `tokens` tokens from the squares of a first micro-batch.

    `silent`: moments whose values were all zero so far.
    """

    def __init__(self, tokens: int, layer: LayerGeometry) -> None:
        self.tokens = tokens
        self.layer = layer
        self.by_moment: dict[Moment, Grid] = {}
        self.silent: set[Moment] = set()

    def taps(self, unit: Summable) -> Taps:
        """Return taps for all moments that are summed."""
        return _taps(unit, self.see)

    def grids(self, unit: Summable) -> dict[Moment, Grid]:
        """Return the grid of every moment of the unit; a point that no token has passed yet counts as silent."""
        for moment in _summed(unit):
            if moment not in self.by_moment:
                assert moment.kind != "pair", "every expert runs when grids are chosen, so that each pair has a grid"
                self.see(moment, torch.zeros(1, self.layer.features(moment.point)))
        return self.by_moment

    def see(self, moment: Moment, values: Tensor, errors: Tensor | None = None) -> None:
        """Choose the grid of a moment, unless an earlier micro-batch with nonzero values has chosen it.

        `errors`: of a pair, whose values must be finite.
        """
        if errors is not None:
            self.by_moment[moment] = choose_pair_grid(values, errors, self.tokens)
            return
        if (moment in self.by_moment and moment not in self.silent) or not values.numel():
            return
        heads_of_a_group = moment.heads // moment.groups
        rows = values.numel() // values.shape[-1] * heads_of_a_group
        squares_Gd = sample_squares(values, moment.heads, moment.groups)
        self.by_moment[moment] = choose_grid(squares_Gd, rows, self.tokens * heads_of_a_group, values.dtype)
        (self.silent.discard if bool(squares_Gd.any()) else self.silent.add)(moment)


def _summed(unit: Summable) -> tuple[Moment, ...]:
    """Return the unit's moments that the worker sums."""
    return tuple(moment for moment in unit.moments if moment.kind in SUMMED)


def _taps(unit: Summable, take: Callable[..., None]) -> Taps:
    """Return taps that pass on the values of each moment that is summed; of a pair, x and e."""
    return [(moment.point, _checked(unit.layer, moment, take)) for moment in _summed(unit)]


def _checked(layer: int, moment: Moment, take: Callable[..., None]) -> Callable[..., None]:
    """Return a tap that raises NumericsError, naming layer and point, unless values are finite.

    Gradients are checked where they are computed.
    """
    if moment.kind == "gradient":
        return partial(take, moment)
    where = "both models" if moment.kind == "pair" else "activations"

    def check(values: Tensor, *errors: Tensor) -> None:
        try:
            for of_pair in errors:
                require_finite("errors", of_pair)
            require_finite("values", values)
        except ValueError as error:
            advice = overflow_advice(values.dtype)
            raise NumericsError(f"layer {layer}: {where} at {moment.point}: {error}; {advice}") from error
        take(moment, values, *errors)

    return check
