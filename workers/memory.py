"""The C allocator of a worker's process, told that large tensors come and go with every layer."""

from __future__ import annotations

import ctypes
import os

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
MAPPED_BYTES = 2**20
TRIMMED_BYTES = 64 * 2**20


def map_large_tensors() -> None:
    """From 1 MiB, a tensor gets pages of its own, which go back to the system with it. For this process, once, early.

    glibc otherwise raises that limit up to 32 MiB as tensors are freed: layers read ahead and temporaries then share
    heaps, and the holes between them grow with every layer (`tests/benchmarks/memory_over_layers.py`: 8 MiB for each
    layer of 38). Where the system grants huge pages on request, torch asks for them, or else fresh pages cost time.
    Does nothing to another C library.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch at the first large tensor
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(TRIM_THRESHOLD, TRIMMED_BYTES)  # setting the other alone leaves this at 128 KiB: a heap that pumps
