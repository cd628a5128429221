"""A process's memory: its peak, and a C allocator told that large tensors come and go with every layer."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
MAPPED_BYTES = 4 * 2**20
TRIMMED_BYTES = 64 * 2**20
_LIBRARY = ctypes.CDLL(None)


def map_large_tensors() -> None:
    """From 4 MiB, a tensor gets pages of its own, which go back to the system with it. For this process, once, early.

    glibc otherwise raises that limit up to 32 MiB as tensors are freed: layers read ahead and temporaries then share
    heaps, and the holes between them grow with every layer (`tools/benchmarks/memory_over_layers.py`). From 1 MiB on,
    fresh pages would take a sixth of a forward pass. Where the system grants huge pages on request, torch asks for
    them. Does nothing to another C library.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at the first large tensor
    mallopt = getattr(_LIBRARY, "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(TRIM_THRESHOLD, TRIMMED_BYTES)  # setting the other alone leaves this at 128 KiB: a heap that pumps


def return_freed_pages() -> None:
    """Gives the holes in the heap back to the system; a few milliseconds. For when a layer has gone."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_bytes() -> int:
    """Peak resident memory of this process since its program was started.

    Not ru_maxrss where it can be helped: Linux hands that down from the parent, whatever it was.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * (int(found.group(1)) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
