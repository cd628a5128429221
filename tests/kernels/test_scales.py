"""When matrices of a stack differ so much in size that they are scaled first."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.kernels.scales import SPREAD, common_scales, equalize, scale_report


def test_ordinary_sizes_are_left_alone() -> None:
    weights = [torch.full((3, 4), size) for size in (1.0, 0.9 * SPREAD, 0.0)]
    assert common_scales(weights) == [1.0, 1.0, 1.0]
    assert scale_report([1.0, 1.0]) == {}
    assert common_scales([torch.zeros(2, 2)]) == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1e-30, 1e30), (1e30, 1.0), (5.0, 1e-3, 0.0), (1e-38, 1e38)])
def test_sizes_apart_become_one_size(sizes: tuple[float, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [(size * torch.randn(8, 5, generator=generator).clamp(-2, 2)).to(dtype) for size in sizes]
    scales = common_scales(weights)
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales), "powers of two: nothing is rounded"
    divided = [weight.double() / scale for weight, scale in zip(weights, scales, strict=True)]
    found = [float(weight.square().mean().sqrt()) for weight in divided]
    live = [size for size in found if size > 0]
    assert max(live) <= 2.0 * min(live)
    assert scale_report(scales) == {"scaled": scales}


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        common_scales([torch.ones(2), torch.tensor([math.nan, 1.0])])


def test_the_scales_meet_half_way_and_leave_zeros_alone() -> None:
    """Root mean squares of 2^10 and 2^30, of matrices of other shapes and with peaks of their own."""
    small = torch.full((3, 4), 2.0**10)
    large = torch.zeros(8, 8)
    large[::2, ::2] = 2.0**31  # a quarter of the numbers
    assert common_scales([small, large, torch.zeros(2, 2)]) == [2.0**-10, 2.0**10, 1.0]
    assert common_scales([torch.full((2, 2), 2.0**12), torch.zeros(2, 2)]) == [1.0, 1.0]


def test_only_what_needs_it_is_divided() -> None:
    alike = [torch.ones(2, 2), torch.full((2, 2), 3.0)]
    found, scales = equalize(alike)
    assert scales == [1.0, 1.0]
    assert all(one is other for one, other in zip(found, alike, strict=True))
    apart = [torch.full((2, 2), 2.0**20, dtype=torch.bfloat16), torch.full((2, 2), 1.0, dtype=torch.float64)]
    found, scales = equalize(apart)
    assert scales == [2.0**10, 2.0**-10]
    assert [weight.dtype for weight in found] == [torch.float32, torch.float64]
    assert [float(weight[0, 0]) for weight in found] == [2.0**10, 2.0**10]
    assert float(apart[0][0, 0]) == 2.0**20
