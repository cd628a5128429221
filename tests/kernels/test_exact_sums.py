"""Sums of moments that do not depend on the order: every permutation, grouping and split gives the same bits."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeline.kernels import exact_sums
from pipeline.kernels.exact_sums import (
    Grid,
    MomentSum,
    choose_grid,
    empty_bands,
    exceeding,
    moment_rows,
    sample_squares,
    whole_moment,
)

CPU = torch.device("cpu")


def wide(tokens: int, features: int, seed: int = 0, spread: float = 6.0) -> Tensor:
    """Channels whose loudness differs by many powers of ten, with rare large values."""
    generator = torch.Generator().manual_seed(seed)
    values_TF = torch.randn(tokens, features, generator=generator)
    rare_TF = torch.rand(tokens, features, generator=generator) > 0.995
    return values_TF * torch.where(rare_TF, 50.0, 1.0) * torch.logspace(-spread / 2, spread / 2, features)


def naive_moment(values_TF: Tensor, heads: int, groups: int) -> Tensor:
    """Σ y yᵀ in float64, head by head."""
    rows_THd = values_TF.double().unflatten(1, (heads, -1))
    moments_Hdd = torch.einsum("thi,thj->hij", rows_THd, rows_THd)
    return moments_Hdd.unflatten(0, (groups, -1)).sum(dim=1)


def grid_of(values_TF: Tensor, sample: int, heads: int = 1, groups: int = 1) -> Grid:
    squares_Gd = sample_squares(values_TF[:sample], heads, groups)
    per_group = heads // groups
    return choose_grid(squares_Gd, sample * per_group, len(values_TF) * per_group, values_TF.dtype)


def summed(parts: Sequence[Tensor], grid: Grid, heads: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    total = MomentSum(grid, heads, CPU, dtype)
    for part_TF in parts:
        total.add_(part_TF)
    return total.bands()


def diagonal(bands: Sequence[Tensor]) -> Tensor:
    return torch.cat([band_Gbd.diagonal(dim1=1, dim2=2) for band_Gbd in bands], dim=1)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(params=[(5, 5), (5, 2), (512, 192), (512, 7)], ids=str)
def band(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    rows, product_rows = request.param
    monkeypatch.setattr(exact_sums, "BAND", rows)
    monkeypatch.setitem(exact_sums.PRODUCT_ROWS, "cpu", product_rows)
    return int(rows)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_order_and_any_grouping_gives_the_same_bits(heads: int, groups: int, dtype: torch.dtype, band: int) -> None:
    values_TF = wide(96, 24)
    grid = grid_of(values_TF, 8, heads, groups)
    parts = list(values_TF.split(8))
    expected = summed(parts, grid, heads, dtype)
    source = random.Random(3)
    for _ in range(20):
        source.shuffle(parts)
        cut = source.randrange(1, len(parts))
        bands = summed(parts[:cut], grid, heads, dtype)
        bands = [torch.add(*pair) for pair in zip(bands, summed(parts[cut:], grid, heads, dtype), strict=True)]
        assert same(bands, expected)


def test_the_sum_is_that_of_products_rounded_one_by_one() -> None:
    """What rounds a float32 product leaves the sum at its end: no bit of it stays, of loud products neither, which it
    is small against; and more may be added afterwards."""
    values_TF = wide(96, 24, spread=9.0)
    grid = grid_of(values_TF, 8)
    scales_F = torch.ldexp(torch.ones(24), -grid.exponents[0].int())
    rounder = 1.5 * 2.0 ** (grid.bits - 28)
    total, expected, loudest = MomentSum(grid, 1, CPU), torch.zeros(24, 24, dtype=torch.float64), 0.0
    for part_TF in values_TF.split(8):
        product_FF = (part_TF * scales_F).T @ (part_TF * scales_F)
        expected += (product_FF + rounder) - rounder
        loudest = max(loudest, float(product_FF.abs().max()))
        total.add_(part_TF)
        (band_1FF,) = total.bands()
        assert torch.equal(band_1FF[0], expected)
    assert loudest > rounder


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2)])
def test_products_run_over_the_ends_of_parts(heads: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of any sizes together are what they are in one piece, products of 16 rows each."""
    monkeypatch.setattr(exact_sums, "ROWS_PER_PRODUCT", 16)
    values_TF = wide(50, 24)
    grid = grid_of(values_TF, 8, heads, groups)
    whole = MomentSum(grid, heads, CPU)
    whole.add_(values_TF)
    for sizes in ([50], [1, 15, 34], [7] * 7 + [1], [33, 17]):
        total = MomentSum(grid, heads, CPU)
        total.add_(*values_TF.split(sizes))
        assert same(total.bands(), whole.bands())


def test_every_permutation_of_a_few_parts() -> None:
    parts = list(wide(20, 7, seed=2, spread=12.0).split(5))
    grid = grid_of(torch.cat(parts), 5)
    expected = summed(parts, grid)
    assert all(same(summed(order, grid), expected) for order in itertools.permutations(parts))


