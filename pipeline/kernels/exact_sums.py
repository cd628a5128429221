"""Second moments whose sum does not depend on the order of its terms (docs/methods.md#sums-without-an-order).

Every product of rows is rounded to one grid before it is added, and the grid is fine enough that no sum below its bound
is rounded again: float64 additions are then exact, and any order, any grouping, any number of workers gives the same
bits. A channel is scaled by a power of two first, so that one grid suits loud and silent channels alike.

T tokens, F features, H heads, G groups of heads, d = F / H, R rows of one product, b rows of a band.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.moments import ROWS_PER_PRODUCT, exact_halves

BAND = 512
STRIP = 64  # rows that are mirrored at a time: several times as fast on a CPU as more
ADDED_ROWS = {"cpu": 64, "cuda": BAND}  # of a band at a time: a CPU then has in its cache what it makes float64
MARGIN_BITS = 20  # by how much sums of squares may exceed what the sample foretells
SILENT_BITS = 16  # a channel that is zero in the sample is taken to be so much below the mean of all, in squares
FLOOR_BITS = 40  # and none to be further below
STEP = 10  # by which a channel's exponent is raised when it exceeds the bound: half of what squares may exceed it by
GRID_BITS = 52  # from a sum's bound to the grid: one bit less than float64 has, for what rounding adds
MANTISSA = {torch.float32: 24, torch.float64: 53}
_LARGEST_EXPONENT = {torch.float64: 500}  # of a channel's scale; of other types 126, whose inverse float32 has


@dataclass(frozen=True, eq=False)
class Grid:
    """How the channels of a moment are scaled, and what their sums stay below.

    Attributes:
        exponents: int16 (G, d); channel i is multiplied by 2^-exponent.
        bits: scaled sums of squares stay below 2^bits; they are multiples of 2^(bits - 52).
        highest: exponents end here, where nothing can exceed the bound any more.
    """

    exponents: Tensor
    bits: int
    highest: int

    def raised(self, channels_Gd: Tensor) -> "Grid":
        """With a wider bound for some channels. Raises ValueError when one of them has the widest there is."""
        if bool((self.exponents[channels_Gd.cpu()] >= self.highest).any()):
            raise ValueError(f"sums of squares beyond 4^{self.highest} times the number of rows have no float64")
        steps_Gd = channels_Gd.cpu().to(torch.int16) * STEP
        return replace(self, exponents=(self.exponents + steps_Gd).clamp_max(self.highest))

    def packed(self) -> dict[str, Tensor]:
        """As named tensors, which travel between workers."""
        return {"exponents": self.exponents, "bounds": torch.tensor([self.bits, self.highest])}

    @staticmethod
    def unpacked(tensors: Mapping[str, Tensor]) -> "Grid":
        """What `packed` gave."""
        bits, highest = tensors["bounds"].tolist()
        return Grid(tensors["exponents"], bits, highest)


def sample_squares(values_TF: Tensor, heads: int = 1, groups: int = 1) -> Tensor:
    """Sums of squares (G, d) float64 of a sample of values (..., F): what a grid is chosen by."""
    values_THd = values_TF.detach().reshape(-1, groups, heads // groups, values_TF.shape[-1] // heads)
    return values_THd.to(torch.float64).square().sum(dim=(0, 2))


def choose_grid(squares_Gd: Tensor, sample_rows: int, rows: int, dtype: torch.dtype) -> Grid:
    """The grid for a sum over `rows` rows (tokens times heads of a group), foretold by `sample_rows` of them.

    `squares_Gd` as `sample_squares` gives it, `dtype` that of the values. Raises ValueError unless all are finite and
    1 <= sample_rows.
    """
    if sample_rows < 1 or not bool(torch.isfinite(squares_Gd).all()):
        raise ValueError(f"a grid is chosen by finite sums of squares of at least one row, not of {sample_rows}")
    mean_Gd = squares_Gd.to("cpu", torch.float64) / sample_rows
    mean = float(mean_Gd.mean())
    mean_Gd = torch.where(mean_Gd > 0, mean_Gd.clamp_min(mean * 2.0**-FLOOR_BITS), mean * 2.0**-SILENT_BITS)
    exponents_Gd = torch.frexp(mean_Gd).exponent.div(2, rounding_mode="floor")
    highest = _LARGEST_EXPONENT.get(dtype, 126)
    bits = math.ceil(math.log2(max(rows, 1))) + MARGIN_BITS
    return Grid(exponents_Gd.clamp(-highest, highest).to(torch.int16), bits, highest)


def empty_bands(groups: int, width: int, device: torch.device) -> list[Tensor]:
    """Zeros for the upper triangle of `groups` moments: bands (G, b, width - start) float64 of at most 512 rows."""
    return [
        torch.zeros(groups, min(BAND, width - start), width - start, dtype=torch.float64, device=device)
        for start in range(0, width, BAND)
    ]


class MomentSum:
    """The sum of the scaled, rounded second moments of `heads` heads, one triangle for each group of them."""

    def __init__(
        self, grid: Grid, heads: int, device: torch.device, product_dtype: torch.dtype = torch.float32
    ) -> None:
        groups, width = grid.exponents.shape
        if heads < 1 or heads % groups:
            raise ValueError(f"{heads} heads are not of {groups} groups")
        self.grid, self.heads, self.product_dtype = grid, heads, product_dtype
        self._bands = empty_bands(groups, width, device)
        # x + c is a multiple of 2^(bits - 52), for c is 1.5 times what the type's last bit makes that.
        self._rounder = 1.5 * 2.0 ** (grid.bits - GRID_BITS + MANTISSA[product_dtype])
        self._left = 0.0
        self._factors: dict[torch.dtype, Tensor] = {}  # on the device, or every product would wait for a copy
        self._added_rows = ADDED_ROWS[device.type]

    def add_(self, *parts_TF: Tensor) -> None:
        """Adds the second moments of values (..., F), which may come in parts: products run over the ends of these.
        Raises ValueError where F is not what the grid is for.

        One product takes at most 4096 rows in `product_dtype`; its place in the sequence of calls does not matter, its
        extent does. NaN and infinity are not looked for: they reach the diagonal (`exceeding`).
        """
        groups, width = self.grid.exponents.shape
        parts = [part_TF.detach().reshape(-1, part_TF.shape[-1]) for part_TF in parts_TF]
        for part_TF in parts:
            if part_TF.shape[1] != self.heads * width:
                shape = tuple(part_TF.shape)
                raise ValueError(f"values (T, F) {shape} of {self.heads} heads do not fit {groups} x {width} sums")
        for taken in cut_rows(parts, product_tokens(self.heads, groups)):
            self._multiply(self._scaled_rows(taken))

    def _scaled_rows(self, parts_TF: Sequence[Tensor]) -> Tensor:
        """(G, T * heads per group, d) of all parts: what one batched product sums over. Scaled, put into the product's
        type and laid out in one pass over each."""
        groups, width = self.grid.exponents.shape
        tokens, dtype, device = sum(map(len, parts_TF)), parts_TF[0].dtype, parts_TF[0].device
        dtype = dtype if exact_halves(parts_TF[0], self.product_dtype) else self.product_dtype
        rows_GTHd = torch.empty(groups, tokens, self.heads // groups, width, dtype=dtype, device=device)
        if parts_TF[0].dtype not in self._factors:
            self._factors[parts_TF[0].dtype] = _factors(self.grid, parts_TF[0])
        factors_G11d = self._factors[parts_TF[0].dtype][:, None, None]
        for part_TF, row_GTHd in zip(parts_TF, rows_GTHd.split([*map(len, parts_TF)], 1), strict=True):
            torch.mul(part_TF.reshape(len(part_TF), groups, -1, width).transpose(0, 1), factors_G11d, out=row_GTHd)
        return rows_GTHd.reshape(groups, -1, width)

    def _multiply(self, rows_GRd: Tensor) -> None:
        """What rounds a float32 product stays in the sum, which is as exact with it: it is a small multiple of the
        grid, and would cost as much to take from each product as to add."""
        stays = self.product_dtype == torch.float32
        for band_Gbd, first in zip(self._bands, range(0, rows_GRd.shape[-1], BAND), strict=True):
            left_GbR = rows_GRd[:, :, first : first + BAND].transpose(1, 2)
            right_GRd = rows_GRd[:, :, first:]
            if rows_GRd.dtype == self.product_dtype:
                product_Gbd = torch.bmm(left_GbR, right_GRd)
            else:
                product_Gbd = torch.bmm(left_GbR, right_GRd, out_dtype=self.product_dtype)
            rows = self._added_rows
            for sum_Gnd, term_Gnd in zip(band_Gbd.split(rows, 1), product_Gbd.split(rows, 1), strict=True):
                term_Gnd.add_(self._rounder)
                sum_Gnd.add_(term_Gnd if stays else term_Gnd.sub_(self._rounder))
        self._left += self._rounder if stays else 0.0

    def bands(self) -> list[Tensor]:
        """The sum so far, by bands of rows (`empty_bands`): not copies, more may be added afterwards."""
        if self._left:
            for band_Gbd in self._bands:
                band_Gbd.sub_(self._left)
            self._left = 0.0
        return self._bands

    def squares(self) -> Tensor:
        """The scaled sums of squares (G, d), which `exceeding` judges."""
        return torch.cat([band_Gbd.diagonal(dim1=1, dim2=2) for band_Gbd in self.bands()], dim=1)


class DiagonalSum:
    """The sum of the scaled, rounded squares of `heads` heads, for each group of them: a `MomentSum`'s diagonal."""

    def __init__(self, grid: Grid, heads: int, device: torch.device) -> None:
        self.grid, self.heads = grid, heads
        self._squares_Gd = torch.zeros(grid.exponents.shape, dtype=torch.float64, device=device)
        self._factors_Gd = powers_of_two(-grid.exponents).to(device)

    def add_(self, *parts_TF: Tensor) -> None:
        """Adds the squares of values (..., F), those of some rows in float32 at a time, or in float64 if that is their
        type. Raises as `MomentSum.add_`, and as there NaN and infinity are left to `exceeding`."""
        groups, width = self.grid.exponents.shape
        for part_TF in parts_TF:
            if part_TF.shape[-1] != self.heads * width:
                shape = tuple(part_TF.shape)
                raise ValueError(f"values (T, F) {shape} of {self.heads} heads do not fit {groups} x {width} sums")
            dtype = torch.promote_types(part_TF.dtype, torch.float32)
            rounder = 1.5 * 2.0 ** (self.grid.bits - GRID_BITS + MANTISSA[dtype])
            factors_G1d = self._factors_Gd.to(dtype)[:, None]
            for rows_TF in part_TF.detach().reshape(-1, self.heads * width).split(BAND):
                rows_TGhd = rows_TF.reshape(len(rows_TF), groups, -1, width) * factors_G1d
                squares_Gd = rows_TGhd.square_().sum(dim=(0, 2))
                self._squares_Gd += squares_Gd.add_(rounder).sub_(rounder)

    def bands(self) -> list[Tensor]:
        """The sum so far, (G, d), alone: not a copy, more may be added afterwards."""
        return [self._squares_Gd]

    def squares(self) -> Tensor:
        """The same, which `exceeding` judges."""
        return self._squares_Gd


