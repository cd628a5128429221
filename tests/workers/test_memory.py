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


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux")
def test_large_tensors_leave_no_holes() -> None:
    map_large_tensors()
    large = [torch.ones(2 * MIB) for _ in range(20)]  # 8 MiB each
    full = resident_bytes()
    last = large.pop()
    large.clear()
    assert resident_bytes() < full - 120 * MIB
    assert float(last.sum()) == 2 * MIB
