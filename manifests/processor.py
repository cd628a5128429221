"""Limits oneDNN on a processor that announces AMX but lacks it.

Some virtual machines list AMX among the processor's flags but have no tiles. oneDNN relies on the flag, and the first
product in half precision ends the process by SIGILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN at its first use
WITHOUT_AMX = "AVX512_CORE_FP16"  # the largest set of instructions without AMX
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def limit_onednn() -> None:
    """Set `ONEDNN_MAX_CPU_ISA` if the processor announces AMX and a product with it fails. A value set by the user
    stays.

    A child process tries the product once for each boot of the machine. The temporary folder keeps the answer.
    """
    if LIMIT not in os.environ and promises_amx() and not _amx_works():
        os.environ[LIMIT] = WITHOUT_AMX


def promises_amx() -> bool:
    """Return True if Linux lists `amx_tile` among the flags of the first processor."""
    if not CPU_INFO.exists():
        return False
    with CPU_INFO.open(errors="replace") as lines:
        return "amx_tile" in next((line for line in lines if line.startswith("flags")), "").split()


def _amx_works() -> bool:
    answer = Path(tempfile.gettempdir(), f"lamina-amx-{os.getuid()}-{BOOT_ID.read_text().strip()}")
    if answer.exists():
        return answer.read_text() == "works"
    works = product_works()
    with suppress(OSError):  # if the folder is full or read-only, the next process tries again
        unfinished = answer.with_suffix(f".{os.getpid()}")
        unfinished.write_text("works" if works else "fails")
        unfinished.replace(answer)
    return works


def product_works() -> bool:
    """Multiply in bfloat16 in a child process; return False if an illegal instruction ends it."""
    return subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True).returncode != -signal.SIGILL
