"""The checks of kernels' arguments."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.kernels.checks import all_finite, require_finite, require_rank, require_square


@pytest.mark.parametrize(
    ("values", "peak"), [([], 0.0), ([0.0], 0.0), ([-3.0, 1.0], 3.0), ([-1.0, 2.0], 2.0), ([-5.0], 5.0)]
)
def test_the_largest_magnitude(values: list[float], peak: float) -> None:
    assert require_finite("x", torch.tensor(values)) == peak


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_is_counted(bad: float, place: int) -> None:
    values = torch.ones(3)
    values[place] = bad
    with pytest.raises(ValueError, match="weight: 1 of 3 numbers are NaN or infinite"):
        require_finite("weight", values)
    with pytest.raises(ValueError, match="index: a real floating tensor is needed"):
        require_finite("index", torch.arange(3))


def test_square_matrices_and_batches_of_them() -> None:
    assert [require_square("x", torch.zeros(shape)) for shape in ((1, 1), (4, 3, 3), (5, 2, 3, 3))] == [1, 3, 3]
    for shape in ((3,), (2, 3), (3, 3, 2), (4, 0, 0)):
        with pytest.raises(ValueError, match="moment: a square matrix is needed"):
            require_square("moment", torch.zeros(shape))


def test_ranks() -> None:
    for rank in (1, 5):
        require_rank("rank", rank, 5)
    for rank in (0, 6, -1):
        with pytest.raises(ValueError, match=f"R1 must be within 1..5, not {rank}"):
            require_rank("R1", rank, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_is_found_wherever_it_stands(dtype: torch.dtype, bad: float) -> None:
    """Sizes about those of a vector register and of the chunks that threads take."""
    for size in (1, 2, 7, 33, 257, 40_000):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        assert bool(all_finite(values))
        for place in {0, size // 3, size - 1}:
            spoilt = values.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt)
    assert bool(all_finite(values[:0]))
