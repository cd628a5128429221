"""The held-out error of a fit, against least squares with a ridge on the rows themselves."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.held_out import RIDGE, held_out_error


def rows(count: int, features: int, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rank, features, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.randn(count, rank, generator=generator, dtype=torch.float64) @ mixed


def naive(fitted: torch.Tensor, judged: torch.Tensor) -> float:
    """Row by row: the half with more energy predicts the other half, by ridge regression through an SVD."""
    features = fitted.shape[1]
    order = fitted.square().sum(0).argsort(descending=True, stable=True)
    kept, others = order[: features - features // 2], order[features - features // 2 :]
    ridge = RIDGE * fitted.square().sum(0).mean()
    x, y = fitted[:, kept], fitted[:, others]
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    coefficients = vt.T @ ((s / (s**2 + ridge))[:, None] * (u.T @ y))
    return float((judged[:, others] - judged[:, kept] @ coefficients).square().sum() / judged[:, others].square().sum())


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(("count", "features", "rank"), [(50, 12, 12), (50, 13, 4), (5, 12, 12), (400, 2, 2)])
def test_against_ridge_regression(count: int, features: int, rank: int, scale: float) -> None:
    fitted, judged = scale * rows(count, features, rank, 1), scale * rows(30, features, rank, 2)
    moments = fitted.T @ fitted, judged.T @ judged
    before = [moment.clone() for moment in moments]
    assert held_out_error(*moments) == pytest.approx(naive(fitted, judged), rel=1e-6, abs=1e-9)
    assert all(torch.equal(moment, old) for moment, old in zip(moments, before, strict=True))


def test_more_rows_lower_the_error() -> None:
    scales = torch.tensor([9.0] * 8 + [1.0] * 8, dtype=torch.float64)  # so that the same half is always kept
    judged = rows(2000, 16, 16, 2) * scales
    fits = [rows(count, 16, 16, 1) * scales for count in (12, 40, 10_000)]
    errors = [held_out_error(fitted.T @ fitted, judged.T @ judged) for fitted in fits]
    assert errors[0] > 1.2 * errors[1]
    assert errors[1] > 1.05 * errors[2]


def test_features_without_energy() -> None:
    zeros, ones = torch.zeros(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    assert held_out_error(ones, zeros) == 0.0
    assert held_out_error(zeros, ones) == 1.0
    assert held_out_error(ones, ones) == 1.0  # nothing predicts the other half
    with pytest.raises(ValueError, match="one square shape"):
        held_out_error(ones, torch.eye(3, dtype=torch.float64))
