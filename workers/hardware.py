"""What decides the bytes of a result, as a worker finds it: hardware and versions."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version

import torch

from lamina.processor_lamina import CPU_INFO, LIMIT, processor_flags
from manifests import VERSION
from workers.device_settings import device_settings

# Of a processor's flags, those by which oneDNN chooses how half precision is multiplied.
HALF_PRECISION = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16", "bf16", "asimdhp")


def describe_hardware(device: torch.device) -> dict[str, str]:
    """Field -> value; results have the same bytes where all are equal.

    A GPU: its name, compute capability, torch and CUDA versions, settings. A CPU: its maker and the instructions that
    torch's, oneMKL's and oneDNN's kernels are chosen by.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return {
            "device": torch.cuda.get_device_name(device),
            "compute_capability": f"{major}.{minor}",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            **device_settings(),
        }
    return {
        "device": f"CPU of {_cpu_maker()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "half_precision": _half_precision(),
        "torch": torch.__version__,
    }


def machine_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_fault(threads: int, cores: int, where: str) -> str | None:
    """Why a worker with so many threads is refused there: they would wait for one another. None: it is not refused."""
    if threads <= cores:
        return None
    return (
        f"workers.cpus: {threads} threads for each worker are more than the cores of {where}, {cores}; set "
        f"workers.cpus: {cores} or fewer, or use nodes with more cores"
    )


def software_versions() -> dict[str, str]:
    """What a worker and the command must share: they exchange values of these libraries."""
    named = {name: version(name) for name in ("ray", "torch", "transformers")}
    return {"Lamina": VERSION, "Python": platform.python_version(), **named}


def _cpu_maker() -> str:
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", _cpu_info(), re.MULTILINE)
    return found.group(1) if found else "unknown make"


def _half_precision() -> str:
    flags = processor_flags()
    promised = " ".join(name for name in HALF_PRECISION if name in flags) or "none"
    return f"{promised}, at most {os.environ[LIMIT]}" if LIMIT in os.environ else promised


def _cpu_info() -> str:
    return CPU_INFO.read_text(errors="replace") if CPU_INFO.exists() else ""


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """`torch 2.12 instead of 2.13, …`, or nothing."""
    return ", ".join(
        f"{field} {found.get(field)} instead of {value}"
        for field, value in expected.items()
        if found.get(field) != value
    )
