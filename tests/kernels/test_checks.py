"""What kernels ask of their arguments."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.kernels.checks import require_finite, require_rank, require_square


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
