"""Losses and directions in the metric of the loss, against the formula written out and against random rivals."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.heads import diagonal_blocks
from pipeline.kernels.sensitivity import (
    factored,
    input_directions,
    least_losses,
    output_directions,
    projection_losses,
    pullback,
    pushforward,
    thin_directions,
    thin_output_directions,
)
from pipeline.kernels.spectra import weighted_head_pca
from tests.tensors import random


def moment(size: int, tokens: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    mixed = torch.randn(size, size, dtype=torch.float64, generator=source)
    values = torch.randn(tokens, size, dtype=torch.float64, generator=source) @ mixed
    return values.T @ values / tokens * scale


def loss(change: torch.Tensor, moment_FF: torch.Tensor, metric_mm: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.trace(metric_mm @ change @ moment_FF @ change.T)


@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(9, 6, 50), (4, 7, 50), (9, 6, 3)])
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e40])
def test_input_directions_lose_what_is_predicted(outputs: int, inputs: int, tokens: int, scale: float) -> None:
    weight_mD, metric_mm = random(outputs, inputs), moment(outputs, 40, 1)
    moment_DD = moment(inputs, tokens, 2, scale)
    pull_DD = pullback(weight_mD, metric_mm)
    found = input_directions(moment_DD, pull_DD)
    losses = projection_losses(pull_DD, moment_DD, found.encode[None], found.decode[None])
    torch.testing.assert_close(found.decode @ found.encode, torch.eye(inputs, dtype=torch.float64), rtol=0, atol=1e-6)
    for rank in range(inputs + 1):
        kept = weight_mD @ found.decode[:, :rank] @ found.encode[:rank]
        expected = loss(weight_mD - kept, moment_DD, metric_mm)
        torch.testing.assert_close(losses[rank], expected, rtol=1e-6, atol=1e-9 * float(losses[0]))
        tail = 0.5 * found.values[rank:].sum()
        torch.testing.assert_close(losses[rank], tail, rtol=1e-5, atol=1e-7 * float(losses[0]))
    told = least_losses(factored(moment_DD), pull_DD)
    torch.testing.assert_close(told, losses, rtol=1e-5, atol=1e-7 * float(losses[0]))


@pytest.mark.parametrize(("rows", "rank"), [(4, 4), (5, 2), (1, 1)])
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e40])
def test_thin_directions_are_the_first_of_all(rows: int, rank: int, scale: float) -> None:
    """Of fewer rows than inputs, some of them dependent."""
    rows_mD = random(rows, rank) @ random(rank, 8, seed=1)
    moment_DD, metric_m = moment(8, 40, 2, scale), torch.linspace(1.0, 2.0, rows, dtype=torch.float64)
    pull_DD, known = pullback(rows_mD, metric_m), factored(moment_DD)
    whole = input_directions(known, pull_DD)
    thin = thin_directions(known, ((rows_mD * metric_m[:, None].sqrt()) @ known.factor).T)
    assert thin.decode.shape == (8, rows)
    torch.testing.assert_close(thin.values, whole.values[:rows], rtol=1e-9, atol=1e-12 * float(whole.values[0]))
    torch.testing.assert_close(thin.encode @ thin.decode, torch.eye(rows, dtype=torch.float64), rtol=0, atol=1e-9)
    for kept in range(1, rows + 1):
        one, other = (rows_mD @ each.decode[:, :kept] @ each.encode[:kept] for each in (thin, whole))
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("tokens", [50, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e40])
def test_thin_output_directions_are_the_first_of_all(tokens: int, scale: float) -> None:
    weight_mF, moment_FF, metric = random(9, 4), moment(4, tokens, 3, scale), factored(moment(9, 40, 1))
    whole, thin = output_directions(weight_mF, moment_FF, metric), thin_output_directions(weight_mF, moment_FF, metric)
    largest = float(whole.values[0])
    torch.testing.assert_close(thin.values, whole.values[:4], rtol=1e-6, atol=1e-8 * largest)
    for kept in range(1, min(4, tokens) + 1):
        one, other = (each.decode[:, :kept] @ each.encode[:kept] @ weight_mF for each in (thin, whole))
        difference = loss(one - other, moment_FF, metric.scale * metric.factor @ metric.factor.T)
        assert float(difference) <= 1e-7 * largest


def test_wrong_factors_are_refused() -> None:
    metric = factored(moment(9, 40, 1))
    with pytest.raises(ValueError, match="do not fit"):
        thin_output_directions(random(9, 4), moment(5, 50, 3), metric)
    with pytest.raises(ValueError, match="NaN"):
        thin_output_directions(random(9, 4) * float("nan"), moment(4, 50, 3), metric)
    with pytest.raises(ValueError, match="NaN"):
        thin_directions(metric, torch.full((9, 2), float("nan")))


def test_no_other_rank_loses_less() -> None:
    weight_mD, metric_mm, moment_DD = random(9, 6), moment(9, 40, 1), moment(6, 40, 2)
    found = input_directions(moment_DD, pullback(weight_mD, metric_mm))
    best = weight_mD @ found.decode[:, :3] @ found.encode[:3]
    least = loss(weight_mD - best, moment_DD, metric_mm)
    # The Eckart-Young bound in the whitened space, by an SVD that knows nothing of the kernel.
    root_m, root_D = torch.linalg.cholesky(metric_mm), torch.linalg.cholesky(moment_DD)
    values = torch.linalg.svdvals(root_m.T @ weight_mD @ root_D)
    torch.testing.assert_close(least, 0.5 * values[3:].square().sum())


def test_output_directions_lose_what_is_predicted() -> None:
    weight_mF, metric_mm, moment_FF = random(6, 9), moment(6, 40, 1), moment(9, 40, 2)
    found = output_directions(weight_mF, moment_FF, metric_mm)
    spread_mm = pushforward(weight_mF, moment_FF)
    losses = projection_losses(metric_mm, spread_mm, found.encode[None], found.decode[None])
    values = torch.linalg.svdvals(torch.linalg.cholesky(metric_mm).T @ weight_mF @ torch.linalg.cholesky(moment_FF))
    for rank in range(7):
        kept = found.decode[:, :rank] @ (found.encode[:rank] @ weight_mF)
        torch.testing.assert_close(loss(weight_mF - kept, moment_FF, metric_mm), losses[rank], atol=1e-9, rtol=1e-7)
        torch.testing.assert_close(losses[rank], 0.5 * values[rank:].square().sum(), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_head_projections_lose_what_is_predicted(heads: int, groups: int) -> None:
    width, outputs = 3, 8
    features = heads * width
    output_DF, metric_DD, context_FF = random(outputs, features), moment(outputs, 40, 1), moment(features, 60, 2)
    pull_FF = pullback(output_DF, metric_DD)
    encode, decode, _, _ = weighted_head_pca(
        diagonal_blocks(context_FF, heads, groups), diagonal_blocks(pull_FF, heads, groups), width
    )
    losses = projection_losses(pull_FF, context_FF, encode, decode)
    for rank in range(width + 1):
        blocks = [decode[g, :, :rank] @ encode[g, :rank] for g in range(groups) for _ in range(heads // groups)]
        kept = output_DF @ torch.block_diag(*blocks) if rank else torch.zeros_like(output_DF)
        expected = loss(output_DF - kept, context_FF, metric_DD)
        torch.testing.assert_close(losses[rank], expected, rtol=1e-7, atol=1e-9)


def test_diagonal_blocks_are_summed_by_group() -> None:
    whole = torch.arange(36.0).reshape(6, 6)
    blocks = diagonal_blocks(whole, 3, 1)
    assert torch.equal(blocks[0], whole[:2, :2] + whole[2:4, 2:4] + whole[4:, 4:])
    assert torch.equal(diagonal_blocks(whole, 3, 3)[1], whole[2:4, 2:4])


def test_a_diagonal_metric_is_pulled_as_a_matrix() -> None:
    weight_mF, squares = random(5, 3), torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(pullback(weight_mF, squares), pullback(weight_mF, torch.diag(squares)))


def test_zero_moments_and_zero_gradients() -> None:
    zero, some = torch.zeros(4, 4), moment(4, 30, 3).float()
    for moment_DD, pull_DD in ((zero, some), (some, zero), (zero, zero)):
        found = input_directions(moment_DD, pull_DD)
        losses = projection_losses(pull_DD, moment_DD, found.encode[None], found.decode[None])
        assert torch.equal(losses, torch.zeros(5, dtype=torch.float64))
        assert torch.equal(least_losses(moment_DD, pull_DD), torch.zeros(5, dtype=torch.float64))


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        input_directions(torch.eye(3), torch.eye(4))
    with pytest.raises(ValueError, match="NaN"):
        input_directions(torch.full((3, 3), float("nan")), torch.eye(3))
    with pytest.raises(ValueError, match="do not fit"):
        output_directions(torch.zeros(3, 4), torch.eye(4), torch.eye(2))
    with pytest.raises(ValueError, match="do not fit"):
        pushforward(torch.zeros(3, 4), torch.eye(3))
    with pytest.raises(ValueError, match="do not fit"):
        pullback(torch.zeros(3, 4), torch.eye(4))
    with pytest.raises(ValueError, match="do not fit"):
        projection_losses(torch.eye(5), torch.eye(5), torch.eye(2)[None], torch.eye(2)[None])
