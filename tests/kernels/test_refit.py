"""Refits on values, against least squares written out; which tokens a sample takes."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.refit import correction, evenly_spread, refit, refit_residual


def problem(tokens: int = 90) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(4)
    inputs = torch.randn(tokens, 7, dtype=torch.float64, generator=source)
    targets = inputs @ torch.randn(7, 5, dtype=torch.float64, generator=source)
    targets = targets + 0.3 * torch.randn(tokens, 5, dtype=torch.float64, generator=source)
    return targets, inputs, torch.randn(5, 7, dtype=torch.float64, generator=source)


def test_a_small_ridge_gives_least_squares() -> None:
    targets, inputs, start = problem()
    before = start.clone()
    found = refit([(targets, inputs)], start, ridge=1e-12)
    torch.testing.assert_close(found.weight, torch.linalg.lstsq(inputs, targets).solution.T)
    torch.testing.assert_close(found.moment, inputs.T @ inputs / len(inputs))
    assert torch.equal(start, before)


def test_the_ridge_pulls_towards_the_start() -> None:
    targets, inputs, start = problem()
    ridge = 0.5
    extra = (ridge * inputs.square().mean() * len(inputs)).sqrt() * torch.eye(7, dtype=torch.float64)
    stacked = torch.linalg.lstsq(torch.cat((inputs, extra)), torch.cat((targets, extra @ start.T))).solution.T
    torch.testing.assert_close(refit([(targets, inputs)], start, ridge).weight, stacked)
    torch.testing.assert_close(refit([(targets, inputs)], start, 1e9).weight, start, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("ridge", [1e-12, 0.5])
def test_what_a_refit_leaves_is_what_its_weight_leaves(ridge: float) -> None:
    targets, inputs, start = problem()
    errors = targets - inputs @ start.T
    left = targets - inputs @ refit([(targets, inputs)], start, ridge).weight.T
    found = refit_residual(zip(errors.split(13), inputs.split(13), strict=True), 5, 7, ridge)
    assert found == pytest.approx(float(left.square().sum()) / (len(inputs) - 7))


def test_batches_add_up() -> None:
    targets, inputs, start = problem()
    whole = refit([(targets, inputs)], start)
    parts = refit(zip(targets.split(13), inputs.split(13), strict=True), start)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_dead_inputs_keep_the_start() -> None:
    targets, _, start = problem()
    found = refit([(targets, torch.zeros(90, 7))], start)
    assert torch.equal(found.weight, start)
    assert refit_residual([(targets, torch.zeros(90, 7))], 5, 7) == pytest.approx(
        float(targets.square().sum()) / (90 - 7)
    )
    assert torch.isfinite(refit([(targets[:3], problem()[1][:3])], start).weight).all()  # fewer tokens than inputs


def test_wrong_input() -> None:
    targets, inputs, start = problem()
    with pytest.raises(ValueError, match="needs tokens"):
        refit([], start)
    with pytest.raises(ValueError, match="do not fit a weight 5 x 7"):
        refit([(targets[:4], inputs)], start)
    with pytest.raises(ValueError, match="ridge must be"):
        refit([(targets, inputs)], start, 0.0)
    with pytest.raises(ValueError, match="NaN"):
        refit([(targets.fill_(float("nan")), inputs)], start)


def test_products_of_float32_are_summed_in_float64() -> None:
    """A thousand batches: what one adds is rounded, the sum is not."""
    targets, inputs, start = problem()
    exact = refit([(targets, inputs)] * 1000, start)
    single = refit([(targets.float(), inputs.float())] * 1000, start)
    sizes = start.abs().max(), exact.moment.max()
    for found, expected, size in zip(single, exact, sizes, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6 * float(size))


@pytest.mark.parametrize(("total", "wanted"), [(100, 7), (100, 100), (100, 1), (64, 1000), (97, 50)])
@pytest.mark.parametrize("batch", [1, 8, 33, 1000])
def test_a_sample_is_the_same_however_the_tokens_are_cut(total: int, wanted: int, batch: int) -> None:
    starts = range(0, total, batch)
    found = [evenly_spread(s, min(batch, total - s), total, wanted) + s for s in starts]
    tokens = torch.cat(found)
    assert len(tokens) == min(total, wanted)
    assert torch.equal(tokens, evenly_spread(0, total, total, wanted))
    if len(tokens) > 2:
        gaps = tokens.diff()
        assert gaps.max() - gaps.min() <= 1


def test_tokens_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="tokens 90 to 101 are not of 100"):
        evenly_spread(90, 11, 100, 5)


def test_a_correction_is_the_ridge_regression_of_the_error() -> None:
    errors, inputs, _ = problem()
    moment, error = inputs.T @ inputs / len(inputs), errors.T @ inputs / len(inputs)
    ridge = 0.1
    found = correction(error, moment, ridge)
    size = ridge * float(moment.diagonal().mean())
    expected = torch.linalg.solve(moment + size * torch.eye(7, dtype=torch.float64), error, left=False)
    torch.testing.assert_close(found, expected)
    assert torch.equal(correction(error, torch.zeros_like(moment), ridge), torch.zeros_like(error))
    with pytest.raises(ValueError, match=r"error \(5, 6\) and moment \(7, 7\)"):
        correction(error[:, :6], moment, ridge)
    with pytest.raises(ValueError, match="ridge must be"):
        correction(error, moment, 0.0)
