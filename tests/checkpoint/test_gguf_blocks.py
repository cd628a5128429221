"""Codes as llama.cpp's blocks, read back by the package gguf."""

from __future__ import annotations

import pytest
import torch

from manifests.records import Scheme
from pipeline.checkpoint.gguf_blocks import block_kind, blocks
from pipeline.kernels.packing import code_range, scaled


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_0")])
@pytest.mark.parametrize("group", [32, 64, None])
def test_the_same_numbers_come_back(bits: int, kind: str, group: int | None) -> None:
    gguf = pytest.importorskip("gguf")
    source = torch.Generator().manual_seed(bits)
    low, high = code_range(bits)
    codes = torch.randint(low, high + 1, (5, 128), generator=source, dtype=torch.int8)
    codes[0, :2] = torch.tensor([low, high])
    scales = (torch.rand(5, 128 // group if group else 1, generator=source) + 0.5).to(torch.bfloat16)
    found = block_kind(Scheme(bits=bits, group=group), 128, scales)
    assert found == kind
    stored = blocks(codes, scales, found)
    read = gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(read.copy()), scaled(codes, scales.float()))


def test_what_blocks_do_not_hold() -> None:
    scales = torch.ones(2, 4)
    assert block_kind(Scheme(bits=3, group=32), 128, scales) is None
    assert block_kind(Scheme(bits=4, group=16), 64, scales) is None
    assert block_kind(Scheme(bits=4, group=None), 48, scales) is None
    assert block_kind(Scheme(bits=4, group=32), 128, 1e6 * scales) is None
    assert block_kind(Scheme(bits=4, group=32), 128, 1e-9 * scales) is None
