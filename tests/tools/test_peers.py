"""A program that leaves matrices as they were is not taken for one that rounds well."""

import pytest
import torch

pytest.importorskip("gguf", reason="gguf, an extra, is not installed")
from tools.peers import levels_of


def test_rounded_rows_have_few_levels_in_each_group() -> None:
    dense_OI = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    scales_OS = dense_OI.unflatten(1, (2, 32)).abs().amax(-1) / 4
    codes_OSg = (dense_OI.unflatten(1, (2, 32)) / scales_OS[..., None]).round().clamp(-4, 3)
    assert levels_of((codes_OSg * scales_OS[..., None]).flatten(1), 32) <= 2**3
    assert levels_of(dense_OI, 32) == 32