def test_unrounded_sums_do_depend_on_the_order() -> None:
    """What the grid is for: the same products, added as they are."""
    products = [part_TF.T @ part_TF for part_TF in wide(640, 24, spread=0.0).double().split(8)]
    forth = sum(products[1:], products[0])
    back = sum(products[-2::-1], products[-1])
    assert not torch.equal(forth, back)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2), (6, 1)])
def test_the_moment_is_the_naive_one_channel_by_channel(heads: int, groups: int, band: int) -> None:
    """Against each pair's own scale, so that silent channels count: the rounding is far below a float32 product's."""
    values_TF = wide(4000, 24, seed=5)
    grid = grid_of(values_TF, 400, heads, groups)
    expected = naive_moment(values_TF, heads, groups)
    loud_Gd = expected.diagonal(dim1=1, dim2=2).sqrt()
    scale_Gdd = loud_Gd[:, :, None] * loud_Gd[:, None, :]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 2e-8)):
        found = whole_moment(summed(values_TF.split(100), grid, heads, dtype), grid)
        assert float(((found - expected) / scale_Gdd).abs().max()) < tolerance
        assert torch.equal(found, found.transpose(1, 2))


def test_values_stay_as_they_were() -> None:
    values_TF = wide(8, 6)
    before = values_TF.clone()
    summed([values_TF], grid_of(values_TF, 4))
    assert torch.equal(values_TF, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    values_TF = (wide(60, 8, seed=1, spread=2.0) * 100).to(dtype)
    grid = grid_of(values_TF, 10, 2, 1)
    found = whole_moment(summed(values_TF.split(10), grid, 2), grid)
    expected = naive_moment(values_TF, 2, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e20, 1e36])
def test_scales_whose_squares_leave_float32(scale: float) -> None:
    values_TF = wide(40, 6, spread=0.0) * (scale / 50)
    grid = grid_of(values_TF, 10)
    found, expected = whole_moment(summed([values_TF], grid), grid), naive_moment(values_TF, 1, 1)
    assert not exceeding(diagonal(summed([values_TF], grid)), grid).any()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("scale", [1e-140, 1e140])
def test_scales_that_only_float64_has(scale: float) -> None:
    values_TF = wide(40, 6, spread=0.0).double() * scale
    grid = grid_of(values_TF, 10)
    found, expected = whole_moment(summed([values_TF], grid), grid), naive_moment(values_TF, 1, 1)
    assert float(((found - expected) / expected.max()).abs().max()) < 2e-6


# The bound ------------------------------------------------------------------------------------------------------------


