"""Polishes codes and scales by coordinate descent: each in turn gets the value with the least error.

Legend: O outputs (rows), I inputs (columns), S groups of columns with a scale each, g columns of a group, b columns of
a block, o rows at a time, n levels, B borders between levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.levels import borders, nearest_places
from pipeline.kernels.packing import code_range, levels_of

PLAIN_BITS = 8  # codes of 8 bits or more have errors too small to polish
BLOCK = 128  # columns whose changes are propagated together
POLISHED_NUMBERS = 2**28  # numbers in float32 that are polished at a time


class Polishing(NamedTuple):
    """The number of sweeps, λ relative to the mean diagonal of M, whether scales may become negative, and the share of
    M that its diagonal replaces."""

    sweeps: int
    damping: float
    signed: bool
    shrinkage: float = 0.0


def polish(
    weight_OI: Tensor, codes_OI: Tensor, scales_OS: Tensor, levels_n: Tensor, moment_II: Tensor, how: Polishing
) -> tuple[Tensor, Tensor]:
    """Return codes and scales with smaller tr(Δ (M + λI) Δᵀ), where Δ is the change of the weight by rounding.

    With P = Δ (M + λI), the best value of a number q_oj is q_oj - P_oj / M_jj, replaced by its nearest level. The best
    scale of a row and group with levels a is s - a·P / a M aᵀ, rounded to the dtype of scales. No step increases the
    error, except by rounding in float32.
    """
    if len(levels_n) >= 2**PLAIN_BITS or not how.sweeps:
        return codes_OI, scales_OS
    moment_II = damped(moment_II, how.damping, how.shrinkage)
    rows = max(1, POLISHED_NUMBERS // weight_OI.shape[1])
    parts = zip(weight_OI.split(rows), codes_OI.split(rows), scales_OS.split(rows), strict=True)
    polished = [polish_rows(*part, levels_n, moment_II, how) for part in parts]
    codes, scales = zip(*polished, strict=True)
    return torch.cat(codes), torch.cat(scales)


def shrunk_(moment_II: Tensor, shrinkage: float) -> Tensor:
    """Replace a share of M by its diagonal, in place."""
    if shrinkage:
        diagonal_I = moment_II.diagonal().clone()
        moment_II.mul_(1.0 - shrinkage).diagonal().copy_(diagonal_I)
    return moment_II


def damped(moment_II: Tensor, damping: float, shrinkage: float = 0.0) -> Tensor:
    """Return M with its shrinkage + λI in units of the largest magnitude of M, float32."""
    damped_II = shrunk_((moment_II / moment_II.abs().max()).to(torch.float32), shrinkage)
    damped_II.diagonal().add_(damping * damped_II.diagonal().mean())
    return damped_II


def polish_rows(
    weight_oI: Tensor, codes_oI: Tensor, scales_oS: Tensor, levels_n: Tensor, damped_II: Tensor, how: Polishing
) -> tuple[Tensor, Tensor]:
    """Polish some rows at once, with the moment of `damped`."""
    return _Rows(weight_oI, codes_oI, scales_oS, levels_n, damped_II, how).polished()


class _Rows:
    """Some rows of a weight, transposed so that a column is contiguous. They are polished in place."""

    def __init__(
        self,
        weight_oI: Tensor,
        codes_oI: Tensor,
        scales_oS: Tensor,
        levels_n: Tensor,
        moment_II: Tensor,
        how: Polishing,
    ) -> None:
        self.dtype, self.moment_II, self.how = scales_oS.dtype, moment_II, how
        self.levels_n = levels_n.to(torch.float32)
        self.borders_B = borders(self.levels_n)
        self.numbers_Io = levels_of(codes_oI.T.contiguous(), self.levels_n)  # levels, in units of the scales
        self.scales_So = scales_oS.T.to(torch.float32).contiguous()
        self.width = len(self.numbers_Io) // len(self.scales_So)
        stored_Io = self.numbers_Io * self.scales_So.repeat_interleave(self.width, dim=0)
        self.pull_Io = moment_II @ (weight_oI.T.to(torch.float32) - stored_Io)  # -P

    def polished(self) -> tuple[Tensor, Tensor]:
        """Return codes (o, I) and scales (o, S)."""
        for _ in range(self.how.sweeps):
            for place in range(len(self.scales_So)):
                self._polish_group(place)
        low, _ = code_range((len(self.levels_n) - 1).bit_length())
        codes_Io = nearest_places(self.numbers_Io.contiguous(), self.borders_B) + low
        return codes_Io.T.to(torch.int8).contiguous(), self.scales_So.T.to(self.dtype).contiguous()

    def _polish_group(self, place: int) -> None:
        group = slice(place * self.width, (place + 1) * self.width)
        numbers_go, scale_o = self.numbers_Io[group], self.scales_So[place]
        before_go = numbers_go * scale_o
        moment_gg, pull_go = self.moment_II[group, group], self.pull_Io[group].clone()
        for start in range(0, self.width, BLOCK):
            self._polish_block(slice(start, start + BLOCK), numbers_go, scale_o, pull_go, moment_gg)
        curvature_o = (numbers_go * (moment_gg @ numbers_go)).sum(dim=0)
        best_o = scale_o + (numbers_go * pull_go).sum(dim=0) / curvature_o
        best_o = best_o.to(self.dtype).to(torch.float32)
        size_o = best_o.abs() if self.how.signed else best_o
        usable_o = torch.isfinite(best_o) & (size_o >= torch.finfo(self.dtype).tiny)
        scale_o.copy_(torch.where(usable_o, best_o, scale_o))
        self.pull_Io.addmm_(self.moment_II[:, group], numbers_go * scale_o - before_go, alpha=-1.0)

    def _polish_block(
        self, block: slice, numbers_go: Tensor, scale_o: Tensor, pull_go: Tensor, moment_gg: Tensor
    ) -> None:
        """Choose the levels of a block's columns, and update `pull_go`, -P of the whole group."""
        numbers_bo, moment_bb = numbers_go[block], moment_gg[block, block]
        before_bo, pull_bo = numbers_bo.clone(), pull_go[block].clone()
        for column in range(len(numbers_bo)):  # on a GPU, kernel launches dominate
            # Two divisions, because the product of the divisors may underflow.
            wanted_o = numbers_bo[column] + pull_bo[column] / moment_bb[column, column] / scale_o
            level_o = self.levels_n[nearest_places(wanted_o, self.borders_B)]
            pull_bo.addr_(moment_bb[column], (level_o - numbers_bo[column]) * scale_o, alpha=-1.0)
            numbers_bo[column] = level_o
        pull_go.addmm_(moment_gg[:, block], (numbers_bo - before_bo) * scale_o, alpha=-1.0)
