"""In which dtype a CPU multiplies numbers of half precision fastest: a fixed rule of its instructions, never a timing.

The products are exact in float32, the sums are float32's in both, and so is what is rounded to half precision.
"""

import os
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN at its first use
UNLIMITED = ("ALL", "DEFAULT")
HALF = (torch.float16, torch.bfloat16)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which products of numbers of `dtype` are computed: in their own, or in float32."""
    if device.type != "cpu" or dtype not in HALF or multiplies_fast(str(dtype).removeprefix("torch.")):
        return dtype
    return torch.float32


def multiplies_fast(dtype: str) -> bool:
    """Whether products of `bfloat16` or `float16` are no slower than those of float32, as their instructions tell.

    Without any, oneDNN takes 4 to 10 times as long (measured, limited to AVX2 and AVX-512). Beside tiles that it may
    not use, bfloat16's dot products take 1.7 times, float16's as long. Where a processor has these alone they take
    half (measured on AMD Zen 4). An Arm with `bf16` is assumed to be fast: none was measured.
    """
    flags, limit = processor_flags(), os.environ.get(LIMIT, "ALL").upper()
    tiles = limit in UNLIMITED or "AMX" in limit
    if dtype == "float16":
        return ("amx_fp16" in flags and tiles) or ("avx512_fp16" in flags and (tiles or "FP16" in limit))
    if "amx_bf16" in flags:
        return tiles
    return ("avx512_bf16" in flags and limit in UNLIMITED) or "bf16" in flags


def processor_flags() -> frozenset[str]:
    """What the first processor promises, as Linux names it; nothing elsewhere."""
    if not CPU_INFO.exists():
        return frozenset()
    with CPU_INFO.open(errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()
