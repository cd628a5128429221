"""Codes as llama.cpp's blocks, read back by the package gguf."""

from __future__ import annotations

import pytest
import torch

from manifests.records import LevelKind, Scheme
from pipeline.checkpoint.gguf_blocks import block_kind, blocks, eight_bits
from pipeline.kernels.gptq import round_to_nearest
from pipeline.kernels.levels import iq4_nl_levels, normal_levels
from pipeline.kernels.packing import code_range, scaled


@pytest.mark.parametrize(
    ("bits", "levels", "kind"), [(8, "uniform", "Q8_0"), (4, "uniform", "Q4_0"), (4, "iq4_nl", "IQ4_NL")]
)
@pytest.mark.parametrize("group", [32, 64, None])
def test_the_same_numbers_come_back(bits: int, levels: LevelKind, kind: str, group: int | None) -> None:
    gguf = pytest.importorskip("gguf")
    source = torch.Generator().manual_seed(bits)
    low, high = code_range(bits)
    codes = torch.randint(low, high + 1, (5, 128), generator=source, dtype=torch.int8)
    codes[0, :2] = torch.tensor([low, high])
    scales = (torch.rand(5, 128 // group if group else 1, generator=source) + 0.5).to(torch.bfloat16)
    table = iq4_nl_levels(bits).to(torch.bfloat16) if levels == "iq4_nl" else None
    found = block_kind(Scheme(bits=bits, group=group, levels=levels), 128, scales, table)
    assert found == kind
    stored = blocks(codes, scales, found)
    read = gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(read.copy()), scaled(codes, scales.float(), table))


def test_what_blocks_do_not_hold() -> None:
    scales = torch.ones(2, 4)
    assert block_kind(Scheme(bits=3, group=32), 128, scales) is None
    assert block_kind(Scheme(bits=4, group=16), 64, scales) is None
    assert block_kind(Scheme(bits=4, group=None), 48, scales) is None
    assert block_kind(Scheme(bits=4, group=32), 128, 1e6 * scales) is None
    assert block_kind(Scheme(bits=4, group=32), 128, 1e-9 * scales) is None
    assert block_kind(Scheme(bits=4, group=32, levels="normal"), 128, scales, normal_levels(4)) is None
    trained = iq4_nl_levels(4) + 0.5
    assert block_kind(Scheme(bits=4, group=32, levels="iq4_nl"), 128, scales, trained) is None


def test_scales_that_hardly_count_may_lose_digits() -> None:
    """A group of zeros, and one so small that its scale is subnormal in float16."""
    rounded = round_to_nearest(
        torch.cat((torch.ones(1, 32), torch.zeros(1, 32), torch.full((1, 32), 1e-3)), 1),
        4,
        32,
        torch.float32,
        levels="iq4_nl",
    )
    scheme = Scheme(bits=4, group=32, levels="iq4_nl")
    assert block_kind(scheme, 96, rounded.scales, rounded.levels) == "IQ4_NL"
    assert block_kind(scheme, 32, rounded.scales[:, 2:] / 1e3, rounded.levels) is None


def test_eight_bits_are_the_nearest() -> None:
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight[1, :32] = 0.0
    read = gguf.quants.dequantize(eight_bits(weight).numpy(), gguf.GGMLQuantizationType.Q8_0)
    steps = weight.float().abs().unflatten(1, (-1, 32)).amax(2) / 127.0
    errors = (torch.from_numpy(read.copy()) - weight.float()).abs().unflatten(1, (-1, 32)).amax(2)
    assert (errors <= 0.52 * steps).all()
    with pytest.raises(ValueError, match="beyond"):
        eight_bits(torch.full((1, 32), 1e8))
