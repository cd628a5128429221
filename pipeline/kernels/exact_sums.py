"""Second moments whose sum does not depend on the order of its terms (docs/methods.md#sums-without-an-order).

Every product of rows is rounded to one grid before it is added, and no sum below the grid's bound is rounded again:
float64 additions are then exact, so that any order, grouping and number of workers gives the same bits. Each channel is
scaled by a power of two first, so that one grid suits loud and silent channels.

T tokens, F features, H heads, G groups of heads, d = F / H, R rows that a product sums over, b rows of a band, p of a
product's result.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.kernels.moments import ROWS_PER_PRODUCT, batched_product, exact_halves

BAND = 512
STRIP = 64  # rows mirrored at a time: on a CPU several times as fast as more
PRODUCT_ROWS = {"cpu": 192, "cuda": BAND}  # rows of a band in one product: fewer compute less below the diagonal
ADDED_ROWS = {"cpu": 64, "cuda": BAND}  # rows of a product added at a time: they fit into a CPU's cache
MARGIN_BITS = 20  # log2 of the factor by which sums of squares may exceed the sample's prediction
SILENT_BITS = 16  # a channel that is zero in the sample is assumed 2^-16 of the mean square
FLOOR_BITS = 40  # no channel is assumed below 2^-40 of the mean square
STEP = 10  # raises the exponent of a channel that exceeds the bound: half of MARGIN_BITS
NOISE_BITS = 8  # a sum of squares below 2^8 steps of the grid counts as zero: rounding may exceed its correlations
GRID_BITS = 52  # between bound and grid: one bit less than float64 has, as rounding may add one
MANTISSA = {torch.float32: 24, torch.float64: 53}
_LARGEST_EXPONENT = {torch.float64: 500}  # of a channel's scale; 126 for other types, whose inverse float32 represents


@dataclass(frozen=True, eq=False)
class Grid:
    """The scales of a moment's channels, and the bound of their sums.

    Attributes:
        exponents: int16 (G, d); channel i is multiplied by 2^-exponent.
        bits: scaled sums of squares stay below 2^bits; they are multiples of 2^(bits - 52).
        highest: the largest exponent, with which no channel can exceed the bound.
    """

    exponents: Tensor
    bits: int
    highest: int

    def raised(self, channels_Gd: Tensor) -> "Grid":
        """Return a grid with wider bounds for some channels. Raises ValueError if one has the widest already."""
        if bool((self.exponents[channels_Gd.cpu()] >= self.highest).any()):
            raise ValueError(f"sums of squares beyond 4^{self.highest} times the number of rows have no float64")
        steps_Gd = channels_Gd.cpu().to(torch.int16) * STEP
        return replace(self, exponents=(self.exponents + steps_Gd).clamp_max(self.highest))

    def packed(self) -> dict[str, Tensor]:
        """Return the grid as named tensors, to send it between workers."""
        return {"exponents": self.exponents, "bounds": torch.tensor([self.bits, self.highest])}

    @staticmethod
    def unpacked(tensors: Mapping[str, Tensor]) -> "Grid":
        """Restore a grid from `packed`."""
        bits, highest = tensors["bounds"].tolist()
        return Grid(tensors["exponents"], bits, highest)


def sample_squares(values_TF: Tensor, heads: int = 1, groups: int = 1) -> Tensor:
    """Return the sums of squares (G, d) float64 of a sample of values (..., F), for `choose_grid`."""
    values_THd = values_TF.detach().reshape(-1, groups, heads // groups, values_TF.shape[-1] // heads)
    return values_THd.to(torch.float64).square().sum(dim=(0, 2))


def choose_grid(squares_Gd: Tensor, sample_rows: int, rows: int, dtype: torch.dtype) -> Grid:
    """Choose the grid for a sum over `rows` rows (tokens times heads of a group) by a sample of `sample_rows`.

    `squares_Gd` come from `sample_squares`; `dtype` is that of the values. Raises ValueError unless all are finite and
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
    """Zeros for the upper triangles of `groups` moments: bands (G, b, width - start) float64 of at most 512 rows.

    What a band has below the diagonal is not read: zeros, or sums where a product spans the diagonal.
    """
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
        # Adding c rounds x to a multiple of 2^(bits - 52): that is the last bit of numbers near c.
        self._rounder = 1.5 * 2.0 ** (grid.bits - GRID_BITS + MANTISSA[product_dtype])
        self._excess = 0.0  # sum of rounders still contained in the bands
        self._factors: dict[torch.dtype, Tensor] = {}  # kept on the device: a copy would make every product wait
        self._product_rows, self._added_rows = PRODUCT_ROWS[device.type], ADDED_ROWS[device.type]

    def add_(self, *parts_TF: Tensor) -> None:
        """Add the second moments of values (..., F), which may come in parts: a product may span parts.

        A product takes at most 4096 rows in `product_dtype`. The bits depend on which rows share a product, not on the
        order of products. NaN and infinity are not checked: they reach the diagonal (`exceeding`). Raises ValueError if
        F does not fit the grid.
        """
        parts = [part_TF.detach().reshape(-1, part_TF.shape[-1]) for part_TF in parts_TF]
        for part_TF in parts:
            _check_width(part_TF, self.grid, self.heads)
        for chunk in cut_rows(parts, product_tokens(self.heads, len(self.grid.exponents))):
            self._multiply(self._scaled_rows(chunk))

    def _scaled_rows(self, parts_TF: Sequence[Tensor]) -> Tensor:
        """Scale, convert and lay out all parts as the rows (G, T * heads per group, d) of one batched product."""
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
        # Subtracting the rounder from each float32 product would cost as much as adding it. It is a small multiple of
        # the grid, so that the sum stays exact with it, and `bands` subtracts all rounders at once.
        stays = self.product_dtype == torch.float32
        for block_Gpd, first in self._blocks():
            left_GpR = rows_GRd[:, :, first : first + block_Gpd.shape[1]].transpose(1, 2)
            product_Gpd = batched_product(left_GpR, rows_GRd[:, :, first:], self.product_dtype)
            rows = self._added_rows
            for sum_Gnd, term_Gnd in zip(block_Gpd.split(rows, 1), product_Gpd.split(rows, 1), strict=True):
                term_Gnd.add_(self._rounder)
                sum_Gnd.add_(term_Gnd if stays else term_Gnd.sub_(self._rounder))
        self._excess += self._rounder if stays else 0.0

    def _blocks(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the sums of each product, rows of a band from their diagonal on, and the first of these rows."""
        for band_Gbd, start in zip(self._bands, range(0, self.grid.exponents.shape[1], BAND), strict=True):
            for row in range(0, band_Gbd.shape[1], self._product_rows):
                yield band_Gbd[:, row : row + self._product_rows, row:], start + row

    def bands(self) -> list[Tensor]:
        """The current sum by bands of rows (`empty_bands`); not copies: more may be added afterwards."""
        if self._excess:
            for block_Gpd, _ in self._blocks():
                block_Gpd.sub_(self._excess)
            self._excess = 0.0
        return self._bands

    def squares(self) -> Tensor:
        """The scaled sums of squares (G, d), for `exceeding`."""
        return torch.cat([band_Gbd.diagonal(dim1=1, dim2=2) for band_Gbd in self.bands()], dim=1)


class DiagonalSum:
    """The diagonal of a `MomentSum`: sums of the scaled, rounded squares of `heads` heads by group."""

    def __init__(self, grid: Grid, heads: int, device: torch.device) -> None:
        self.grid, self.heads = grid, heads
        self._squares_Gd = torch.zeros(grid.exponents.shape, dtype=torch.float64, device=device)
        self._factors_Gd = powers_of_two(-grid.exponents).to(device)

    def add_(self, *parts_TF: Tensor) -> None:
        """Add the squares of values (..., F), band by band, in float32 or, for float64 values, in float64.

        Raises the errors of `MomentSum.add_`; NaN and infinity are left to `exceeding`.
        """
        groups, width = self.grid.exponents.shape
        for part_TF in parts_TF:
            _check_width(part_TF, self.grid, self.heads)
            dtype = torch.promote_types(part_TF.dtype, torch.float32)
            rounder = 1.5 * 2.0 ** (self.grid.bits - GRID_BITS + MANTISSA[dtype])
            factors_G1d = self._factors_Gd.to(dtype)[:, None]
            for rows_TF in part_TF.detach().reshape(-1, self.heads * width).split(BAND):
                rows_TGhd = rows_TF.reshape(len(rows_TF), groups, -1, width) * factors_G1d
                squares_Gd = rows_TGhd.square_().sum(dim=(0, 2))
                self._squares_Gd += squares_Gd.add_(rounder).sub_(rounder)

    def bands(self) -> list[Tensor]:
        """A list of the current sum (G, d) alone; not a copy: more may be added afterwards."""
        return [self._squares_Gd]

    def squares(self) -> Tensor:
        """The current sum (G, d), for `exceeding`."""
        return self._squares_Gd


def _check_width(values_TF: Tensor, grid: Grid, heads: int) -> None:
    groups, width = grid.exponents.shape
    if values_TF.shape[-1] != heads * width:
        shape = tuple(values_TF.shape)
        raise ValueError(f"values (T, F) {shape} of {heads} heads do not fit {groups} x {width} sums")


def cut_rows(parts: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield the rows of all parts, `limit` at a time, as views; the last chunk may be smaller."""
    rest = list(parts)
    while rest:
        chunk, room = list[Tensor](), limit
        while rest and room:
            first_TF = rest.pop(0)
            chunk.append(first_TF[:room])
            rest[:0] = [first_TF[room:]] if len(first_TF) > room else []
            room -= len(chunk[-1])
        yield chunk


def product_tokens(heads: int, groups: int) -> int:
    """The number of tokens that one product sums over."""
    return max(1, ROWS_PER_PRODUCT * groups // heads)


def exceeding(diagonal_Gd: Tensor, grid: Grid) -> Tensor:
    """Mark the channels (G, d), bool, whose sum of squares exceeds the grid's bound or is not finite.

    `diagonal_Gd` is the scaled diagonal (`MomentSum.squares`). The result does not depend on the order of additions:
    sums of squares only grow, and are exact up to twice the bound. If no channel is marked, every number of the sum is
    exact, as |Σ x y| <= (Σ x² Σ y²)^½.
    """
    return ~(diagonal_Gd < 2.0**grid.bits)


def whole_moment(bands: Sequence[Tensor], grid: Grid, into_Gdd: Tensor | None = None) -> Tensor:
    """Return the unscaled moment (G, d, d) float64, both triangles, in `into_Gdd` or new memory.

    The row and column of a channel whose sum of squares is lost in the grid's rounding are zero.
    """
    groups, width = bands[0].shape[0], sum(band.shape[1] for band in bands)
    moment_Gdd = into_Gdd
    if moment_Gdd is None:
        moment_Gdd = torch.empty(groups, width, width, dtype=torch.float64, device=bands[0].device)
    scales_Gd = _audible_scales(bands, grid)
    for band_Gbd, first in zip(bands, range(0, width, BAND), strict=True):
        stop = first + band_Gbd.shape[1]
        # In two steps, as 2^(e + f) alone may overflow float64.
        scaled_Gbd = band_Gbd * scales_Gd[:, first:stop, None] * scales_Gd[:, None, first:]
        square_Gbb = scaled_Gbd[:, :, : stop - first]
        lower_Gbb = square_Gbb.triu(1).transpose(1, 2)
        moment_Gdd[:, first:stop, first:stop] = square_Gbb.triu() + lower_Gbb
        moment_Gdd[:, first:stop, stop:] = scaled_Gbd[:, :, stop - first :]
        for strip_Gsc, row in zip(scaled_Gbd.split(STRIP, dim=1), range(first, stop, STRIP), strict=True):
            moment_Gdd[:, stop:, row : row + strip_Gsc.shape[1]] = strip_Gsc[:, :, stop - first :].transpose(1, 2)
    return moment_Gdd


def whole_diagonal(squares_Gd: Tensor, grid: Grid) -> Tensor:
    """Return the unscaled sums of squares (G, d) float64, in new memory."""
    scales_Gd = powers_of_two(grid.exponents).to(squares_Gd.device)
    return squares_Gd * scales_Gd * scales_Gd  # in two steps, as 2^(2 e) alone may overflow float64


def moment_rows(bands: Sequence[Tensor], grid: Grid, start: int, stop: int) -> Tensor:
    """Rows start to stop of `whole_moment` from column `start` on, (G, stop - start, d - start), in new memory."""
    groups, width = bands[0].shape[0], sum(band.shape[1] for band in bands)
    rows_Gnc = torch.zeros(groups, stop - start, width - start, dtype=torch.float64, device=bands[0].device)
    scales_Gd = _audible_scales(bands, grid)
    for band_Gbd, first in zip(bands, range(0, width, BAND), strict=True):
        top, bottom = max(start, first), min(stop, first + band_Gbd.shape[1])
        if top < bottom:
            scaled_Gbc = band_Gbd[:, top - first : bottom - first, top - first :] * scales_Gd[:, top:bottom, None]
            rows_Gnc[:, top - start : bottom - start, top - start :] = scaled_Gbc.mul_(scales_Gd[:, None, top:])
    square_Gnn = rows_Gnc[:, :, : stop - start]
    square_Gnn.copy_(square_Gnn.triu() + square_Gnn.triu(1).transpose(1, 2))
    return rows_Gnc


def _audible_scales(bands: Sequence[Tensor], grid: Grid) -> Tensor:
    """2^exponent of every channel (G, d), zero for those whose sum of squares is below 2^NOISE_BITS steps of the grid.

    A few rows may leave a channel at a step or two, where rounding makes correlations above 1 (an expert that one token
    passed): the moment would not be positive semidefinite.
    """
    scales_Gd = powers_of_two(grid.exponents).to(bands[0].device)
    squares_Gd = torch.cat([band_Gbd.diagonal(dim1=1, dim2=2) for band_Gbd in bands], dim=1)
    return scales_Gd.masked_fill_(squares_Gd.abs() < 2.0 ** (grid.bits - GRID_BITS + NOISE_BITS), 0.0)


def _factors(grid: Grid, values_TF: Tensor) -> Tensor:
    """2^-exponent of every channel (G, d), in a type that represents it and the scaled values."""
    dtype = values_TF.dtype if values_TF.dtype in (torch.float64, torch.bfloat16) else torch.float32
    return powers_of_two(-grid.exponents).to(values_TF.device, dtype)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^exponent in float64, built from its bits: exact, which no device's `pow` guarantees."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)
