"""Sums of pairs that do not depend on the order, against float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeline.kernels import exact_pairs, exact_sums
from pipeline.kernels.exact_pairs import PairSum, Rows, choose_pair_grid, whole_pair
from pipeline.kernels.exact_sums import Grid, exceeding
from tests.kernels.test_exact_sums import CPU, same, wide


@pytest.fixture(params=[3, 512], autouse=True)
def band(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exact_sums, exact_pairs):
        monkeypatch.setattr(module, "BAND", request.param)


def summed(parts: Sequence[Rows], grid: Grid) -> PairSum:
    total = PairSum(grid, parts[0][0].shape[-1], CPU)
    for part in parts:
        total.add_(part)
    return total


def naive(values: Tensor, errors: Tensor) -> Tensor:
    """(F + D, F) float64."""
    values, errors = (rows.double().flatten(0, -2) for rows in (values, errors))
    return torch.cat((values, errors), dim=1).T @ values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e15])
@pytest.mark.parametrize("missing", [1.0, 1e-4])
def test_against_float64(dtype: torch.dtype, scale: float, missing: float) -> None:
    source = torch.Generator().manual_seed(3)
    values = (torch.randn(2, 4500, 6, generator=source) * scale).to(dtype)
    errors = torch.randn(2, 4500, 4, generator=source) * scale * missing
    grid = choose_pair_grid(values[:, :100], errors[:, :100], 9000)
    total, expected_PF = summed([(values, errors)], grid), naive(values, errors)
    found_1PF = whole_pair(total.bands(), grid)
    for rows in (slice(0, 6), slice(6, 10)):
        largest = float(expected_PF[rows].abs().max())
        torch.testing.assert_close(found_1PF[0, rows], expected_PF[rows], rtol=2e-5, atol=2e-5 * largest)
    squares_1P = torch.cat((values.double(), errors.double()), dim=-1).flatten(0, 1).square().sum(dim=0)[None]
    scaled_1P = squares_1P * 4.0 ** -grid.exponents.double()
    # Squares of values are a diagonal of float32 products, which each processor adds in its own order.
    for rows, tolerance in ((slice(0, 6), 2e-5), (slice(6, 10), 1e-6)):
        torch.testing.assert_close(total.squares()[:, rows], scaled_1P[:, rows], rtol=tolerance, atol=2.0**-10)


def test_any_order_and_any_grouping_gives_the_same_bits() -> None:
    values_TF, errors_TD = wide(96, 11), wide(96, 7, seed=1) * 1e-3
    grid = choose_pair_grid(values_TF[:8], errors_TD[:8], 96)
    parts = list(zip(values_TF.split(8), errors_TD.split(8), strict=True))
    expected, source = summed(parts, grid), random.Random(3)
    for _ in range(20):
        source.shuffle(parts)
        cut = source.randrange(1, len(parts))
        one, other = summed(parts[:cut], grid), summed(parts[cut:], grid)
        bands = [torch.add(*both) for both in zip(one.bands(), other.bands(), strict=True)]
        assert same(bands, expected.bands())
        assert torch.equal(one.squares() + other.squares(), expected.squares())


def test_every_permutation_of_a_few_parts() -> None:
    values_TF, errors_TD = wide(20, 5, spread=12.0), wide(20, 3, seed=2, spread=12.0)
    grid = choose_pair_grid(values_TF[:5], errors_TD[:5], 20)
    parts = list(zip(values_TF.split(5), errors_TD.split(5), strict=True))
    expected = summed(parts, grid)
    for order in itertools.permutations(parts):
        found = summed(order, grid)
        assert same(found.bands(), expected.bands())
        assert torch.equal(found.squares(), expected.squares())


def test_products_run_over_the_ends_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exact_sums, exact_pairs):
        monkeypatch.setattr(module, "ROWS_PER_PRODUCT", 16)
    values_TF, errors_TD = wide(50, 6), wide(50, 4, seed=1)
    grid = choose_pair_grid(values_TF[:8], errors_TD[:8], 50)
    whole = summed([(values_TF, errors_TD)], grid)
    for sizes in ([50], [1, 15, 34], [7] * 7 + [1]):
        total = PairSum(grid, 6, CPU)
        total.add_(*zip(values_TF.split(sizes), errors_TD.split(sizes), strict=True))
        assert same(total.bands(), whole.bands())


def test_what_the_sample_did_not_foretell_is_beyond_the_grid() -> None:
    values_TF, errors_TD = torch.ones(8, 3), torch.full((8, 2), 1e-3)
    grid = choose_pair_grid(values_TF, errors_TD, 16)
    assert not exceeding(summed([(values_TF, errors_TD)], grid).squares(), grid).any()
    errors_TD[5, 1] = 1e6
    beyond_1P = exceeding(summed([(values_TF, errors_TD)], grid).squares(), grid)
    assert beyond_1P.tolist() == [[False, False, False, False, True]]
    raised = grid.raised(beyond_1P)
    while exceeding(summed([(values_TF, errors_TD)], raised).squares(), raised).any():
        raised = raised.raised(beyond_1P)
    found_PF = whole_pair(summed([(values_TF, errors_TD)], raised).bands(), raised)[0]
    torch.testing.assert_close(found_PF, naive(values_TF, errors_TD), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spoiled", ["values", "errors"])
def test_numbers_that_are_not_finite_reach_the_squares(spoiled: str) -> None:
    values_TF, errors_TD = torch.ones(8, 3), torch.ones(8, 2)
    grid = choose_pair_grid(values_TF, errors_TD, 8)
    {"values": values_TF, "errors": errors_TD}[spoiled][3, 1] = float("nan")
    assert exceeding(summed([(values_TF, errors_TD)], grid).squares(), grid).any()


def test_nothing_is_missing() -> None:
    """Errors that are zero in the sample count as small against the values, and stay zero."""
    values_TF, errors_TD = wide(20, 5), torch.zeros(20, 3)
    grid = choose_pair_grid(values_TF[:8], errors_TD[:8], 20)
    assert not whole_pair(summed([(values_TF, errors_TD)], grid).bands(), grid)[0, 5:].any()
    errors_TD[15:] = wide(5, 3, seed=4, spread=0.0) * 1e-3
    found_PF = whole_pair(summed([(values_TF, errors_TD)], grid).bands(), grid)[0]
    expected_PF = naive(values_TF, errors_TD)
    torch.testing.assert_close(found_PF[5:], expected_PF[5:], rtol=1e-3, atol=1e-3 * float(expected_PF[5:].abs().max()))


def test_rows_that_do_not_fit() -> None:
    total = PairSum(choose_pair_grid(torch.ones(4, 3), torch.ones(4, 2), 4), 3, CPU)
    for values_TF, errors_TD in (
        (torch.ones(7, 3), torch.ones(6, 2)),
        (torch.ones(7, 2), torch.ones(7, 3)),
        (torch.ones(7, 3), torch.ones(7, 3)),
    ):
        with pytest.raises(ValueError, match="do not fit sums of 3 features"):
            total.add_((values_TF, errors_TD))
    assert not any(band.any() for band in total.bands())
