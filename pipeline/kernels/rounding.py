"""Weights rounded to codes of a few bits with a scale for each row and group of columns: to nearest, or with the error
of each column fed into those that are still to be rounded (GPTQ, Frantar et al. 2023). docs/methods.md#rounding.

Legend: O outputs (rows), I inputs (columns), g columns of a group, S scales of a row (I / g), b columns of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.checks import require_finite, require_square
from pipeline.kernels.packing import code_range, scaled

DAMPING = 0.01  # of the moment's mean diagonal, added to its diagonal
MOST_DAMPING = 1e6  # beyond this the moment says nothing
BLOCK = 128  # columns whose errors are fed on together
CLIPS = tuple(1.0 - step / 40 for step in range(20))  # of the largest magnitude; tried below CLIPPED_BELOW bits
FED_CLIPS = 6  # of these, where errors are fed on: what is clipped more burdens the columns to come
CLIPPED_BELOW = 8
BLOCK_ROWS = 2048  # for which scales are searched at a time


class Rounded(NamedTuple):
    """Codes (O, I) int8, scales (O, S) of the stored dtype, and the damping that the moment took (0: to nearest)."""

    codes: Tensor
    scales: Tensor
    damping: float

    @property
    def values(self) -> Tensor:
        """What is stored, (O, I) float64."""
        return scaled(self.codes, self.scales.to(torch.float64))


def round_to_nearest(
    weight_OI: Tensor, bits: int, group: int | None, dtype: torch.dtype, importance_I: Tensor | None = None
) -> Rounded:
    """Every number to the nearest code · scale; what the inputs are like is not known.

    `group`: columns that share a scale (None: the whole row). `dtype`: of the stored scales. `importance_I`: weights of
    the columns in the search for scales; none: all alike. Raises ValueError on NaN or infinity, a group that does not
    divide the columns, or a weight that scales of this dtype do not reach.
    """
    weight_OI = _checked(weight_OI, bits, group)
    scales_OS = choose_scales(weight_OI, bits, group, dtype, importance_I)
    low, high = code_range(bits)
    steps_OI = scales_OS.to(torch.float64).repeat_interleave(_width(weight_OI, group), dim=1)
    codes_OI = (weight_OI / steps_OI).round_().clamp_(low, high).to(torch.int8)
    return Rounded(codes_OI, scales_OS, 0.0)


def round_with_feedback(
    weight_OI: Tensor, moment_II: Tensor, bits: int, group: int | None, dtype: torch.dtype
) -> Rounded:
    """Codes of small tr(Δ M Δᵀ), Δ the change of the weight and M = Σ x xᵀ the moment of what it reads.

    Columns are rounded one after another, those of large diagonal first; what rounding column j changes is made up for
    by the columns still to come: with M + λI = R Rᵀ, R upper triangular in that order, and U = R⁻¹, they take
    -(error / U_jj) · U_j. Errors are fed on at once within BLOCK columns, then to all others by one product. Scales are
    chosen before, by groups of neighbouring columns, so that the order is not stored; in them the error of column j
    counts 1 / U_jj², what is left of it once it is made up for. A moment of zeros rounds to
    nearest. float64. Raises ValueError as `round_to_nearest`, and on a moment that does not fit.
    """
    weight_OI = _checked(weight_OI, bits, group)
    columns = weight_OI.shape[1]
    if require_square("moment", moment_II) != columns or moment_II.ndim != 2:
        raise ValueError(f"moment {tuple(moment_II.shape)} does not fit a weight {tuple(weight_OI.shape)}")
    peak = require_finite("moment", moment_II)
    if peak == 0.0:
        return round_to_nearest(weight_OI, bits, group, dtype)
    moment_II = moment_II.detach().to(torch.float64) / peak
    diagonal_I = moment_II.diagonal().clamp_min(0.0)
    order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    feed_II, damping = _feedback(moment_II[order_I][:, order_I])
    left_I = torch.empty_like(diagonal_I).index_copy_(0, order_I, feed_II.diagonal().pow(-2))
    scales_OS = choose_scales(weight_OI, bits, group, dtype, left_I)
    steps_OI = scales_OS.to(torch.float64).repeat_interleave(_width(weight_OI, group), dim=1)[:, order_I]
    codes_OI = _fed_codes(weight_OI[:, order_I], steps_OI, feed_II, code_range(bits))
    return Rounded(torch.empty_like(codes_OI).index_copy_(1, order_I, codes_OI), scales_OS, damping)


def choose_scales(
    weight_OI: Tensor, bits: int, group: int | None, dtype: torch.dtype, importance_I: Tensor | None = None
) -> Tensor:
    """(O, S) of `dtype`: for each row and group the scale of least Σ importance · error², of those that clip the
    largest magnitude by up to a half; with importance, of what error feedback leaves, by up to an eighth; at 8 bits
    never. Groups of zeros get the scale 1."""
    low, high = code_range(bits)
    width = _width(weight_OI, group)
    clips = CLIPS[: len(CLIPS) if importance_I is None else FED_CLIPS] if bits < CLIPPED_BELOW else CLIPS[:1]
    importance_Sg = None if importance_I is None else importance_I.reshape(-1, width)
    found = []
    for rows_OI in weight_OI.split(BLOCK_ROWS):
        groups_OSg = rows_OI.reshape(len(rows_OI), -1, width)
        peaks_OS = groups_OSg.abs().amax(dim=-1)
        best_OS, least_OS = torch.ones_like(peaks_OS), torch.full_like(peaks_OS, torch.inf)
        for clip in clips:
            scales_OS = _stored(peaks_OS * (2.0 * clip / (high - low)), dtype)
            codes_OSg = (groups_OSg / scales_OS[..., None]).round_().clamp_(low, high)
            errors_OSg = (codes_OSg.mul_(scales_OS[..., None]) - groups_OSg).square_()
            errors_OS = (errors_OSg if importance_Sg is None else errors_OSg * importance_Sg).sum(dim=-1)
            better_OS = errors_OS < least_OS
            best_OS, least_OS = best_OS.where(~better_OS, scales_OS), least_OS.where(~better_OS, errors_OS)
        found.append(best_OS.masked_fill(peaks_OS == 0.0, 1.0).to(dtype))
    return torch.cat(found)


def rounding_error(weight_OI: Tensor, rounded_OI: Tensor, moment_II: Tensor | None) -> float:
    """tr(Δ M Δᵀ) / tr(W M Wᵀ); without a moment ‖Δ‖² / ‖W‖². 0.0 for a weight that gives nothing."""
    weight_OI = weight_OI.to(torch.float64)
    change_OI = rounded_OI.to(torch.float64) - weight_OI

    def size(matrix_OI: Tensor) -> float:
        return float((matrix_OI.square() if moment_II is None else (matrix_OI @ moment_II) * matrix_OI).sum())

    whole = size(weight_OI)
    return max(0.0, size(change_OI)) / whole if whole > 0.0 else 0.0


def _checked(weight_OI: Tensor, bits: int, group: int | None) -> Tensor:
    """The weight in float64."""
    code_range(bits)
    if weight_OI.ndim != 2 or 0 in weight_OI.shape:
        raise ValueError(f"weight: a matrix is needed, not shape {tuple(weight_OI.shape)}")
    require_finite("weight", weight_OI)
    if group is not None and (group < 1 or weight_OI.shape[1] % group):
        raise ValueError(f"groups of {group} do not divide {weight_OI.shape[1]} columns")
    return weight_OI.detach().to(torch.float64)


def _width(weight_OI: Tensor, group: int | None) -> int:
    return weight_OI.shape[1] if group is None else group


def _stored(scales_OS: Tensor, dtype: torch.dtype) -> Tensor:
    """As they are when read back, float64; never zero. Raises ValueError on a scale beyond the dtype."""
    stored_OS = scales_OS.to(dtype).to(torch.float64).clamp_min(torch.finfo(dtype).tiny)
    if not torch.isfinite(stored_OS).all():
        raise ValueError(f"a scale of {float(scales_OS.max()):.3g} is beyond {dtype}")
    return stored_OS


def _feedback(moment_II: Tensor) -> tuple[Tensor, float]:
    """U = R⁻¹ of M + λI = R Rᵀ, R upper triangular; and λ relative to the mean diagonal, raised until R exists."""
    mean = moment_II.diagonal().mean()
    damping = DAMPING
    if not mean > 0.0:
        raise ValueError(f"moment {tuple(moment_II.shape)} is far from positive semidefinite")
    while damping <= MOST_DAMPING:
        damped_II = moment_II + damping * mean * torch.eye(len(moment_II), dtype=moment_II.dtype, device=mean.device)
        lower_II, failed = torch.linalg.cholesky_ex(damped_II.flip(0, 1))
        if not int(failed):
            upper_II = lower_II.flip(0, 1)
            identity_II = torch.eye(len(upper_II), dtype=upper_II.dtype, device=upper_II.device)
            return torch.linalg.solve_triangular(upper_II, identity_II, upper=True), damping
        damping *= 10.0
    raise ValueError(f"moment {tuple(moment_II.shape)} is far from positive semidefinite")


def _fed_codes(weight_OI: Tensor, steps_OI: Tensor, feed_II: Tensor, limits: tuple[int, int]) -> Tensor:
    """Codes of the columns, from the first to the last; `steps_OI`: the scale of every number."""
    left_OI = weight_OI.clone()
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    for start in range(0, left_OI.shape[1], BLOCK):
        stop = min(start + BLOCK, left_OI.shape[1])
        block_Ob, errors_Ob = left_OI[:, start:stop], left_OI.new_empty(left_OI.shape[0], stop - start)
        feed_bb = feed_II[start:stop, start:stop]
        for column in range(stop - start):
            step_O = steps_OI[:, start + column]
            code_O = (block_Ob[:, column] / step_O).round_().clamp_(*limits)
            codes_OI[:, start + column] = code_O.to(torch.int8)
            errors_Ob[:, column] = (block_Ob[:, column] - code_O * step_O) / feed_bb[column, column]
            block_Ob[:, column:].addr_(errors_Ob[:, column], feed_bb[column, column:], alpha=-1.0)
        left_OI[:, stop:].addmm_(errors_Ob, feed_II[start:stop, stop:], alpha=-1.0)
    return codes_OI