def late(tokens: int = 64, features: int = 6, loud: float = 1e5) -> Tensor:
    """Channel 2 is silent in the first half."""
    values_TF = torch.randn(tokens, features, generator=torch.Generator().manual_seed(8))
    values_TF[: tokens // 2, 2] = 0.0
    values_TF[tokens // 2 :, 2] *= loud
    return values_TF


def test_a_channel_beyond_the_bound_is_found_in_any_order() -> None:
    values_TF = late()
    grid = grid_of(values_TF, 32)
    parts = list(values_TF.split(4))
    for seed in range(10):
        random.Random(seed).shuffle(parts)
        assert exceeding(diagonal(summed(parts, grid)), grid).nonzero().tolist() == [[0, 2]]


def test_a_silent_channel_may_wake_up_to_the_others_mean() -> None:
    values_TF = late(loud=1.0)
    grid = grid_of(values_TF, 32)
    assert not exceeding(diagonal(summed([values_TF], grid)), grid).any()


def test_with_a_raised_grid_the_sum_is_exact_again() -> None:
    values_TF = late()
    grid = grid_of(values_TF, 32)
    raised = grid
    for steps in (1, 2):
        raised = raised.raised(exceeding(diagonal(summed([values_TF], raised)), raised))
        assert (raised.exponents - grid.exponents).tolist() == [[0, 0, 10 * steps, 0, 0, 0]]
    parts = list(values_TF.split(4))
    expected = summed(parts, raised)
    assert not exceeding(diagonal(expected), raised).any()
    assert same(summed(parts[::-1], raised), expected)
    torch.testing.assert_close(whole_moment(expected, raised), naive_moment(values_TF, 1, 1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_exceeds_the_highest_exponents(dtype: torch.dtype) -> None:
    """Raised again and again, a grid ends where every finite value of its type fits (float64: up to 1e150)."""
    largest = 1e150 if dtype == torch.float64 else torch.finfo(dtype).max
    values_TF = torch.full((8, 2), largest, dtype=dtype)
    grid = choose_grid(torch.zeros(1, 2, dtype=torch.float64), 1, 8, dtype)
    both = torch.ones(1, 2, dtype=torch.bool)
    while int(grid.exponents.min()) < grid.highest:
        grid = grid.raised(both)
    assert not exceeding(diagonal(summed([values_TF], grid)), grid).any()
    with pytest.raises(ValueError, match=rf"beyond 4\^{grid.highest} times"):
        grid.raised(both)
    assert grid.raised(~both).exponents.tolist() == grid.exponents.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_reach_the_diagonal(bad: float) -> None:
    values_TF = wide(20, 6)
    grid = grid_of(values_TF, 10)
    values_TF[13, 4] = bad
    assert exceeding(diagonal(summed(values_TF.split(5), grid)), grid).nonzero().tolist() == [[0, 4]]


def test_sums_at_the_bound_are_exact() -> None:
    """Ones up to the bound, of which float64 must lose none; and the diagonal says where it ends."""
    grid = Grid(torch.zeros(1, 1, dtype=torch.int16), bits=8, highest=126)
    total = MomentSum(grid, 1, CPU)
    total.add_(torch.full((1, 1), 2.0**-19))
    for _ in range(255):
        total.add_(torch.ones(1, 1))
    assert float(diagonal(total.bands())) == 255 + 2.0**-38
    assert not exceeding(diagonal(total.bands()), grid).any()
    total.add_(torch.ones(1, 1))
    assert exceeding(diagonal(total.bands()), grid).all()


# Sizes and arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 512, 513, 2048])
def test_a_single_triangle_is_held(width: int) -> None:
    numbers = sum(band.numel() for band in empty_bands(3, width, CPU))
    assert numbers <= 3 * (width * width + width * min(width, exact_sums.BAND)) / 2


def test_a_grid_survives_its_journey() -> None:
    grid = Grid(torch.tensor([[0, -17, 126], [300, -500, 1]], dtype=torch.int16), bits=30, highest=500)
    found = Grid.unpacked(grid.packed())
    assert torch.equal(found.exponents, grid.exponents)
    assert (found.bits, found.highest) == (30, 500)


def test_arguments() -> None:
    grid = grid_of(wide(8, 12), 4, 4, 2)
    with pytest.raises(ValueError, match=r"\(8, 10\) of 4 heads do not fit 2 x 3"):
        MomentSum(grid, 4, CPU).add_(torch.ones(8, 10))
    with pytest.raises(ValueError, match="3 heads are not of 2 groups"):
        MomentSum(grid, 3, CPU)
    with pytest.raises(ValueError, match="at least one row, not of 0"):
        choose_grid(torch.ones(1, 3), 0, 1, torch.float32)
    with pytest.raises(ValueError, match="finite"):
        choose_grid(torch.full((1, 3), math.inf), 1, 1, torch.float32)


@pytest.mark.parametrize("width", [5, 513, 1100])
@pytest.mark.parametrize("step", [3, 512, 700, 2000])
def test_rows_of_a_moment_are_those_of_the_whole(width: int, step: int) -> None:
    """Bit for bit, and the same below the diagonal, wherever they are cut."""
    if step == 3 and width > 5:
        return
    values_TF = torch.randn(40, 2 * width, generator=torch.Generator().manual_seed(width))
    grid = choose_grid(sample_squares(values_TF, 2, 2), 40, 40, values_TF.dtype)
    bands = summed([values_TF], grid, 2)
    whole_Gdd = whole_moment(bands, grid)
    for start in range(0, width, step):
        stop = min(start + step, width)
        assert torch.equal(moment_rows(bands, grid, start, stop), whole_Gdd[:, start:stop, start:])


@pytest.mark.parametrize("seed", range(4))
def test_a_moment_of_one_row_on_a_grid_for_many_is_semidefinite(seed: int, band: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sample_TF = torch.randn(64, 96, generator=generator)
    grid = choose_grid(sample_squares(sample_TF), 64, 2**17, torch.float32)
    row_TF = torch.randn(1, 96, generator=generator) * torch.logspace(-6, 0, 96)
    bands = summed([row_TF], grid)
    steps_Gd = diagonal(bands) / 2.0 ** (grid.bits - exact_sums.GRID_BITS)
    assert ((steps_Gd > 0) & (steps_Gd < 8)).any()  # a few steps of the grid, beside others that are well above it
    assert (steps_Gd > 2**12).any()

    moment_NN = whole_moment(bands, grid)[0]
    lost_N = steps_Gd[0] < 2**exact_sums.NOISE_BITS
    assert not moment_NN[lost_N].any()
    assert not moment_NN[:, lost_N].any()
    live_NN = moment_NN[~lost_N][:, ~lost_N]
    torch.testing.assert_close(live_NN, naive_moment(row_TF, 1, 1)[0][~lost_N][:, ~lost_N], rtol=2**-7, atol=1e-6)
    scale_N = live_NN.diagonal().rsqrt()
    assert torch.linalg.eigvalsh(live_NN * scale_N * scale_N[:, None])[0] > -0.1  # within the jitters of an inverse
