"""Rounding with error feedback on both sides: of inputs, as GPTQ, and of the loss's gradients at the outputs.

docs/methods.md#feedback-on-both-sides.

Legend: O outputs (rows), I inputs (columns), S scales of a row, s rows of a section, b rows or columns of a block, B
blocks of an antidiagonal, e entries of an antidiagonal of blocks.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.gptq import (
    Feedback,
    Nearest,
    Rounded,
    check_rounding,
    error_feedback,
    fed_scales,
    polished_table,
)
from pipeline.kernels.levels import LevelKind
from pipeline.kernels.packing import scaled
from pipeline.kernels.polishing import PLAIN_BITS, Polishing, damped, polish_rows

BLOCK = 32  # rows and columns of a block
SECTION = 1024  # most rows of a section
POLISHED_ROWS = 32  # rows of a section that are polished at once
OUTPUT_DAMPING = 3.0  # of the gradients' moment, by its mean diagonal: few tokens say little about many outputs


class OutputFeedback(NamedTuple):
    """The compensation of rounding errors of a section of rows by later rows.

    Attributes:
        order: (s,) the rows in the order of rounding.
        share: (s, s) float32, rows and columns in this order: V above its diagonal, of G + μI = V D' Vᵀ; the rest is
            undefined.
        damped: (s, s) float32, in the order of the weight: G + μI in units of the largest magnitude of G.
    """

    order: Tensor
    share: Tensor
    damped: Tensor


def output_feedback(gradient_ss: Tensor, damping: float = OUTPUT_DAMPING) -> OutputFeedback:
    """Compute the feedback of a section of s outputs from the moment G of the gradients at them.

    If G is zero, rows do not compensate each other. `damping`, errors: those of `error_feedback`.
    """
    feedback, size, device = error_feedback(gradient_ss, damping), len(gradient_ss), gradient_ss.device
    if feedback is None:
        alone_ss = torch.eye(size, dtype=torch.float32, device=device)
        return OutputFeedback(torch.arange(size, device=device), torch.zeros_like(alone_ss), alone_ss)
    return OutputFeedback(feedback.order, feedback.share, damped(feedback.moment, feedback.damping))


def round_both_sides(
    weight_OI: Tensor,
    inputs: Feedback,
    outputs: Sequence[OutputFeedback],
    bits: int,
    group: int | None,
    dtype: torch.dtype,
    levels: LevelKind = "uniform",
) -> Rounded:
    """Round with small tr(G Δ M Δᵀ): M the moment of the inputs, G that of the gradients at each section of rows.

    With damped M = U D Uᵀ and G = V D' Vᵀ, U and V unit upper triangular in the orders of the feedbacks, the error is
    Σ_ij D'_i D_j (Vᵀ Δ U)_ij². Entry (i, j) becomes the level nearest to w_ij − (Vᵀ Δ U)_ij, over the entries above it
    and to the left, rounded before. Scales and levels are those of one side. Codes and scales are polished afterwards
    (`_polish_`). Raises ValueError as `round_with_feedback`, and on sections that do not fit the rows.
    """
    check_rounding(weight_OI, bits, group, inputs)
    rows = [len(section.order) for section in outputs]
    if sum(rows) != len(weight_OI):
        raise ValueError(f"sections of {rows} outputs do not fit a weight {tuple(weight_OI.shape)}")
    weight_OI = weight_OI.detach()
    scales_OS, levels_n = fed_scales(weight_OI, inputs, bits, group, dtype, levels)
    nearest = Nearest(bits, levels_n, torch.float32)
    parts = zip(weight_OI.split(rows), scales_OS.split(rows), outputs, strict=True)
    codes = [_section_codes(weight_sI, scales_sS, inputs, section, nearest) for weight_sI, scales_sS, section in parts]
    rounded = Rounded(torch.cat(codes), scales_OS, inputs.damping, levels_n)
    table_n, how = polished_table(levels_n, bits, dtype, inputs)
    if bits < PLAIN_BITS and how.sweeps:
        _polish_(rounded, weight_OI, table_n, inputs, outputs, how)
    return rounded


def _polish_(
    rounded: Rounded,
    weight_OI: Tensor,
    table_n: Tensor,
    inputs: Feedback,
    outputs: Sequence[OutputFeedback],
    how: Polishing,
) -> None:
    """Change codes and scales so that tr(G Δ M Δᵀ) of damped moments falls, or stays.

    In turns, POLISHED_ROWS rows B of each section are polished together. With a_o = Σ_k∈B |G_ok|, the error is at most
    Σ_o a_o ‖q_o − t_o‖²_M and a constant, with equality at the present rows q_o, for targets t_o = q_o − (G Δ)_o / a_o.
    So rows that come nearer to their targets lower the error.
    """
    damped_II, sweep = damped(inputs.moment, inputs.damping, inputs.shrinkage), how._replace(sweeps=1)
    stored_OI = scaled(rounded.codes, rounded.scales.to(torch.float32), rounded.levels)
    starts = [0, *accumulate(len(section.order) for section in outputs)]
    for _ in range(how.sweeps):
        for first in range(0, max(len(section.order) for section in outputs), POLISHED_ROWS):
            rows, targets = [], []
            for start, section in zip(starts, outputs, strict=False):
                part = slice(first, min(first + POLISHED_ROWS, len(section.order)))
                if part.start >= part.stop:
                    continue
                whole, own = slice(start, start + len(section.order)), slice(start + part.start, start + part.stop)
                change_sI = stored_OI[whole] - weight_OI[whole].to(torch.float32)
                bound_b1 = section.damped[part, part].abs().sum(dim=1, keepdim=True)
                targets.append(stored_OI[own] - section.damped[part] @ change_sI / bound_b1)
                rows.append(torch.arange(own.start, own.stop, device=weight_OI.device))
            rows_o = torch.cat(rows)
            codes_oI, scales_oS = rounded.codes[rows_o], rounded.scales[rows_o]
            codes_oI, scales_oS = polish_rows(torch.cat(targets), codes_oI, scales_oS, table_n, damped_II, sweep)
            rounded.codes[rows_o], rounded.scales[rows_o] = codes_oI, scales_oS
            stored_OI[rows_o] = scaled(codes_oI, scales_oS.to(torch.float32), rounded.levels)


def _section_codes(
    weight_sI: Tensor, scales_sS: Tensor, inputs: Feedback, section: OutputFeedback, nearest: Nearest
) -> Tensor:
    """Return the codes (s, I) of a section."""
    order_s, order_I = section.order, inputs.order
    places_I = order_I // (len(order_I) // scales_sS.shape[1])
    wavefront = _Wavefront(
        weight_sI[order_s][:, order_I].to(torch.float32),
        scales_sS[order_s].to(torch.float32)[:, places_I],
        section.share,
        inputs.share,
        nearest,
    )
    codes_sI = torch.empty(weight_sI.shape, dtype=torch.int8, device=weight_sI.device)
    codes_sI[order_s[:, None], order_I] = wavefront.codes()
    return codes_sI


class _Wavefront:
    """Rounds antidiagonals of blocks, and antidiagonals of entries within the blocks, one after another.

    Entries of an antidiagonal do not depend on each other. With the errors E = W − Q and A = E U, entry (i, j) rounds
    w_ij + Σ_k≤i V_ki A_kj. The products of finished blocks with all later rows and columns are matrix products.
    Blocks are stored with their columns reversed, so that an antidiagonal is a diagonal, which is a view.
    """

    def __init__(
        self, weight_sI: Tensor, steps_sI: Tensor, left_ss: Tensor, right_II: Tensor, nearest: Nearest
    ) -> None:
        """`left_ss` and `right_II`: V and U above their diagonals."""
        self.shape, self.left_ss, self.right_II, self.nearest = weight_sI.shape, left_ss, right_II, nearest
        more = (0, -self.shape[1] % BLOCK, 0, -self.shape[0] % BLOCK)
        self.weight_sI = torch.nn.functional.pad(weight_sI, more)
        self.steps_sI = torch.nn.functional.pad(steps_sI, more, value=1.0)
        self.target_sI = self.weight_sI.clone()  # W and what finished blocks above add
        self.fed_sI = torch.zeros_like(self.weight_sI)  # A
        self.codes_sI = torch.empty_like(self.weight_sI, dtype=torch.int8)
        self.corners_sbb = _corners(left_ss)
        self.reversed_Ibb = _corners(right_II).flip(0, 1, 2)

    def codes(self) -> Tensor:
        """Return the codes (s, I)."""
        rows, columns = len(self.corners_sbb), len(self.reversed_Ibb)
        for wave in range(rows + columns - 1):
            first, last = max(0, wave - columns + 1), min(wave, rows - 1)
            blocks = [(_block(row), _block(wave - row)) for row in range(first, last + 1)]
            corners_Bbb = self.corners_sbb[first : last + 1]
            skip = columns - 1 - wave
            reversed_Bbb = self.reversed_Ibb[skip + first : skip + last + 1]
            errors_Bbb = self._round(blocks, corners_Bbb, reversed_Bbb)
            for (row, column), errors_bb in zip(blocks, errors_Bbb, strict=True):
                right, below = slice(column.stop, self.shape[1]), slice(row.stop, self.shape[0])
                if right.start < right.stop:
                    self.fed_sI[row, right].addmm_(errors_bb, self.right_II[column, right])
                if below.start < below.stop:
                    self.target_sI[below, column].addmm_(self.left_ss[row, below].T, self.fed_sI[row, column])
        return self.codes_sI[: self.shape[0], : self.shape[1]]

    def _round(self, blocks: Sequence[tuple[slice, slice]], corners_Bbb: Tensor, reversed_Bbb: Tensor) -> Tensor:
        """Round the blocks of an antidiagonal. Write their codes and A; return their errors."""

        def stacked(matrix_sI: Tensor) -> Tensor:
            return torch.stack([matrix_sI[block] for block in blocks]).flip(2)

        weight_Bbb, steps_Bbb = stacked(self.weight_sI), stacked(self.steps_sI)
        target_Bbb, fed_Bbb = stacked(self.target_sI), stacked(self.fed_sI)
        codes_Bbb, errors_Bbb = torch.empty_like(weight_Bbb), torch.empty_like(weight_Bbb)
        for step in range(2 * BLOCK - 1):  # on a GPU dominated by kernel launches
            offset = BLOCK - 1 - step  # of the diagonal of reversed columns
            rows = slice(max(0, -offset), min(step, BLOCK - 1) + 1)
            columns = slice(rows.start + offset, rows.stop + offset)
            pushed_Be = (corners_Bbb[:, : rows.stop, rows] * fed_Bbb[:, : rows.stop, columns]).sum(dim=1)
            value_Be = pushed_Be.add_(target_Bbb.diagonal(offset, 1, 2)).div_(steps_Bbb.diagonal(offset, 1, 2))
            code_Be = self.nearest.codes(value_Be)
            codes_Bbb.diagonal(offset, 1, 2).copy_(code_Be)
            stored_Be = self.nearest.levels(code_Be) * steps_Bbb.diagonal(offset, 1, 2)
            error_Be = weight_Bbb.diagonal(offset, 1, 2) - stored_Be
            errors_Bbb.diagonal(offset, 1, 2).copy_(error_Be)
            reach = slice(0, columns.stop)  # columns from the antidiagonal on, in reversed order
            fed_Bbb[:, rows, reach].addcmul_(error_Be[..., None], reversed_Bbb[:, columns, reach])
        for place, block in enumerate(blocks):
            self.codes_sI[block] = codes_Bbb[place].flip(1).to(torch.int8)
            self.fed_sI[block] = fed_Bbb[place].flip(1)
        return errors_Bbb.flip(2)


def _block(number: int) -> slice:
    return slice(number * BLOCK, (number + 1) * BLOCK)


def _corners(share_nn: Tensor) -> Tensor:
    """Return the blocks on the diagonal of the unit upper triangular matrix with these numbers above its diagonal."""
    corners_nbb = torch.eye(BLOCK, device=share_nn.device).repeat(-(-len(share_nn) // BLOCK), 1, 1)
    for number, corner_bb in enumerate(corners_nbb):
        part = share_nn[_block(number), _block(number)].triu(1)
        corner_bb[: len(part), : len(part)] += part
    return corners_nbb
