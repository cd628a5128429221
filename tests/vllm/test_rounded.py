"""Packed weights as the compress side stores them, multiplied out by the package that serves them."""

import pytest
import torch
from vllm.utils.torch_utils import set_default_torch_dtype

from lamina import LaminaConfig
from lamina.engine_vllm.rounded import PARTS, Scheme, Unpacking, check_kernel, scheme_of, unpack
from manifests.records import Scheme as Stored
from pipeline.kernels.packing import code_range, scaled
from pipeline.rounding.schemes import packed_shapes, packed_tensors, quantization_config


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("columns", "group"), [(64, 32), (48, 16), (37, None), (1, None)])
def test_codes_come_back(bits: int, columns: int, group: int | None) -> None:
    """Of words that numbers end and begin in, and of more rows than are unpacked at a time."""
    low, high = code_range(bits)
    codes_OI = torch.randint(low, high + 1, (1030, columns), dtype=torch.int8)
    codes_OI[0, 0], codes_OI[-1, -1] = low, high
    scales_OS = torch.rand(1030, 1 if group is None else columns // group) + 0.5
    stored = packed_tensors("p", codes_OI, scales_OS, Stored(bits=bits, group=group))
    parts = [stored[f"p.{part}"] for part in PARTS]
    meant = scaled(codes_OI, scales_OS)
    assert torch.equal(unpack(*parts, bits), meant)
    found: list[torch.Tensor] = []
    unpacking = Unpacking(Scheme(bits, group), found.append)
    for part, tensor in reversed([*zip(PARTS, parts, strict=True)]):
        assert not found
        unpacking.take(part, tensor)
    assert torch.equal(found[0], meant)
    shapes = packed_shapes({"p.weight": tuple(codes_OI.shape)}, {"p": Stored(bits=bits, group=group)})
    assert Scheme(bits, group).shapes(*codes_OI.shape) == {part: shapes[f"p.{part}"] for part in PARTS}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_levels_are_looked_up(bits: int) -> None:
    low, high = code_range(bits)
    codes_OI = torch.randint(low, high + 1, (1030, 48), dtype=torch.int8)
    scales_OS, levels_n = torch.rand(1030, 3) - 0.5, torch.randn(2**bits).sort().values
    stored = packed_tensors("p", codes_OI, scales_OS, Stored(bits=bits, group=16, levels="learned"), levels_n)
    scheme = scheme_of(LaminaConfig(level_tables={"p": {"bits": bits, "group": 16, "levels": "learned"}}), "p")
    assert scheme == Scheme(bits, 16, table=True)
    with pytest.raises(ValueError, match="no kernel looks levels up"):
        check_kernel(scheme)
    placed: list[torch.Tensor] = []
    unpacking = Unpacking(scheme, placed.append)
    for part in scheme.parts:
        unpacking.take(part, stored[f"p.{part}"])
    assert torch.equal(placed[0], scaled(codes_OI, scales_OS, levels_n))
    shapes = packed_shapes({"p.weight": (1030, 48)}, {"p": Stored(bits=bits, group=16, levels="learned")})
    assert scheme.shapes(1030, 48) == {part: shapes[f"p.{part}"] for part in scheme.parts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_not_rounded_to_the_scales_dtype_in_a_wider_model(dtype: torch.dtype) -> None:
    """A code of 8 bits times a scale in bfloat16 has more digits than bfloat16."""
    codes_OI = torch.arange(-128, 128, dtype=torch.int8).view(4, 64)
    scales_OS = (torch.rand(4, 2) + 0.5).bfloat16()
    stored = packed_tensors("p", codes_OI, scales_OS, Stored(bits=8, group=32))
    placed: list[torch.Tensor] = []
    with set_default_torch_dtype(dtype):  # as while vLLM makes a model
        unpacking = Unpacking(Scheme(8, 32), placed.append)
    for part in PARTS:
        unpacking.take(part, stored[f"p.{part}"])
    assert torch.equal(placed[0], scaled(codes_OI, scales_OS.to(dtype)))


def test_schemes() -> None:
    """As config.json says them: one for each linear but those ignored, or by name; other layouts are vLLM's affair."""
    one, other = Stored(bits=4, group=32), Stored(bits=8, group=None)
    same = LaminaConfig(quantization_config=quantization_config({"a": one, "b": one}, ["a", "b", "head"]))
    assert [scheme_of(same, path) for path in ("a", "b", "head")] == [Scheme(4, 32), Scheme(4, 32), None]
    both = LaminaConfig(quantization_config=quantization_config({"a": one, "b": other}, ["a", "b", "head"]))
    assert [scheme_of(both, path) for path in ("a", "b", "head")] == [Scheme(4, 32), Scheme(8, None), None]
    ends = LaminaConfig(quantization_config=quantization_config({"a": one, "table": one, "head": one}, ["a", "head"]))
    assert [scheme_of(ends, path, path != "table") for path in ("head", "table")] == [Scheme(4, 32)] * 2
    assert scheme_of(same, "table", False) is None
    assert scheme_of(LaminaConfig(), "a") is None
    assert (
        scheme_of(LaminaConfig(quantization_config={**both.quantization_config, "format": "int-quantized"}), "a")
        is None
    )