def cut_rows(parts: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The rows of all parts, so many at a time, the last ones fewer; nothing is copied."""
    left = list(parts)
    while left:
        taken, room = list[Tensor](), limit
        while left and room:
            first_TF = left.pop(0)
            taken.append(first_TF[:room])
            left[:0] = [first_TF[room:]] if len(first_TF) > room else []
            room -= len(taken[-1])
        yield taken


def product_tokens(heads: int, groups: int) -> int:
    """How many tokens one product sums over."""
    return max(1, ROWS_PER_PRODUCT * groups // heads)


def exceeding(diagonal_Gd: Tensor, grid: Grid) -> Tensor:
    """Which channels (G, d), bool, have a sum of squares beyond the grid's bound, or one that is not finite.

    `diagonal_Gd`: of the sum, scaled (`MomentSum.squares`).

    The order of the additions does not matter here either: sums of squares only grow, and are exact up to twice the
    bound. With no such channel every number of the sum is exact, as |Σ x y| <= (Σ x² Σ y²)^½.
    """
    return ~(diagonal_Gd < 2.0**grid.bits)


def whole_moment(bands: Sequence[Tensor], grid: Grid, into_Gdd: Tensor | None = None) -> Tensor:
    """The moment (G, d, d) float64 of the values themselves: scales undone, both triangles. New memory, if none is
    given."""
    groups, width = bands[0].shape[0], sum(band.shape[1] for band in bands)
    moment_Gdd = into_Gdd
    if moment_Gdd is None:
        moment_Gdd = torch.empty(groups, width, width, dtype=torch.float64, device=bands[0].device)
    scales_Gd = powers_of_two(grid.exponents).to(moment_Gdd.device)
    for band_Gbd, first in zip(bands, range(0, width, BAND), strict=True):
        stop = first + band_Gbd.shape[1]
        # In two steps, as 2^(e + f) alone may leave float64.
        scaled_Gbd = band_Gbd * scales_Gd[:, first:stop, None] * scales_Gd[:, None, first:]
        square_Gbb = scaled_Gbd[:, :, : stop - first]
        lower_Gbb = square_Gbb.triu(1).transpose(1, 2)
        moment_Gdd[:, first:stop, first:stop] = square_Gbb.triu() + lower_Gbb
        moment_Gdd[:, first:stop, stop:] = scaled_Gbd[:, :, stop - first :]
        for strip_Gsc, row in zip(scaled_Gbd.split(STRIP, dim=1), range(first, stop, STRIP), strict=True):
            moment_Gdd[:, stop:, row : row + strip_Gsc.shape[1]] = strip_Gsc[:, :, stop - first :].transpose(1, 2)
    return moment_Gdd


def whole_diagonal(squares_Gd: Tensor, grid: Grid) -> Tensor:
    """The sums of squares (G, d) float64 of the values themselves: scales undone. New memory."""
    scales_Gd = powers_of_two(grid.exponents).to(squares_Gd.device)
    return squares_Gd * scales_Gd * scales_Gd  # in two steps, as 2^(2 e) alone may leave float64


def moment_rows(bands: Sequence[Tensor], grid: Grid, start: int, stop: int) -> Tensor:
    """Rows start to stop of `whole_moment` from column `start` on, (G, stop - start, d - start) float64. New memory."""
    groups, width = bands[0].shape[0], sum(band.shape[1] for band in bands)
    rows_Gnc = torch.zeros(groups, stop - start, width - start, dtype=torch.float64, device=bands[0].device)
    scales_Gd = powers_of_two(grid.exponents).to(rows_Gnc.device)
    for band_Gbd, first in zip(bands, range(0, width, BAND), strict=True):
        top, bottom, left = max(start, first), min(stop, first + band_Gbd.shape[1]), max(start, first)
        if top < bottom:
            scaled_Gbc = band_Gbd[:, top - first : bottom - first, left - first :] * scales_Gd[:, top:bottom, None]
            rows_Gnc[:, top - start : bottom - start, left - start :] = scaled_Gbc.mul_(scales_Gd[:, None, left:])
    square_Gnn = rows_Gnc[:, :, : stop - start]
    square_Gnn.copy_(square_Gnn.triu() + square_Gnn.triu(1).transpose(1, 2))
    return rows_Gnc


def _factors(grid: Grid, values_TF: Tensor) -> Tensor:
    """2^-exponent of every channel (G, d), in a type that has it, and that has what it makes of the values."""
    dtype = values_TF.dtype if values_TF.dtype in (torch.float64, torch.bfloat16) else torch.float32
    return powers_of_two(-grid.exponents).to(values_TF.device, dtype)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^exponent, float64, put together from its bits: exact, which no device's `pow` promises."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)
