"""Weights of a few bits in the pack-quantized layout of compressed-tensors (docs/formats.md#rounded-tensors).

vLLM multiplies them packed if the platform has a kernel for the bits, the group and the widths. Otherwise, and with a
table of levels, a matrix is unpacked at loading: the outputs are correct, but it is as large as an unrounded one.
O outputs, I inputs, W words per row, n levels.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.platforms import current_platform

from lamina.levels_lamina import scaled_levels

PACKED, SCALE, SHAPE = PARTS = ("weight_packed", "weight_scale", "weight_shape")
LEVELS = "weight_levels"
LAYOUT, EVERY, WORD_BITS = "pack-quantized", "Linear", 32
ROWS = 1024  # unpacked at a time
OPERATOR = "cpu_gemm_wna16"


class Scheme(NamedTuple):
    """Codes of `bits` bits, with a scale per `group` columns of a row; None: per row.

    `table`: codes are indices of a stored table of levels.
    """

    bits: int
    group: int | None
    table: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the stored tensors."""
        return (*PARTS, LEVELS) if self.table else PARTS

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the packed tensors of a weight (O, I)."""
        scales = 1 if self.group is None else inputs // self.group
        shapes = {PACKED: (outputs, math.ceil(inputs * self.bits / WORD_BITS)), SCALE: (outputs, scales), SHAPE: (2,)}
        return {**shapes, LEVELS: (2**self.bits,)} if self.table else shapes


def scheme_of(config: Any, path: str, linear: bool = True) -> Scheme | None:
    """Return the scheme of a module in `quantization_config` or `level_tables`; None if there is none, or for another
    layout.

    `linear`: entries for all linears apply to the module. A table of embeddings must be named.
    """
    if (tabled := (getattr(config, "level_tables", None) or {}).get(path)) is not None:
        return Scheme(tabled["bits"], tabled["group"], table=True)
    field = getattr(config, "quantization_config", None) or {}
    if field.get("format") != LAYOUT or path in field.get("ignore", ()):
        return None
    for group in field.get("config_groups", {}).values():
        if path in group["targets"] or (linear and EVERY in group["targets"]):
            return Scheme(group["weights"]["num_bits"], group["weights"].get("group_size"))
    return None


def check_kernel(scheme: Scheme) -> None:
    """Raise ValueError for levels without a kernel, and for a dtype with which vLLM would fail in the first forward
    pass."""
    if scheme.table:
        raise ValueError("no kernel looks levels up in a table")
    if current_platform.is_cpu() and torch.get_default_dtype() == torch.float32:
        raise ValueError("CPU kernels for packed weights compute in bfloat16 or float16, not in float32")


def check_operator(linear: Any) -> None:
    """Raise ValueError if vLLM chose a kernel whose operator is missing in its build for this CPU.

    vLLM considers only bits and widths, and would fail in the first forward pass.
    """
    kernel = getattr(getattr(linear, "scheme", None), "kernel", None)
    if isinstance(kernel, CPUWNA16LinearKernel) and not hasattr(torch.ops._C, OPERATOR):
        raise ValueError(f"vLLM's build for this CPU has no operator {OPERATOR}, which needs AVX-512 on x86")


def unpack(packed_OW: Tensor, scales_OS: Tensor, shape: Tensor, bits: int, levels_n: Tensor | None = None) -> Tensor:
    """Return the weight (O, I) in the scales' dtype: code · scale, or with a table the code's level · scale.

    A code is stored plus 2^(bits-1), which is the number of its level.
    """
    columns = int(shape[1])
    table_n = torch.arange(2**bits, device=packed_OW.device) - 2 ** (bits - 1) if levels_n is None else levels_n
    parts = zip(packed_OW.split(ROWS), scales_OS.split(ROWS), strict=True)
    return torch.cat([scaled_levels(packed_oW, scales_oS, table_n, columns) for packed_oW, scales_oS in parts])


class Unpacking:
    """Unpacks a weight after all of its tensors have been loaded, in any order.

    Products of codes and scales have at least the model's precision (torch's default dtype while vLLM makes the model):
    a model in float32 gets the weights that transformers computes with, not those rounded to the scales' bfloat16.
    """

    def __init__(self, scheme: Scheme, place: Callable[[Tensor], None]) -> None:
        self.scheme, self.place, self.dtype = scheme, place, torch.get_default_dtype()
        self.parts: dict[str, Tensor] = {}

    def take(self, part: str, tensor: Tensor) -> None:
        """Add one of the stored tensors."""
        self.parts[part] = tensor
        if len(self.parts) == len(self.scheme.parts):
            packed, scale, shape = (self.parts[part] for part in PARTS)
            scale = scale.to(torch.promote_types(scale.dtype, self.dtype))
            self.place(unpack(packed, scale, shape, self.scheme.bits, self.parts.get(LEVELS)))
            self.parts.clear()
