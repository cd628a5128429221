"""Encodes the linears of a saved model in formats of other tools, and decodes them by transformers or these tools.

compressed-tensors has an encoder that runs on a CPU. The others are written here from their formats.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

Encoded = tuple[dict[str, Tensor], Tensor]  # the parts of a weight, and the weight that they stand for
LINEARS = ("_proj.weight", "_proj_with_mqa.weight")
FUSED = ("experts.gate_up_proj", "experts.down_proj")
E4M3_MAX = 448.0


def encode_model(
    source: Path,
    directory: Path,
    kind: str,
    dtype: torch.dtype = torch.bfloat16,
    kind_of: Callable[[str], str] | None = None,
    **fields: Any,
) -> tuple[Path, Path]:
    """Writes a model twice: with its linears encoded, and decoded again. Returns both directories.

    `kind_of`: the kind of each weight by name, where kinds differ; empty: it stays as it is. `fields`: further ones of
    `quantization_config`.
    """
    encoded, decoded = directory / "encoded", directory / "decoded"
    for target in (encoded, decoded):
        shutil.copytree(source, target)
    weight_map: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        codes, plain = {}, {}
        for name, tensor in load_file(file).items():
            own = kind if kind_of is None else kind_of(name)
            if own and name.endswith(FUSED if kind == "mxfp4" else LINEARS):
                parts, plain[name] = ENCODERS[own][0](tensor.to(dtype))
                path = f"{name}_" if kind == "mxfp4" else name.removesuffix("weight")
                codes |= {path + part: value.contiguous() for part, value in parts.items()}
            else:
                codes[name] = plain[name] = tensor.to(dtype)
        save_file(codes, encoded / file.name, {"format": "pt"})
        save_file(plain, decoded / file.name, {"format": "pt"})
        weight_map |= dict.fromkeys(codes, file.name)
    if (index := encoded / "model.safetensors.index.json").exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    field = {"quantization_config": {**ENCODERS[kind][1], **fields}}
    for target, of_target in ((encoded, field), (decoded, {})):
        config = json.loads((target / "config.json").read_text())
        config |= {"dtype": str(dtype).removeprefix("torch."), **of_target}
        (target / "config.json").write_text(json.dumps(config))
    return encoded, decoded


# -- fp8 -------------------------------------------------------------------------------------------------------------


def fp8_blocks(weight_OI: Tensor, block: tuple[int, int]) -> Encoded:
    """Encodes with a scale for each block; transformers decodes it where blocks divide the weight."""
    rows, columns = weight_OI.shape
    grid = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight_OI.float()
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales_RC = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    codes = (blocks / scales_RC[:, None, :, None]).to(torch.float8_e4m3fn)
    whole = (codes.float() * scales_RC[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    codes_OI = codes.view(torch.uint8).flatten(2).flatten(0, 1)[:rows, :columns].contiguous().view(codes.dtype)
    decoded = whole.to(weight_OI.dtype)
    if not rows % block[0] and not columns % block[1]:
        judge: Any = Fp8Dequantize(SimpleNamespace())
        assert torch.equal(judge._dequantize_one(codes_OI, scales_RC, weight_OI.dtype), decoded)
    return {"weight": codes_OI, "weight_scale_inv": scales_RC}, decoded


def fp8_tensor(weight_OI: Tensor) -> Encoded:
    """Encodes with one scale."""
    scale = weight_OI.float().abs().max() / E4M3_MAX
    codes_OI = (weight_OI.float() / scale).to(torch.float8_e4m3fn)
    judge: Any = Fp8Dequantize(SimpleNamespace())
    return {"weight": codes_OI, "weight_scale_inv": scale}, judge._dequantize_one(codes_OI, scale, weight_OI.dtype)


def fp8_plain(weight_OI: Tensor, by_rows: bool) -> Encoded:
    """Encodes with `weight_scale`: one scale, or one for each row."""
    most = weight_OI.float().abs().amax(1) if by_rows else weight_OI.float().abs().max()
    scales = most / E4M3_MAX
    codes_OI = (weight_OI.float() / scales.view(-1, 1)).to(torch.float8_e4m3fn)
    judge: Any = Fp8Dequantize(SimpleNamespace())
    decoded = judge._dequantize_one(codes_OI, scales.view(-1, 1), weight_OI.dtype)
    return {"weight": codes_OI, "weight_scale": scales}, decoded


# -- compressed-tensors ----------------------------------------------------------------------------------------------


def scheme(layout: str, **weights: Any) -> dict[str, Any]:
    """Returns `quantization_config` for one scheme of compressed-tensors."""
    group = {"targets": ["Linear"], "format": layout, "weights": weights}
    field = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {**field, "quantization_status": "compressed", "ignore": ["lm_head"]}


def compressed(field: dict[str, Any]) -> Callable[[Tensor], Encoded]:
    """Returns an encoder that calls the package itself, also to decode."""

    def encode(weight_OI: Tensor) -> Encoded:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        group = QuantizationScheme(**{key: field["config_groups"]["group_0"][key] for key in ("targets", "weights")})
        args = group.weights
        assert args is not None
        columns = weight_OI.shape[1]
        step = {"group": args.group_size, "channel": columns, "tensor": columns}[str(args.strategy)]
        grouped = weight_OI.unflatten(1, (-1, step))
        axes: Any = (0, 1, 2) if args.strategy == "tensor" else (2,)
        lows, highs = grouped.amin(dim=axes), grouped.amax(dim=axes)
        scales, zeros = calculate_qparams(lows, highs, args)
        scales = scales.to(weight_OI.dtype).reshape((1,) if args.strategy == "tensor" else lows.shape)
        state = {"weight": weight_OI, "weight_scale": scales}
        if not args.symmetric:
            state["weight_zero_point"] = zeros.to(torch.int8).reshape(scales.shape)
        package: Any = BaseCompressor.get_value_from_registry(field["format"])
        parts = package.compress(state, group)
        decoded = package.decompress(parts, group)["weight"]
        return parts, decoded.to(weight_OI.dtype)

    return encode


# -- GPTQ and AWQ ----------------------------------------------------------------------------------------------------


def pack_columns(numbers: Tensor, bits: int) -> Tensor:
    """Packs unsigned numbers (n, m) along the last axis into int32 words, lowest bits first."""
    per_word = 32 // bits
    shifted = numbers.long().unflatten(1, (-1, per_word)) << torch.arange(0, 32, bits)
    words = shifted.sum(dim=-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def grouped_codes(weight_OI: Tensor, bits: int, groups_I: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes (O, I), zeros (O, S) and scales (O, S) float16, of asymmetric groups of columns."""
    count = int(groups_I.max()) + 1
    most = 2**bits - 1
    members = [weight_OI.float()[:, groups_I == group] for group in range(count)]
    lows = torch.stack([each.amin(1).clamp(max=0) for each in members], 1)
    highs = torch.stack([each.amax(1).clamp(min=0) for each in members], 1)
    scales_OS = ((highs - lows) / most).half()
    zeros_OS = (-lows / scales_OS.float()).round().clamp(1, most)
    codes_OI = (weight_OI.float() / scales_OS.float()[:, groups_I] + zeros_OS[:, groups_I]).round().clamp(0, most)
    return codes_OI, zeros_OS, scales_OS


