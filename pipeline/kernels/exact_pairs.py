"""Sums of pairs that do not depend on the order: Σ x xᵀ and, of something else in the same rows, Σ e xᵀ.

As `pipeline.kernels.exact_sums`, whose grid bounds Σ x² and Σ e² of every channel: |Σ e x| <= (Σ e² Σ x²)^½ then is
below the bound, too.

T tokens, F features of x, D of e, b rows of a band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.kernels.exact_sums import (
    BAND,
    GRID_BITS,
    MANTISSA,
    SILENT_BITS,
    Grid,
    MomentSum,
    choose_grid,
    cut_rows,
    powers_of_two,
    sample_squares,
    whole_moment,
)
from pipeline.kernels.moments import ROWS_PER_PRODUCT

Rows = tuple[Tensor, Tensor]  # x (..., F) and e (..., D), as many rows of each


def choose_pair_grid(values_TF: Tensor, errors_TD: Tensor, rows: int) -> Grid:
    """The grid (1, F + D) for a sum over `rows` rows, foretold by some of them. Raises ValueError as `choose_grid`.

    Either has its own mean, below which silent channels are taken to be: what is missing may be small against x.
    """
    sample = values_TF.numel() // values_TF.shape[-1]
    values_1F, errors_1D = sample_squares(values_TF), sample_squares(errors_TD)
    if not bool(errors_1D.any()):
        errors_1D = torch.full_like(errors_1D, float(values_1F.mean()) * 2.0**-SILENT_BITS)
    dtype = torch.promote_types(values_TF.dtype, errors_TD.dtype)
    values, errors = (choose_grid(squares, sample, rows, dtype) for squares in (values_1F, errors_1D))
    return replace(values, exponents=torch.cat((values.exponents, errors.exponents), dim=1))


class PairSum:
    """The scaled, rounded sums: of x one triangle, as `MomentSum` has it, and e against x whole."""

    def __init__(self, grid: Grid, features: int, device: torch.device) -> None:
        """`grid`: of F + D channels, the `features` F of x first."""
        values, errors = _parts(grid, features)
        self.features, self._values = features, MomentSum(values, 1, device)
        self._scales = [powers_of_two(-part.exponents[0]).to(device) for part in (values, errors)]
        width = errors.exponents.shape[1]
        self._errors = [
            torch.zeros(1, min(BAND, width - start), features, dtype=torch.float64, device=device)
            for start in range(0, width, BAND)
        ]
        self._squares_D = torch.zeros(width, dtype=torch.float64, device=device)
        self._rounder, self._wide_rounder = (
            1.5 * 2.0 ** (grid.bits - GRID_BITS + MANTISSA[dtype]) for dtype in (torch.float32, torch.float64)
        )

    def add_(self, *parts: Rows) -> None:
        """Adds both sums of rows that may come in parts. Raises ValueError where shapes do not fit the grid.

        One product takes at most 4096 rows in float32, over the ends of parts. NaN and infinity are not looked for.
        """
        values, errors = ([rows.detach().reshape(-1, rows.shape[-1]) for rows in each] for each in zip(*parts))  # noqa: B905
        for x_TF, e_TD in zip(values, errors, strict=True):
            if (x_TF.shape[1], e_TD.shape[1]) != (self.features, len(self._squares_D)) or len(x_TF) != len(e_TD):
                shapes = f"{tuple(x_TF.shape)} and {tuple(e_TD.shape)}"
                raise ValueError(f"x (T, F) and e (T, D) {shapes} do not fit sums of {self.features} features")
        self._values.add_(*values)
        chunks = (cut_rows(each, ROWS_PER_PRODUCT) for each in (values, errors))
        for x_parts, e_parts in zip(*chunks, strict=True):
            x_TF, e_TD = (_scaled(taken, scale) for taken, scale in zip((x_parts, e_parts), self._scales, strict=True))
            squares_D = e_TD.double().square().sum(dim=0)
            self._squares_D += squares_D.add_(self._wide_rounder).sub_(self._wide_rounder)
            for sum_1bF, rows in zip(self._errors, e_TD.split(BAND, dim=1), strict=True):
                sum_1bF[0].add_((rows.T @ x_TF).add_(self._rounder).sub_(self._rounder))

    def bands(self) -> list[Tensor]:
        """The sums so far, x's bands first: not copies, more may be added afterwards."""
        return [*self._values.bands(), *self._errors]

    def squares(self) -> Tensor:
        """The scaled sums of squares (1, F + D), which `exact_sums.exceeding` judges."""
        return torch.cat((self._values.squares(), self._squares_D[None]), dim=1)


def whole_pair(bands: Sequence[Tensor], grid: Grid) -> Tensor:
    """(1, F + D, F) float64: Σ x xᵀ of the values themselves, and Σ e xᵀ below it. New memory."""
    features = bands[-1].shape[2]
    of_values = -(-features // BAND)
    values, errors = _parts(grid, features)
    found_1PF = torch.empty(1, grid.exponents.shape[1], features, dtype=torch.float64, device=bands[0].device)
    found_1PF[:, :features] = whole_moment(bands[:of_values], values)
    errors_1DF = found_1PF[:, features:]
    torch.cat(list(bands[of_values:]), dim=1, out=errors_1DF)
    # In two steps, as 2^(e + f) alone may leave float64.
    errors_1DF.mul_(powers_of_two(errors.exponents).to(found_1PF.device)[:, :, None])
    errors_1DF.mul_(powers_of_two(values.exponents).to(found_1PF.device)[:, None])
    return found_1PF


def _parts(grid: Grid, features: int) -> tuple[Grid, Grid]:
    """Of x and of e."""
    values, errors = grid.exponents[:, :features], grid.exponents[:, features:]
    return replace(grid, exponents=values), replace(grid, exponents=errors)


def _scaled(parts_TF: Sequence[Tensor], scale_F: Tensor) -> Tensor:
    """(T, F) float32 of all parts."""
    dtype = torch.promote_types(parts_TF[0].dtype, torch.float32)  # which has the scale
    return torch.cat([part_TF.to(dtype) * scale_F.to(dtype) for part_TF in parts_TF]).to(torch.float32)
