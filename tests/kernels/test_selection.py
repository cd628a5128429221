"""The n-th largest, ties included."""

import pytest
import torch

from pipeline.kernels.selection import nth_largest


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_nth_largest_is_the_sorted_one(count: int) -> None:
    values = torch.tensor([2.0, 5.0, 2.0, -1.0, 3.0])
    assert float(nth_largest(values, count)) == sorted(values.tolist(), reverse=True)[count - 1]