def gptq(weight_OI: Tensor, bits: int = 4, group: int = 16, ordered: bool = False, offset: int = 1) -> Encoded:
    """Encodes in GPTQ's first checkpoint format, which stores zeros minus one, or in the second, without `offset`."""
    columns = weight_OI.shape[1]
    groups_I = torch.arange(columns) // group
    if ordered:
        groups_I = groups_I[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    codes_OI, zeros_OS, scales_OS = grouped_codes(weight_OI, bits, groups_I)
    decoded = (codes_OI - zeros_OS[:, groups_I]) * scales_OS.float()[:, groups_I]
    parts = {
        "qweight": pack_columns(codes_OI, bits).T,
        "qzeros": pack_columns((zeros_OS - offset).T, bits),
        "scales": scales_OS.T,
        "g_idx": groups_I.int(),
    }
    return parts, decoded.to(weight_OI.dtype)


def awq(weight_OI: Tensor, group: int = 16) -> Encoded:
    """Encodes in AWQ's gemm format."""
    groups_I = torch.arange(weight_OI.shape[1]) // group
    codes_OI, zeros_OS, scales_OS = grouped_codes(weight_OI, 4, groups_I)
    decoded = (codes_OI - zeros_OS[:, groups_I]) * scales_OS.float()[:, groups_I]
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the row of each place in a word

    def packed(numbers: Tensor) -> Tensor:
        return pack_columns(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    return {"qweight": packed(codes_OI.T), "qzeros": packed(zeros_OS.T), "scales": scales_OS.T}, decoded.to(
        weight_OI.dtype
    )


# -- MXFP4 -----------------------------------------------------------------------------------------------------------


def mxfp4(weight_EIO: Tensor) -> Encoded:
    """Encodes fused experts as gpt-oss stores them; transformers decodes them."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    groups = weight_EIO.float().mT.unflatten(-1, (-1, 32))
    exponents = torch.log2(groups.abs().amax(-1) / 6.0).ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    parts = {"blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": (exponents + 127).to(torch.uint8)}
    return parts, convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=weight_EIO.dtype)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = scheme("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=16)
INT4_ZEROS = scheme("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=16)
INT8 = scheme("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
FLOAT = scheme("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
FLOAT_TENSOR = scheme("float-quantized", num_bits=8, type="float", symmetric=True, strategy="tensor")
ENCODERS: dict[str, tuple[Callable[[Tensor], Encoded], dict[str, Any]]] = {
    "fp8 blocks": (lambda w: fp8_blocks(w, (16, 16)), {**FP8, "weight_block_size": [16, 16]}),
    "fp8 ragged": (lambda w: fp8_blocks(w, (32, 32)), {**FP8, "weight_block_size": [32, 32]}),
    "fp8 tensor": (fp8_tensor, {**FP8, "weight_block_size": None}),
    "fp8 plain": (lambda w: fp8_plain(w, by_rows=False), FP8),
    "fp8 rows": (lambda w: fp8_plain(w, by_rows=True), FP8),
    "float": (compressed(FLOAT), FLOAT),
    "float tensor": (compressed(FLOAT_TENSOR), FLOAT_TENSOR),
    "int4": (compressed(INT4), INT4),
    "int4 zeros": (compressed(INT4_ZEROS), INT4_ZEROS),
    "int8": (compressed(INT8), INT8),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}),
    "gptq ordered": (
        lambda w: gptq(w, ordered=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    ),
    "gptq8": (lambda w: gptq(w, bits=8), {"quant_method": "gptq", "bits": 8, "group_size": 16}),
    "gptq v2": (
        lambda w: gptq(w, offset=0),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
}
