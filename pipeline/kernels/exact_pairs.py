"""Sums of pairs that do not depend on the order: Σ x xᵀ and Σ e xᵀ, with e other values of the same rows.

They extend `pipeline.kernels.exact_sums`, whose grid bounds Σ x² and Σ e² of every channel: |Σ e x| <= (Σ e² Σ x²)^½ is
then below the bound, too.

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
    """Choose the grid (1, F + D) for a sum over `rows` rows by a sample of them. Raises the ValueErrors of
    `choose_grid`.

    x and e each have their own mean, which sets the level of silent channels: errors may be small against x.
    """
    sample = values_TF.numel() // values_TF.shape[-1]
    values_1F, errors_1D = sample_squares(values_TF), sample_squares(errors_TD)
    if not bool(errors_1D.any()):
        errors_1D = torch.full_like(errors_1D, float(values_1F.mean()) * 2.0**-SILENT_BITS)
    dtype = torch.promote_types(values_TF.dtype, errors_TD.dtype)
    values, errors = (choose_grid(squares, sample, rows, dtype) for squares in (values_1F, errors_1D))
    return replace(values, exponents=torch.cat((values.exponents, errors.exponents), dim=1))


class PairSum:
    """The scaled, rounded sums: one triangle of Σ x xᵀ, as in `MomentSum`, and all of Σ e xᵀ."""

    def __init__(self, grid: Grid, features: int, device: torch.device) -> None:
        """`grid`: of F + D channels, the F `features` of x first."""
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
        """Add both sums over rows, which may come in parts. Raises ValueError if shapes do not fit the grid.

        A product takes at most 4096 rows in float32 and may span parts. NaN and infinity are not checked.
        """
        values, errors = (
            [rows.detach().reshape(-1, rows.shape[-1]) for rows in each] for each in zip(*parts, strict=True)
        )
        for x_TF, e_TD in zip(values, errors, strict=True):
            if (x_TF.shape[1], e_TD.shape[1]) != (self.features, len(self._squares_D)) or len(x_TF) != len(e_TD):
                shapes = f"{tuple(x_TF.shape)} and {tuple(e_TD.shape)}"
                raise ValueError(f"x (T, F) and e (T, D) {shapes} do not fit sums of {self.features} features")
        self._values.add_(*values)
        chunks = (cut_rows(each, ROWS_PER_PRODUCT) for each in (values, errors))
        for x_parts, e_parts in zip(*chunks, strict=True):
            x_TF, e_TD = (_scaled(part, scale) for part, scale in zip((x_parts, e_parts), self._scales, strict=True))
            squares_D = e_TD.double().square().sum(dim=0)
            self._squares_D += squares_D.add_(self._wide_rounder).sub_(self._wide_rounder)
            for sum_1bF, rows in zip(self._errors, e_TD.split(BAND, dim=1), strict=True):
                sum_1bF[0].add_((rows.T @ x_TF).add_(self._rounder).sub_(self._rounder))

    def bands(self) -> list[Tensor]:
        """The current sums, x's bands first; not copies: more may be added afterwards."""
        return [*self._values.bands(), *self._errors]

    def squares(self) -> Tensor:
        """The scaled sums of squares (1, F + D), for `exact_sums.exceeding`."""
        return torch.cat((self._values.squares(), self._squares_D[None]), dim=1)


def whole_pair(bands: Sequence[Tensor], grid: Grid) -> Tensor:
    """(1, F + D, F) float64: Σ x xᵀ of the values themselves, and Σ e xᵀ below it. New memory."""
    features = bands[-1].shape[2]
    num_bands = -(-features // BAND)
    values, errors = _parts(grid, features)
    sums_1PF = torch.empty(1, grid.exponents.shape[1], features, dtype=torch.float64, device=bands[0].device)
    whole_moment(bands[:num_bands], values, sums_1PF[:, :features])
    errors_1DF = sums_1PF[:, features:]
    torch.cat(list(bands[num_bands:]), dim=1, out=errors_1DF)
    # In two steps, as 2^(e + f) alone may overflow float64.
    errors_1DF.mul_(powers_of_two(errors.exponents).to(sums_1PF.device)[:, :, None])
    errors_1DF.mul_(powers_of_two(values.exponents).to(sums_1PF.device)[:, None])
    return sums_1PF


def _parts(grid: Grid, features: int) -> tuple[Grid, Grid]:
    """Split the grid into those of x and of e."""
    values, errors = grid.exponents[:, :features], grid.exponents[:, features:]
    return replace(grid, exponents=values), replace(grid, exponents=errors)


def _scaled(parts_TF: Sequence[Tensor], scale_F: Tensor) -> Tensor:
    """Concatenate and scale all parts to (T, F) float32."""
    dtype = torch.promote_types(parts_TF[0].dtype, torch.float32)  # represents the scale
    return torch.cat([part_TF.to(dtype) * scale_F.to(dtype) for part_TF in parts_TF]).to(torch.float32)
