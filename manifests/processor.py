"""What a processor does with half precision.

A virtual machine may promise AMX without its tiles: oneDNN believes it, and the first half precision product ends the
process (SIGILL). Found out before torch multiplies anything.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN at its first use
WITHOUT_TILES = "AVX512_CORE_FP16"  # the most that comes without them
UNLIMITED = ("ALL", "DEFAULT")
_TILES_LEAF = 0x1D
# uint32 (*)(uint32 leaf, uint32 subleaf), System V: push rbx; mov eax, edi; mov ecx, esi; cpuid; pop rbx; ret
_CPUID = bytes.fromhex("53 89f8 89f1 0fa2 5b c3")


def settle_processor() -> None:
    """Limits oneDNN to what the processor has, unless `ONEDNN_MAX_CPU_ISA` says what it may use."""
    if LIMIT not in os.environ and "amx_tile" in processor_flags() and tile_palettes() == 0:
        os.environ[LIMIT] = WITHOUT_TILES


def multiplies_fast(dtype: str) -> bool:
    """Whether products of `bfloat16` or `float16` are no slower than those of float32, as their instructions tell.

    Without any, oneDNN takes 4 to 10 times as long (measured, limited to AVX2 and AVX-512). Beside tiles that it may
    not use, bfloat16's dot products take 1.7 times, float16's as long. Where a processor has these alone, or is an Arm
    with `bf16`, they are taken to be fast: none was measured.
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


def tile_palettes() -> int | None:
    """How many ways of cutting its tiles an x86-64 processor knows: 1 where it has tiles. None: it cannot be asked."""
    if platform.machine() != "x86_64":
        return None
    import ctypes
    import mmap

    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened system
        return None
    code.write(_CPUID)
    place = ctypes.c_char.from_buffer(code)
    cpuid = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(ctypes.addressof(place))
    found: int = cpuid(_TILES_LEAF, 0)
    return found
