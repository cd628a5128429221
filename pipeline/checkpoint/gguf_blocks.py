"""Repack rounded matrices as llama.cpp's blocks of 32, with the same codes, and the group's scale as float16 in each.

Q8_0: the scale and 32 int8. Q4_0: the scale and 16 bytes, number j of a block in the low half of byte j, j + 16 in
the high half, as code + 8. Legend: O outputs, I inputs, B blocks of a row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from manifests.records import Scheme

BLOCK = 32
Kind = Literal["Q8_0", "Q4_0"]
KINDS: dict[int, Kind] = {8: "Q8_0", 4: "Q4_0"}
BYTES: dict[Kind, int] = {"Q8_0": 2 + BLOCK, "Q4_0": 2 + BLOCK // 2}
ROUNDING = 2.0**-11  # relative rounding error of float16, by which a scale may change


def block_kind(scheme: Scheme, columns: int, scales_OS: Tensor) -> Kind | None:
    """Return the kind of block for these codes, or None if none fits or float16 cannot represent the scales."""
    fits = not scheme.has_table and columns % BLOCK == 0 and (scheme.group is None or scheme.group % BLOCK == 0)
    exact_OS = scales_OS.to(torch.float64)
    near = (exact_OS.to(torch.float16).to(torch.float64) - exact_OS).abs() <= ROUNDING * exact_OS.abs()
    return KINDS.get(scheme.bits) if fits and bool(near.all()) else None


def blocks(codes_OI: Tensor, scales_OS: Tensor, kind: Kind) -> Tensor:
    """Return the blocks of each row, (O, bytes of a row) uint8."""
    rows, columns = codes_OI.shape
    count = columns // BLOCK
    scales_OB = scales_OS.repeat_interleave(count // scales_OS.shape[1], dim=1).to(torch.float16)
    codes_OBn = codes_OI.reshape(rows, count, BLOCK)
    if kind == "Q4_0":
        low_OBn, high_OBn = (codes_OBn + 8).to(torch.uint8).chunk(2, dim=2)
        codes_OBn = low_OBn | high_OBn << 4
    parts = scales_OB[..., None].contiguous().view(torch.uint8), codes_OBn.contiguous().view(torch.uint8)
    return torch.cat(parts, dim=2).flatten(1)
