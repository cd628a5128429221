"""The dtype in which a CPU multiplies half precision fastest: a fixed rule of its instructions, never a timing.

Products are exact in float32, and sums are float32 in both cases, before they are rounded to half precision.
"""

import os
from functools import cache
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN at its first use
UNLIMITED = ("ALL", "DEFAULT")
HALF = (torch.float16, torch.bfloat16)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are multiplied: their own, or float32."""
    if device.type != "cpu" or dtype not in HALF or multiplies_fast(str(dtype).removeprefix("torch.")):
        return dtype
    return torch.float32


def multiplies_fast(dtype: str) -> bool:
    """Return True if the processor has instructions that make products of `bfloat16` or `float16` as fast as float32's.

    Without them, oneDNN takes 4 to 10 times as long (measured, limited to AVX2 and AVX-512). On a processor with tiles
    that oneDNN may not use, dot products in bfloat16 take 1.7 times as long, in float16 as long. On a processor without
    tiles they take half the time (measured on AMD Zen 4). An Arm with `bf16` is assumed to be fast, without a measure.
    """
    flags, limit = processor_flags(), os.environ.get(LIMIT, "ALL").upper()
    tiles = limit in UNLIMITED or "AMX" in limit
    if dtype == "float16":
        return ("amx_fp16" in flags and tiles) or ("avx512_fp16" in flags and (tiles or "FP16" in limit))
    if "amx_bf16" in flags:
        return tiles
    return ("avx512_bf16" in flags and limit in UNLIMITED) or "bf16" in flags


def processor_flags() -> frozenset[str]:
    """Return the flags of the first processor, by Linux' names; none on other systems."""
    return _flags_in(CPU_INFO)


@cache
def _flags_in(file: Path) -> frozenset[str]:
    """Read them once, since products ask for them."""
    if not file.exists():
        return frozenset()
    with file.open(errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()
