"""Repack rounded matrices as llama.cpp's blocks of 32, with the same codes, and the group's scale as float16 in each.

Q8_0: the scale and 32 int8. Q4_0, and IQ4_NL for `iq4_nl` levels: the scale and 16 bytes, number j of a block in the
low half of byte j, j + 16 in the high half, as code + 8. Legend: O outputs, I inputs, B blocks of a row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from manifests.engines import GGUF_BLOCK
from manifests.records import LevelKind, Scheme
from pipeline.kernels.gptq import round_to_nearest
from pipeline.kernels.levels import iq4_nl_levels

Kind = Literal["Q8_0", "Q4_0", "IQ4_NL"]
KINDS: dict[tuple[LevelKind, int], Kind] = {("uniform", 8): "Q8_0", ("uniform", 4): "Q4_0", ("iq4_nl", 4): "IQ4_NL"}
BYTES: dict[Kind, int] = {"Q8_0": 2 + GGUF_BLOCK, "Q4_0": 2 + GGUF_BLOCK // 2, "IQ4_NL": 2 + GGUF_BLOCK // 2}
ROUNDING = 2.0**-11  # the most that a scale may change in float16, as a share of its row's largest scale


def block_kind(scheme: Scheme, columns: int, scales_OS: Tensor, levels_n: Tensor | None = None) -> Kind | None:
    """Return the kind of block for these codes, or None if none fits or float16 cannot represent the scales.

    `levels_n`: the stored table, of which only IQ4_NL's own has blocks.
    """
    if levels_n is not None and not is_iq4_nl(levels_n):
        return None
    fits = columns % GGUF_BLOCK == 0 and (scheme.group is None or scheme.group % GGUF_BLOCK == 0)
    zeros_OS = scales_OS.abs() <= torch.finfo(scales_OS.dtype).tiny  # the scale of a group of zeros in a table
    exact_OS = scales_OS.to(torch.float64).masked_fill(zeros_OS, 0.0)
    change_OS = (exact_OS.to(torch.float16).to(torch.float64) - exact_OS).abs()
    near = bool((change_OS <= ROUNDING * exact_OS.abs().amax(dim=1, keepdim=True)).all())
    return KINDS.get((scheme.levels, scheme.bits)) if fits and near else None


def is_iq4_nl(levels_n: Tensor) -> bool:
    """Return True if a table holds the levels of IQ4_NL."""
    return levels_n.shape == (16,) and torch.equal(levels_n.to(torch.float64).cpu(), iq4_nl_levels(4))


def blocks(codes_OI: Tensor, scales_OS: Tensor, kind: Kind) -> Tensor:
    """Return the blocks of each row, (O, bytes of a row) uint8."""
    rows, columns = codes_OI.shape
    count = columns // GGUF_BLOCK
    scales_OB = scales_OS.repeat_interleave(count // scales_OS.shape[1], dim=1).to(torch.float16)
    codes_OBn = codes_OI.reshape(rows, count, GGUF_BLOCK)
    if kind != "Q8_0":
        low_OBn, high_OBn = (codes_OBn + 8).to(torch.uint8).chunk(2, dim=2)
        codes_OBn = low_OBn | high_OBn << 4
    parts = scales_OB[..., None].contiguous().view(torch.uint8), codes_OBn.contiguous().view(torch.uint8)
    return torch.cat(parts, dim=2).flatten(1)


def eight_bits(weight_OI: Tensor) -> Tensor:
    """Round a matrix to the nearest codes of Q8_0, and return its blocks, (O, bytes of a row) uint8.

    Raises ValueError on NaN or infinity, and on scales beyond float16.
    """
    rounded = round_to_nearest(weight_OI, 8, GGUF_BLOCK, torch.float16)
    return blocks(rounded.codes, rounded.scales, "Q8_0")
