"""The peak memory of a process, and settings of its C allocator and of its compiled kernels."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
MAPPED_BYTES = 4 * 2**20
TRIMMED_BYTES = 64 * 2**20
CACHED_KERNELS = 256  # room for a layer and its draft; with the default, 1024, those of many layers add up
TRAINING_KERNELS = 4096  # of all layers at once: each step of a training needs them again
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # of oneDNN, and of torch above it
_LIBRARY = ctypes.CDLL(None)


def map_large_tensors() -> None:
    """Allocate tensors of 4 MiB and more in separate pages, which return to the system when the tensor is freed.

    Call it once, early in the process. By default, glibc raises this limit up to 32 MiB as tensors are freed. Layers
    that are read ahead then share heaps with temporaries, and heap fragmentation grows with every layer
    (`tools/benchmarks/memory_growth.py`). With a limit of 1 MiB, fresh pages would take a sixth of a forward pass.
    torch requests huge pages if the system grants them. Other C libraries are not configured.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at the first large tensor
    mallopt = getattr(_LIBRARY, "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(TRIM_THRESHOLD, TRIMMED_BYTES)  # with the default of 128 KiB, the heap would constantly grow and shrink


def bound_kernel_caches(kernels: int = CACHED_KERNELS) -> None:
    """Limit the kernels that a CPU's products in half precision leave in memory: oneDNN compiles one for each shape.

    Call it before the process's first product. A kernel takes 0.65 MB, and each layer has its own ranks: with torch's
    limit of 1,024 kernels, a pass through 30 layers of SmolLM2-135M held 0.6 GB of them. Limits of the user stay, and
    those of an earlier call. A training that has no room for its kernels compiles them again in each step, which then
    takes 1.6 times as long (the same model).
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(kernels))


def return_freed_pages() -> None:
    """Return free pages of the heap to the system, after a layer is freed. Takes a few milliseconds."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_bytes() -> int:
    """Return the peak resident memory of this process since its program started.

    On Linux this is not ru_maxrss, because a child inherits that from its parent.
    """
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * (int(peak.group(1)) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
