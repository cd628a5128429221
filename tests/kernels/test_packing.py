"""Codes packed into words: against a string of bits written out, and against compressed-tensors where it is there."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.packing import code_range, pack, scaled, unpack, words_of

BITS = [2, 3, 4, 5, 8]
SHAPES = [(1, 1), (3, 31), (2, 32), (5, 33), (4, 96), (2, 130)]


def some_codes(shape: tuple[int, int], bits: int) -> torch.Tensor:
    low, high = code_range(bits)
    source = torch.Generator().manual_seed(bits)
    codes = torch.randint(low, high + 1, shape, dtype=torch.int8, generator=source)
    codes[0, 0], codes[-1, -1] = low, high
    return codes


def words_by_hand(codes: torch.Tensor, bits: int) -> list[list[int]]:
    """Each row as one long binary number, its lowest bits first, cut into words."""
    rows = []
    for row in codes.tolist():
        number = sum((code - code_range(bits)[0]) << (bits * place) for place, code in enumerate(row))
        words = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(words_of(len(row), bits))]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return rows


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_strings_of_bits(shape: tuple[int, int], bits: int) -> None:
    codes = some_codes(shape, bits)
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.tolist() == words_by_hand(codes, bits)
    assert torch.equal(unpack(words, bits, shape[1]), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_compressed_tensors_reads_the_same(shape: tuple[int, int], bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = some_codes(shape, bits)
    assert torch.equal(pack(codes, bits), helpers.pack_to_int32(codes, bits))
    assert torch.equal(helpers.unpack_from_int32(pack(codes, bits), bits, torch.Size(shape)), codes)


def test_each_scale_serves_its_group() -> None:
    codes, scales = some_codes((3, 8), 4), torch.tensor([[1.0, 0.5], [2.0, 4.0], [0.25, 8.0]])
    assert torch.equal(scaled(codes, scales), codes.float() * scales.repeat_interleave(4, dim=1))


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match=r"within 2\.\.8, not 9"):
        pack(torch.zeros(1, 1, dtype=torch.int8), 9)
    with pytest.raises(ValueError, match=r"codes of 4 bits lie within -8\.\.7, not 0\.\.8"):
        pack(torch.tensor([[0, 8]]), 4)
    with pytest.raises(ValueError, match="a matrix of integers is needed"):
        pack(torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match=r"9 numbers of 4 bits are 2 int32 words a row, not torch.int32 \(1, 1\)"):
        unpack(torch.zeros(1, 1, dtype=torch.int32), 4, 9)
    with pytest.raises(ValueError, match="do not divide codes"):
        scaled(torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 3))


@pytest.mark.parametrize("bits", [3, 8])
def test_rows_are_packed_a_few_at_a_time(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the copies in int64 do not grow with the rows of a matrix; the words are the same."""
    low, high = code_range(bits)
    codes = torch.randint(low, high + 1, (50, 48), generator=torch.Generator().manual_seed(bits))
    words = pack(codes, bits)
    made: list[int] = []
    pad = torch.nn.functional.pad

    def counted(tensor: torch.Tensor, by: tuple[int, int]) -> torch.Tensor:
        made.append(len(tensor))
        return pad(tensor, by)

    monkeypatch.setattr(torch.nn.functional, "pad", counted)
    monkeypatch.setattr("pipeline.kernels.packing.NUMBERS_AT_ONCE", 7 * 48)
    assert torch.equal(pack(codes, bits), words)
    assert torch.equal(unpack(words, bits, 48), codes)
    assert made == 2 * ([7] * 7 + [1])
