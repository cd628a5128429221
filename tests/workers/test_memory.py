"""The C allocator and the caches of kernels as workers set them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lamina.processor_lamina import multiplies_fast
from workers.memory import map_large_tensors, return_freed_pages

STATM = Path("/proc/self/statm")
MIB = 2**20


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * 4096


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux")
def test_holes_go_back_to_the_system() -> None:
    map_large_tensors()
    small = [torch.ones(MIB // 4) for _ in range(200)]  # 1 MiB each, in the heap
    full = resident_bytes()
    last = small.pop()
    small.clear()
    assert resident_bytes() > full - 100 * MIB, "the last one keeps the heap below it"
    return_freed_pages()
    assert resident_bytes() < full - 150 * MIB
    assert float(last.sum()) == MIB // 4


PRODUCTS = """
import torch
from workers.memory import bound_kernel_caches, return_freed_pages

bound_kernel_caches()
torch.set_num_threads(1)
values = torch.ones(512, 64, dtype=torch.bfloat16)

def resident():
    return_freed_pages()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for rank in range(1, 701):
    torch.nn.functional.linear(values, torch.ones(rank, 64, dtype=torch.bfloat16))
    if rank == 300:
        before = resident()
print((resident() - before) // 2**20)
"""


@pytest.mark.skipif(not STATM.exists() or not multiplies_fast("bfloat16"), reason="needs a CPU that compiles kernels")
def test_kernels_of_earlier_shapes_are_dropped() -> None:
    """400 shapes more: at torch's limits their kernels take 250 MiB."""
    ended = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 100
