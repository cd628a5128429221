"""Small integers packed without gaps into 32-bit words, in the pack-quantized layout of compressed-tensors.

docs/formats.md#rounded-tensors. Legend: O outputs (rows), I inputs (columns), W words of a row, g columns of a group,
S scales of a row (I / g, or one), B groups of eight numbers n, which fill b bytes (as many as a number has bits).

Bytes are seen as words, and words as bytes, on machines whose words begin with their lowest byte.
"""

import math
import sys

import torch
from torch import Tensor

WORD_BITS, BYTE_BITS = 32, 8
NUMBERS_AT_ONCE = 1 << 22  # packed at a time: an embedding of 262,144 rows would take several bytes a number

assert sys.byteorder == "little", "words of packed numbers begin with their lowest byte"


def words_of(columns: int, bits: int) -> int:
    """W, the number of words for a row of `columns` numbers of `bits` bits."""
    return math.ceil(columns * bits / WORD_BITS)


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """Pack codes in -2^(bits-1) … 2^(bits-1) - 1 into words (O, W) int32: code + 2^(bits-1), lowest bits first.

    A number may begin in one word and end in the next; 32 of them fill `bits` words. Raises ValueError on codes out of
    range, or of no integer type.
    """
    low, high = code_range(bits)
    if codes_OI.ndim != 2 or codes_OI.is_floating_point() or codes_OI.is_complex():
        raise ValueError(f"codes: a matrix of integers is needed, not {codes_OI.dtype} {tuple(codes_OI.shape)}")
    if codes_OI.numel() and not low <= int(codes_OI.min()) <= int(codes_OI.max()) <= high:
        raise ValueError(f"codes of {bits} bits lie within {low}..{high}, not {codes_OI.min()}..{codes_OI.max()}")
    return torch.cat([_packed(rows_OI, bits, low) for rows_OI in codes_OI.split(_rows_at_once(codes_OI.shape[1]))])


def _rows_at_once(columns: int) -> int:
    return max(1, NUMBERS_AT_ONCE // max(1, columns))


def _packed(codes_OI: Tensor, bits: int, low: int) -> Tensor:
    columns = codes_OI.shape[1]
    numbers_OI = (codes_OI.to(torch.int16) - low).to(torch.uint8)
    numbers_OBn = torch.nn.functional.pad(numbers_OI, (0, -columns % WORD_BITS)).unflatten(1, (-1, BYTE_BITS))
    bytes_OBb = numbers_OBn.new_zeros(*numbers_OBn.shape[:2], bits)
    for position in range(BYTE_BITS):
        byte, shift = divmod(position * bits, BYTE_BITS)
        bytes_OBb[..., byte] |= numbers_OBn[..., position] << shift
        if shift + bits > BYTE_BITS:
            bytes_OBb[..., byte + 1] |= numbers_OBn[..., position] >> (BYTE_BITS - shift)
    words_OW: Tensor = bytes_OBb.flatten(1).view(torch.int32)[:, : words_of(columns, bits)]
    return words_OW


def unpack(words_OW: Tensor, bits: int, columns: int) -> Tensor:
    """Return the codes (O, `columns`) int8 of packed words. Raises ValueError on too few words, or not int32."""
    low, _ = code_range(bits)
    if words_OW.dtype != torch.int32 or words_OW.ndim != 2 or words_OW.shape[1] != words_of(columns, bits):
        raise ValueError(
            f"{columns} numbers of {bits} bits are {words_of(columns, bits)} int32 words a row, "
            f"not {words_OW.dtype} {tuple(words_OW.shape)}"
        )
    parts = words_OW.split(_rows_at_once(columns))
    return torch.cat([_unpacked(rows_OW, bits, columns, low) for rows_OW in parts])


def _unpacked(words_OW: Tensor, bits: int, columns: int, low: int) -> Tensor:
    words = math.ceil(columns / WORD_BITS) * bits  # with those that only padding would fill
    words_OW = torch.nn.functional.pad(words_OW, (0, words - words_OW.shape[1])).contiguous()
    bytes_OBb = words_OW.view(torch.uint8).unflatten(1, (-1, bits))
    numbers_OBn = bytes_OBb.new_empty(*bytes_OBb.shape[:2], BYTE_BITS)
    for position in range(BYTE_BITS):
        byte, shift = divmod(position * bits, BYTE_BITS)
        numbers_OBn[..., position] = bytes_OBb[..., byte] >> shift
        if shift + bits > BYTE_BITS:
            numbers_OBn[..., position] |= bytes_OBb[..., byte + 1] << (BYTE_BITS - shift)
    numbers_OBn &= 2**bits - 1
    codes_OI: Tensor = (numbers_OBn.flatten(1)[:, :columns].to(torch.int16) + low).to(torch.int8)
    return codes_OI


def scaled(codes_OI: Tensor, scales_OS: Tensor, levels_n: Tensor | None = None) -> Tensor:
    """Multiply codes, or the levels that they stand for, by scales, one for I / S columns, in the scales' dtype.

    Raises ValueError unless S divides I.
    """
    rows, columns = codes_OI.shape
    if scales_OS.ndim != 2 or scales_OS.shape[0] != rows or scales_OS.shape[1] == 0 or columns % scales_OS.shape[1]:
        raise ValueError(f"scales {tuple(scales_OS.shape)} do not divide codes {tuple(codes_OI.shape)}")
    values_OI = codes_OI.to(scales_OS.dtype) if levels_n is None else levels_of(codes_OI, levels_n.to(scales_OS.dtype))
    return (values_OI.reshape(rows, scales_OS.shape[1], -1) * scales_OS[..., None]).reshape(rows, columns)


def levels_of(codes_OI: Tensor, levels_n: Tensor) -> Tensor:
    """Look the levels of codes up: number c + n/2 of the table (n) for code c."""
    return levels_n[codes_OI.to(torch.int64) + len(levels_n) // 2]


def stored_scales(scales_OS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales as read back from `dtype`, in float64, never zero. Raises ValueError on a scale beyond it."""
    tiny = torch.finfo(dtype).tiny
    stored_OS = scales_OS.to(dtype).to(torch.float64)
    stored_OS = torch.where(stored_OS < 0.0, stored_OS.clamp_max(-tiny), stored_OS.clamp_min(tiny))
    if not torch.isfinite(stored_OS).all():
        raise ValueError(f"a scale of {float(scales_OS.abs().max()):.3g} is beyond {dtype}")
    return stored_OS


def code_range(bits: int) -> tuple[int, int]:
    """The least and the largest code. Raises ValueError unless 2 <= bits <= 8."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be within 2..8, not {bits}")
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
