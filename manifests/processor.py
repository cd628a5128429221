"""A processor that promises more than it has.

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
_TILES_LEAF = 0x1D
# uint32 (*)(uint32 leaf, uint32 subleaf), System V: push rbx; mov eax, edi; mov ecx, esi; cpuid; pop rbx; ret
_CPUID = bytes.fromhex("53 89f8 89f1 0fa2 5b c3")


def settle_processor() -> None:
    """Limits oneDNN to what the processor has, unless `ONEDNN_MAX_CPU_ISA` says what it may use."""
    if LIMIT not in os.environ and promises_tiles() and tile_palettes() == 0:
        os.environ[LIMIT] = WITHOUT_TILES


def promises_tiles() -> bool:
    """Whether Linux names tiles among the first processor's flags."""
    if not CPU_INFO.exists():
        return False
    with CPU_INFO.open(errors="replace") as lines:
        return "amx_tile" in next((line for line in lines if line.startswith("flags")), "").split()


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
