"""Rounding of weights to codes of a few bits, with a scale for each row and group of columns. docs/methods.md#rounding.

Codes are the nearest ones, or follow GPTQ (Frantar et al. 2023): the error of each column changes the columns that are
still to be rounded.

Legend: O outputs (rows), I inputs (columns), g columns of a group, S scales of a row (I / g), b columns of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.cholesky import factor_
from pipeline.kernels.levels import LevelKind, borders, choose_table, clips_from, nearest_places, uniform_levels
from pipeline.kernels.packing import code_range, scaled, stored_scales
from pipeline.kernels.polishing import Polishing, polish, shrunk_

MOST_DAMPING = 1e6  # a moment that needs more carries no information
BLOCK = 128  # columns whose errors are propagated together
CLIPS = tuple(1.0 - step / 40 for step in range(20))  # shares of the largest magnitude, tried below CLIPPED_BELOW bits
CLIPPED_BELOW = 8
TABLE_SWEEPS = 4  # of polishing, with tables of levels
NEAREST_NUMBERS = 2**22  # float64 numbers rounded at a time without feedback: an embedding has many rows
FED_NUMBERS = 2**28  # float32 numbers rounded at a time
TRIED_NUMBERS = 2**18, 2**26  # numbers whose scales are searched at a time: on a CPU (its cache), on other devices


class Rounded(NamedTuple):
    """Codes (O, I) int8, scales (O, S) of the stored dtype, and the moment's damping (0: rounded to nearest).

    `levels`: the table (n), of the stored dtype, in which codes are looked up; None: uniform levels, the codes.
    """

    codes: Tensor
    scales: Tensor
    damping: float
    levels: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The stored weight (O, I) in float64."""
        return scaled(self.codes, self.scales.to(torch.float64), self.levels)


class Feedback(NamedTuple):
    """The compensation of rounding errors, shared by all weights that read the same input.

    Attributes:
        order: (I,) the columns in the order of rounding.
        share: (I, I) float32, rows and columns in this order: row j holds the shares of column j's error that later
            columns compensate; diagonal and lower triangle are undefined.
        remaining: (I,) float64, by original column: the share of a squared error that remains after compensation.
        damping: added to the moment's diagonal, relative to its mean.
        moment: (I, I) M itself, without damping and shrinkage.
        least_clip: the least share of a group's largest magnitude that its codes may cover.
        polish: sweeps that polish uniform codes and their scales afterwards.
        shrinkage: the share of M that its diagonal replaces.
    """

    order: Tensor
    share: Tensor
    remaining: Tensor
    damping: float
    moment: Tensor
    least_clip: float
    polish: int
    shrinkage: float = 0.0


def error_feedback(
    moment_II: Tensor, damping: float, least_clip: float = 0.0, polish: int = 0, shrinkage: float = 0.0
) -> Feedback | None:
    """Compute the feedback from the input's moment M = Σ x xᵀ; None if M is zero.

    Columns of large diagonal come first. With M + λI = R Rᵀ, R upper triangular in that order, the target of column k
    is w_k + Σ_j<k error_j · R_jk / R_kk, which compensates the errors w_j − q_j before it; of its own squared error
    R_kk² remains. This is GPTQ without the inverse, whose factor is R⁻¹ (Chee et al. 2023, theorem 6). Factored in
    float64. `damping`: the least λ, relative to the mean diagonal. `least_clip`, `polish`: see `Feedback`. `shrinkage`:
    the share of M that is replaced by its diagonal, first of all. Raises ValueError on a moment that is not square,
    finite and positive semidefinite.
    """
    if moment_II.ndim != 2:
        raise ValueError(f"moment: a matrix is needed, not shape {tuple(moment_II.shape)}")
    require_square("moment", moment_II)
    peak = require_finite("moment", moment_II)
    if peak == 0.0:
        return None
    scaled_II = shrunk_(moment_II.detach().to(torch.float64) / peak, shrinkage)
    diagonal_I = scaled_II.diagonal().clamp_min(0.0)
    order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    factor_II, damping = _factor(scaled_II[order_I][:, order_I], damping)
    diagonal_I = factor_II.diagonal().clone()
    remaining_I = torch.empty_like(diagonal_I).index_copy_(0, order_I, diagonal_I.square())
    share_II = factor_II.div_(diagonal_I).to(torch.float32)
    return Feedback(order_I, share_II, remaining_I, damping, moment_II.detach(), least_clip, polish, shrinkage)


