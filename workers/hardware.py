"""Describes the hardware and versions that determine the bytes of a worker's results."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType

import torch

from lamina.processor_lamina import CPU_INFO, LIMIT, processor_flags
from manifests import VERSION
from manifests.schema import Workers
from workers.device_settings import device_settings

# Processor flags that determine how oneDNN multiplies half precision.
HALF_PRECISION = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16", "bf16", "asimdhp")


def describe_hardware(device: torch.device) -> dict[str, str]:
    """Return the fields of a device. Workers with equal fields compute the same bytes.

    The fields of a GPU are its name, compute capability, versions of torch and CUDA, and settings. The fields of a CPU
    are its maker, and the instructions for which torch, oneMKL and oneDNN choose kernels.
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_fault(threads: int, cores: int, where: str) -> str | None:
    """Return why a worker with more threads than `cores` is refused (they would wait for each other), or None."""
    if threads <= cores:
        return None
    return (
        f"workers.cpus: {threads} threads for each worker are more than the cores of {where}, {cores}; set "
        f"workers.cpus: {cores} or fewer, or use nodes with more cores"
    )


def unused_here(workers: Workers) -> str | None:
    """Return which GPUs of this machine, or which half or more of its cores, the workers of a job leave unused, or
    None."""
    cores, gpus = machine_cores(), torch.cuda.device_count()
    used = math.ceil(workers.max * workers.gpus)
    if used < gpus:
        return (
            f"{gpus - used} of this machine's {gpus} GPUs stay unused: workers.max is {workers.max}, with "
            f"workers.gpus: {workers.gpus:g} each"
        )
    threads = workers.max * workers.cpus
    if gpus or 2 * threads > cores or cores == 1:
        return None
    return (
        f"{cores - threads} of this machine's {cores} cores stay unused: workers.max is {workers.max}, with "
        f"workers.cpus: {workers.cpus} each"
    )


def software_versions() -> dict[str, str]:
    """Return the versions that must be the same in workers and the command, which exchange pickled values."""
    return {"Lamina": VERSION, "Python": platform.python_version(), **_library_versions()}


@functools.cache
def _library_versions() -> Mapping[str, str]:
    """Read the versions of libraries once, as each takes milliseconds."""
    return MappingProxyType({name: version(name) for name in ("ray", "torch", "transformers")})


def _cpu_maker() -> str:
    cpu_info = CPU_INFO.read_text(errors="replace") if CPU_INFO.exists() else ""
    maker = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", cpu_info, re.MULTILINE)
    return maker.group(1) if maker else "unknown make"


def _half_precision() -> str:
    flags = processor_flags()
    promised = " ".join(name for name in HALF_PRECISION if name in flags) or "none"
    return f"{promised}, at most {os.environ[LIMIT]}" if LIMIT in os.environ else promised


def differing(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Return differences as `torch 2.12 instead of 2.13, …`; an empty string if there are none."""
    return ", ".join(
        f"{field} {actual.get(field)} instead of {value}"
        for field, value in expected.items()
        if actual.get(field) != value
    )
