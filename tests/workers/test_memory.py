"""The C allocator as workers set it."""

from pathlib import Path

import pytest
import torch

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