def round_to_nearest(
    weight_OI: Tensor,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    importance_I: Tensor | None = None,
    levels: LevelKind = "uniform",
) -> Rounded:
    """Round every number to the nearest level · scale, without a moment of the inputs.

    `group`: the number of columns that share a scale (None: the whole row). `dtype`: of the stored scales and levels.
    `importance_I`: weights of the columns in the search for scales (None: equal). Raises ValueError on NaN or infinity,
    a group that does not divide the columns, or a scale beyond this dtype.
    """
    check_rounding(weight_OI, bits, group)
    scales_OS, levels_n = _scales_and_levels(weight_OI, bits, group, dtype, levels, importance_I)
    nearest, codes = Nearest(bits, levels_n, torch.float64), []
    rows = max(1, NEAREST_NUMBERS // weight_OI.shape[1])
    for weight_oI, scales_oS in zip(weight_OI.detach().split(rows), scales_OS.split(rows), strict=True):
        grouped_oSg = weight_oI.to(torch.float64).unflatten(1, (scales_oS.shape[1], -1))
        codes.append(nearest.codes(grouped_oSg / scales_oS.to(torch.float64)[..., None]).to(torch.int8).flatten(1))
    return Rounded(torch.cat(codes), scales_OS, 0.0, levels_n)


def round_with_feedback(
    weight_OI: Tensor,
    feedback: Feedback | None,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    levels: LevelKind = "uniform",
) -> Rounded:
    """Round with small tr(Δ M Δᵀ), Δ the change of the weight and M the moment of `error_feedback`.

    Columns are rounded one after another, and later ones compensate each error: within a block of BLOCK columns at
    once, in all later blocks by one float32 product. Scales are chosen first, by groups of neighbouring columns, so
    that the order need not be stored; the search weights errors by what remains of them. Codes and scales are polished
    afterwards. Without feedback every number goes to the nearest level. Raises ValueError as
    `round_to_nearest`, and on feedback of another width.
    """
    if feedback is None:
        return round_to_nearest(weight_OI, bits, group, dtype, levels=levels)
    check_rounding(weight_OI, bits, group, feedback)
    columns = weight_OI.shape[1]
    scales_OS, levels_n = fed_scales(weight_OI, feedback, bits, group, dtype, levels)
    rows, nearest = max(1, FED_NUMBERS // columns), Nearest(bits, levels_n, torch.float32)
    parts = zip(weight_OI.detach().split(rows), scales_OS.split(rows), strict=True)
    codes_OI = torch.cat([_fed_codes(weight_oI, scales_oS, feedback, nearest) for weight_oI, scales_oS in parts])
    table_n, how = polished_table(levels_n, bits, dtype, feedback)
    codes_OI, scales_OS = polish(weight_OI.detach(), codes_OI, scales_OS, table_n, feedback.moment, how)
    return Rounded(codes_OI, scales_OS, feedback.damping, levels_n)


def polished_table(
    levels_n: Tensor | None, bits: int, dtype: torch.dtype, feedback: Feedback
) -> tuple[Tensor, Polishing]:
    """Return the levels (n) of codes as a table, and how they are polished."""
    if levels_n is not None:
        return levels_n, Polishing(TABLE_SWEEPS, feedback.damping, signed=True, shrinkage=feedback.shrinkage)
    table_n = uniform_levels(bits, dtype, feedback.moment.device)
    return table_n, Polishing(feedback.polish, feedback.damping, signed=False, shrinkage=feedback.shrinkage)


def fed_scales(
    weight_OI: Tensor, feedback: Feedback, bits: int, group: int | None, dtype: torch.dtype, levels: LevelKind
) -> tuple[Tensor, Tensor | None]:
    """Return the scales (O, S) for rounding with feedback, and the table of levels; None for uniform ones."""
    importance_I, least_clip = feedback.remaining, feedback.least_clip
    return _scales_and_levels(weight_OI, bits, group, dtype, levels, importance_I, least_clip)


def _scales_and_levels(
    weight_OI: Tensor,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    levels: LevelKind,
    importance_I: Tensor | None = None,
    least_clip: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    if levels == "uniform":
        return choose_scales(weight_OI, bits, group, dtype, importance_I, least_clip), None
    table = choose_table(weight_OI, bits, group, dtype, levels, importance_I, least_clip)
    return table.scales, table.levels


def choose_scales(
    weight_OI: Tensor,
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    importance_I: Tensor | None = None,
    least_clip: float = 0.0,
) -> Tensor:
    """Choose scales (O, S) of `dtype`, one for each row and group, of least Σ importance · error².

    Candidates are the `CLIPS` from 1 down to `least_clip`; at 8 bits 1 alone. Groups of zeros get the scale 1. Errors
    are compared in float32, relative to the largest magnitude.
    """
    low, high = code_range(bits)
    columns = weight_OI.shape[1]
    width = columns if group is None else group
    clips = clips_from(CLIPS, least_clip) if bits < CLIPPED_BELOW else CLIPS[:1]
    importance_Sg = None
    if importance_I is not None:
        importance_Sg = (importance_I / importance_I.max()).to(torch.float32).reshape(-1, width)
    scales = []
    numbers = TRIED_NUMBERS[weight_OI.device.type != "cpu"]
    for weight_oI in weight_OI.detach().split(max(1, numbers // columns)):
        groups_oSg = weight_oI.to(torch.float64).reshape(len(weight_oI), -1, width)
        peaks_oS = groups_oSg.abs().amax(dim=-1)
        unit_oS = peaks_oS.where(peaks_oS > 0.0, 1.0)
        best_oS = stored_scales(unit_oS * (2.0 / (high - low)), dtype)
        if len(clips) > 1:
            shares_oSg = (groups_oSg / unit_oS[..., None]).to(torch.float32)
            best_oS = _least_error(shares_oSg, unit_oS, clips, (low, high), dtype, importance_Sg)
        scales.append(best_oS.masked_fill(peaks_oS == 0.0, 1.0).to(dtype))
    return torch.cat(scales)


def _least_error(
    shares_oSg: Tensor,
    unit_oS: Tensor,
    clips: tuple[float, ...],
    limits: tuple[int, int],
    dtype: torch.dtype,
    importance_Sg: Tensor | None,
) -> Tensor:
    """Return the stored scale (o, S) float64 of least error for each group of `unit` · `shares`."""
    low, high = limits
    best_oS, least_oS = torch.ones_like(unit_oS), torch.full_like(unit_oS, torch.inf, dtype=torch.float32)
    for clip in clips:
        scales_oS = stored_scales(unit_oS * (2.0 * clip / (high - low)), dtype)
        steps_oS = (scales_oS / unit_oS).to(torch.float32)[..., None]
        errors_oSg = (shares_oSg / steps_oS).round_().clamp_(low, high).mul_(steps_oS).sub_(shares_oSg).square_()
        errors_oS = (errors_oSg if importance_Sg is None else errors_oSg.mul_(importance_Sg)).sum(dim=-1)
        better_oS = errors_oS < least_oS
        best_oS, least_oS = best_oS.where(~better_oS, scales_oS), least_oS.where(~better_oS, errors_oS)
    return best_oS


def rounding_error(weight_OI: Tensor, rounded_OI: Tensor, moment_II: Tensor | None) -> float:
    """tr(Δ M Δᵀ) / tr(W M Wᵀ); without a moment ‖Δ‖² / ‖W‖². 0.0 if the denominator is zero."""
    weight_OI = weight_OI.to(torch.float64)
    change_OI = rounded_OI.to(torch.float64) - weight_OI

    def _energy(matrix_OI: Tensor) -> float:
        return float((matrix_OI.square() if moment_II is None else (matrix_OI @ moment_II) * matrix_OI).sum())

    whole = _energy(weight_OI)
    return max(0.0, _energy(change_OI)) / whole if whole > 0.0 else 0.0


def check_rounding(weight_OI: Tensor, bits: int, group: int | None, feedback: Feedback | None = None) -> None:
    """Raise the ValueErrors of `round_to_nearest`, and on feedback of another width."""
    code_range(bits)
    if weight_OI.ndim != 2 or 0 in weight_OI.shape:
        raise ValueError(f"weight: a matrix is needed, not shape {tuple(weight_OI.shape)}")
    require_finite("weight", weight_OI)
    if group is not None and (group < 1 or weight_OI.shape[1] % group):
        raise ValueError(f"groups of {group} do not divide {weight_OI.shape[1]} columns")
    if feedback is not None and len(feedback.order) != weight_OI.shape[1]:
        width = len(feedback.order)
        raise ValueError(f"moment ({width}, {width}) does not fit a weight {tuple(weight_OI.shape)}")


def _factor(moment_II: Tensor, damping: float) -> tuple[Tensor, float]:
    """Return the upper triangular R of M + λI = R Rᵀ and λ / mean diagonal, which is raised until R exists."""
    mean = moment_II.diagonal().mean()
    if not mean > 0.0:
        raise ValueError(f"moment {tuple(moment_II.shape)} is far from positive semidefinite")
    while damping <= MOST_DAMPING:
        lower_II = moment_II.flip(0, 1)
        lower_II.diagonal().add_(damping * mean)
        if factor_(lower_II) is None:
            return lower_II.flip(0, 1), damping
        damping *= 10.0
    raise ValueError(f"moment {tuple(moment_II.shape)} is far from positive semidefinite")


class Nearest:
    """The nearest codes to numbers in units of their scales."""

    def __init__(self, bits: int, levels_n: Tensor | None, dtype: torch.dtype) -> None:
        """`levels_n`: a table; None: uniform levels. `dtype`: in which numbers are compared."""
        self.limits = code_range(bits)
        self.levels_n = None if levels_n is None else levels_n.to(dtype)
        self.borders_b = None if self.levels_n is None else borders(self.levels_n)

    def codes(self, numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the codes of numbers, which are overwritten, in their dtype. `out`: tensor that holds the codes."""
        if self.borders_b is None:
            return torch.clamp(numbers.round_(), *self.limits, out=out)
        codes = nearest_places(numbers, self.borders_b).add_(self.limits[0])
        return codes.to(numbers.dtype) if out is None else out.copy_(codes)

    def levels(self, codes: Tensor) -> Tensor:
        """Return the levels of codes."""
        return codes if self.levels_n is None else self.levels_n[codes.to(torch.int64) - self.limits[0]]


def _fed_codes(weight_OI: Tensor, scales_OS: Tensor, feedback: Feedback, nearest: Nearest) -> Tensor:
    """Return the codes with error feedback. Works on the transposed weight, so that a column is contiguous."""
    order_I, share_II = feedback.order, feedback.share
    weight_IO = weight_OI.T.to(torch.float32)[order_I]
    target_IO = weight_IO.clone()
    steps_SO = scales_OS.T.to(torch.float32).contiguous()
    places = (order_I // (len(order_I) // len(steps_SO))).tolist()
    codes_IO = torch.empty(weight_IO.shape, dtype=torch.int8, device=weight_OI.device)
    for start in range(0, len(weight_IO), BLOCK):
        stop = min(start + BLOCK, len(weight_IO))
        errors_bO, codes_bO = (weight_IO.new_empty(stop - start, weight_IO.shape[1]) for _ in range(2))
        share_bI = share_II[start:stop]
        for place in range(stop - start):  # on a GPU dominated by kernel launches
            column = start + place
            value_O = torch.addmv(target_IO[column], errors_bO[:place].T, share_bI[:place, column])
            step_O = steps_SO[places[column]]
            level_O = nearest.levels(nearest.codes(value_O.div_(step_O), out=codes_bO[place]))
            torch.addcmul(weight_IO[column], level_O, step_O, value=-1.0, out=errors_bO[place])
        codes_IO[start:stop] = codes_bO
        target_IO[stop:].addmm_(share_bI[:, stop:].T, errors_bO)
    return torch.empty_like(codes_IO).index_copy_(0, order_I, codes_IO).T.contiguous()
