"""The pivoted form: exact, with small coefficients, whatever the factors; its count of numbers."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.pivoted import expand, pivoted, pivoted_numbers


def factors(outputs: int, inputs: int, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed + 1000 * outputs + rank)
    first = torch.randn(rank, inputs, dtype=torch.float64, generator=source)
    second = torch.randn(outputs, rank, dtype=torch.float64, generator=source)
    return first, second


@pytest.mark.parametrize(("outputs", "inputs", "rank"), [(7, 5, 3), (40, 30, 29), (5, 9, 5), (64, 8, 1), (30, 30, 12)])
@pytest.mark.parametrize("scale", [1.0, 1e-120, 1e120])
def test_the_form_is_the_product(outputs: int, inputs: int, rank: int, scale: float) -> None:
    first, second = factors(outputs, inputs, rank)
    second = second * torch.logspace(0, -6, rank, dtype=torch.float64) * scale
    before = first.clone(), second.clone()
    found = pivoted(first, second)
    torch.testing.assert_close(expand(found), second @ first, rtol=1e-9, atol=1e-11 * scale)
    assert found.indices.dtype == torch.int64
    assert (found.indices.diff() > 0).all()
    assert found.rows.shape == (rank, inputs)
    assert found.coefficients.shape == (outputs - rank, rank)
    torch.testing.assert_close(found.rows, (second @ first)[found.indices])
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])


@pytest.mark.parametrize("seed", range(8))
def test_coefficients_stay_small(seed: int) -> None:
    found = pivoted(*factors(120, 50, 40, seed))
    assert found.coefficients.abs().max() <= 1.1 + 1e-9


def test_rows_that_partial_pivoting_would_grow_from_are_swapped() -> None:
    """Wilkinson's matrix: each elimination step doubles the last column."""
    size = 24
    growing = torch.eye(size, dtype=torch.float64) - torch.ones(size, size, dtype=torch.float64).tril(-1)
    growing[:, -1] = 1.0
    second = torch.cat((growing, torch.ones(3, size, dtype=torch.float64)))
    found = pivoted(torch.eye(size, dtype=torch.float64), second)
    assert found.coefficients.abs().max() <= 1.1 + 1e-9
    torch.testing.assert_close(expand(found), second)


@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_rank_beyond_that_of_the_matrix_is_filled_up(known: int) -> None:
    first, second = factors(12, 9, 6)
    second = second[:, :known] @ torch.randn(known, 6, dtype=torch.float64)
    found = pivoted(first, second)
    assert found.indices.numel() == 6
    torch.testing.assert_close(expand(found), second @ first)
    assert torch.isfinite(found.coefficients).all()


def test_equal_rows_and_zero_columns() -> None:
    first, second = factors(10, 8, 4)
    second[5:] = second[:5]
    second[:, 2] = 0.0
    torch.testing.assert_close(expand(pivoted(first, second)), second @ first)


def test_the_same_twice() -> None:
    first, second = factors(50, 20, 10)
    once, again = pivoted(first, second), pivoted(first, second)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_numbers() -> None:
    assert pivoted_numbers(10, 8, 3, bits=32) == 3 * 8 + 7 * 3 + 3
    assert pivoted_numbers(10, 8, 3, bits=16) == 3 * 8 + 7 * 3 + 6
    assert pivoted_numbers(10, 8, 8, bits=16) == 80
    found = pivoted(*factors(10, 8, 3))
    assert found.rows.numel() + found.coefficients.numel() + found.indices.numel() == pivoted_numbers(10, 8, 3, 32)


def test_wrong_input() -> None:
    first, second = factors(5, 4, 3)
    with pytest.raises(ValueError, match=r"factors \(5, 3\) and \(2, 4\) do not fit"):
        pivoted(first[:2], second)
    with pytest.raises(ValueError, match="rank must be within"):
        pivoted(torch.randn(6, 4), torch.randn(5, 6))
    with pytest.raises(ValueError, match="NaN"):
        pivoted(first, second.fill_(float("nan")))
