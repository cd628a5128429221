"""Channel selection and refit against brute force: every solve written out, in float64."""

import math

import pytest
import torch
from torch import Tensor

from pipeline.kernels import cholesky
from pipeline.kernels.elimination import eliminate
from pipeline.kernels.nystrom import (
    Selection,
    complement,
    nested_losses,
    nested_outputs,
    nystrom_refit,
    refit_with_error,
    ridge_leverage,
    select_leverage,
)
from tests.kernels.output_errors import output_error


def select_eliminate(moment: Tensor, weight: Tensor, count: int, block: int | None = None) -> Selection:
    order, jitter = eliminate(moment, weight, count, block)
    return Selection(complement(order, len(moment)), jitter)


def problem(channels: int, hidden: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Correlated channels of different sizes: moment (N, N), weight (D, N), activations (T, N)."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(channels) + 0.5 * torch.randn(channels, channels, generator=generator) / channels**0.5
    sizes = 0.1 + torch.rand(channels, generator=generator)
    h_TN = (torch.randn(tokens, channels, generator=generator) @ mix * sizes).double()
    weight_DN = torch.randn(hidden, channels, generator=generator).double()
    return h_TN.T @ h_TN, weight_DN, h_TN


def best_error(moment_NN: Tensor, weight_DN: Tensor, kept: list[int]) -> float:
    """tr(W (C − C[:,S] C[S,S]⁺ C[S,:]) Wᵀ)."""
    columns = moment_NN[:, kept]
    left = moment_NN - columns @ torch.linalg.pinv(moment_NN[kept][:, kept], hermitian=True) @ columns.T
    return float(torch.trace(weight_DN @ left @ weight_DN.T))


def brute_force(moment_NN: Tensor, weight_DN: Tensor) -> list[list[int]]:
    """What greedy elimination keeps: everything, then one channel fewer each time, each candidate refitted in full."""
    steps = [list(range(moment_NN.shape[0]))]
    while len(steps[-1]) > 1:
        rests = [[i for i in steps[-1] if i != j] for j in steps[-1]]
        steps.append(min(rests, key=lambda kept: best_error(moment_NN, weight_DN, kept)))
    return steps


GRID = [(1, 1, 5), (2, 1, 9), (6, 3, 40), (12, 20, 60), (12, 5, 7)]


@pytest.mark.parametrize(("channels", "hidden", "tokens"), GRID)
@pytest.mark.parametrize("ridge", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1e-60, 1.0, 1e60])
def test_leverage_is_the_definition(channels: int, hidden: int, tokens: int, ridge: float, scale: float) -> None:
    moment = problem(channels, hidden, tokens)[0] * scale
    before = moment.clone()
    damped = moment + ridge * moment.diagonal().mean() * torch.eye(channels, dtype=torch.float64)
    expected = torch.diagonal(moment / scale @ torch.linalg.inv(damped / scale))
    torch.testing.assert_close(ridge_leverage(moment, ridge)[0], expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(moment, before)


def test_leverage_in_column_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = problem(12, 3, 40)[0]
    whole = ridge_leverage(moment)[0]
    monkeypatch.setattr(cholesky, "BLOCK", 5)
    torch.testing.assert_close(ridge_leverage(moment)[0], whole, rtol=1e-13, atol=0)


def test_leverage_of_dead_channels_and_of_nothing() -> None:
    moment = problem(6, 3, 40)[0]
    moment[2] = moment[:, 2] = 0
    scores = ridge_leverage(moment)[0]
    assert float(scores[2]) == pytest.approx(0.0, abs=1e-15)
    assert torch.equal(ridge_leverage(torch.zeros(4, 4))[0], torch.zeros(4, dtype=torch.float64))
    assert select_leverage(torch.zeros(4, 4), 2).channels.tolist() == [0, 1]
    # Rank 3 of 12, and a ridge too small to help: the jitter steps in.
    low = problem(12, 3, 3)[0]
    assert float(ridge_leverage(low, 1e-18)[0].sum()) == pytest.approx(3.0, rel=1e-3)


def test_select_leverage_takes_the_highest_and_the_lower_of_equals() -> None:
    assert select_leverage(torch.diag(torch.tensor([1.0, 5.0, 3.0, 5.0, 1.0])), 4).channels.tolist() == [0, 1, 2, 3]
    moment = problem(12, 3, 60)[0]
    kept = select_leverage(moment, 5).channels
    scores = ridge_leverage(moment)[0]
    rest = [i for i in range(12) if i not in kept.tolist()]
    assert float(scores[kept].min()) >= float(scores[rest].max())
    assert kept.tolist() == sorted(kept.tolist())
    assert select_leverage(moment, 12).channels.tolist() == list(range(12))


@pytest.mark.parametrize(("channels", "hidden", "tokens"), [(2, 1, 9), (6, 3, 40), (12, 20, 60), (13, 4, 30)])
@pytest.mark.parametrize("block", [1, 3, None])
def test_eliminate_is_the_brute_force_greedy(channels: int, hidden: int, tokens: int, block: int | None) -> None:
    for seed in range(2):
        moment, weight, _ = problem(channels, hidden, tokens, seed)
        before = moment.clone(), weight.clone()
        for expected in brute_force(moment, weight):
            assert select_eliminate(moment, weight, len(expected), block).channels.tolist() == expected
        assert torch.equal(moment, before[0])
        assert torch.equal(weight, before[1])


def test_eliminate_does_not_depend_on_the_block_nor_on_scale() -> None:
    moment, weight, _ = problem(150, 20, 400)
    expected = select_eliminate(moment, weight, 60, 1).channels
    for block in (2, 7, 32, 200, None):
        assert torch.equal(select_eliminate(moment, weight, 60, block).channels, expected)
    for scale in (1e-60, 1e60):
        assert torch.equal(select_eliminate(moment * scale, weight / scale, 60).channels, expected)
    assert torch.equal(select_eliminate(moment.float(), weight, 60).channels, expected)


def test_eliminate_beats_random_choices_and_leverage_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    ours, leverage, random = 0.0, 0.0, 0.0
    for seed in range(5):
        moment, weight, _ = problem(40, 10, 200, seed)
        choices = [select_eliminate(moment, weight, 20).channels, select_leverage(moment, 20).channels]
        choices += [torch.randperm(40, generator=generator)[:20].sort().values for _ in range(20)]
        errors = [output_error(weight, nystrom_refit(weight, moment, kept)[0], kept, moment) for kept in choices]
        assert errors[0] < min(errors[2:])
        ours, leverage, random = ours + errors[0], leverage + errors[1], random + sum(errors[2:]) / 20
    assert ours < leverage < random


def test_eliminate_removes_one_of_each_pair_of_twins() -> None:
    # Either of two equal channels may go at no cost, but not both: a choice by scores of one moment would take both.
    _, _, h_TN = problem(8, 4, 100)
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).double()
    twins_TN = torch.cat((h_TN, h_TN), dim=1)
    moment = twins_TN.T @ twins_TN
    for block in (1, 8):
        kept = select_eliminate(moment, weight, 8, block).channels
        assert sorted(i % 8 for i in kept.tolist()) == list(range(8))
        refit, _ = nystrom_refit(weight, moment, kept)
        assert output_error(weight, refit, kept, moment) < 1e-9


def test_eliminate_when_rank_deficient_dead_or_zero() -> None:
    moment, weight, _ = problem(20, 4, 10)
    kept = select_eliminate(moment, weight, 10).channels
    refit, _ = nystrom_refit(weight, moment, kept)
    assert output_error(weight, refit, kept, moment) < 1e-9
    moment, weight, _ = problem(6, 4, 30)
    moment[1] = moment[:, 1] = 0
    moment[4] = moment[:, 4] = 0
    weight[:, 4] = 1e6
    assert select_eliminate(moment, weight, 4).channels.tolist() == [0, 2, 3, 5]
    assert select_eliminate(torch.zeros(4, 4), torch.ones(2, 4), 2).channels.tolist() == [0, 1]
    assert select_eliminate(torch.eye(4), torch.zeros(2, 4), 2).channels.tolist() == [0, 1]


@pytest.mark.parametrize(("channels", "hidden", "tokens"), [(6, 3, 40), (12, 20, 60), (12, 5, 7)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_refit_is_the_least_squares_optimum(channels: int, hidden: int, tokens: int, scale: float) -> None:
    moment, weight, h_TN = problem(channels, hidden, tokens)
    h_TN = h_TN * scale
    for count in (1, channels // 2, channels - 1):
        kept = torch.arange(channels)[-count:]
        refit, report = nystrom_refit(weight, moment * scale**2, kept)
        assert refit.is_contiguous(), "laid out as the weight: products of another layout differ in last bits"
        solution = torch.linalg.lstsq(h_TN[:, kept] / scale, h_TN @ weight.T / scale, driver="gelsd").solution.T
        got, best = h_TN[:, kept] @ refit.T, h_TN[:, kept] @ solution.T
        torch.testing.assert_close(got, best, rtol=0, atol=1e-8 * float(best.abs().max()))
        assert report["fallback"] == (count > tokens)
        if not report["fallback"]:
            torch.testing.assert_close(refit, solution, rtol=1e-7, atol=1e-8)
        naive = best_error(moment, weight, kept.tolist()) / float(torch.trace(weight @ moment @ weight.T))
        error = output_error(weight, refit, kept, moment * scale**2)
        assert error == pytest.approx(naive, rel=1e-7, abs=1e-13)
        again, same_report, cheap = refit_with_error(weight, moment * scale**2, kept)
        assert torch.equal(again, refit)
        assert same_report == report
        assert cheap == pytest.approx(error, rel=1e-7, abs=1e-13)


def test_refit_with_every_channel_is_the_weight_itself() -> None:
    moment, weight, _ = problem(6, 3, 2)
    kept = torch.arange(6)
    refit, report = nystrom_refit(weight.bfloat16(), moment, kept)
    assert torch.equal(refit, weight.bfloat16().double())
    assert report == {"jitter": 0.0, "condition": 1.0, "fallback": False, "dropped": 0}
    assert output_error(weight.bfloat16(), refit, kept, moment) == 0.0
    assert refit_with_error(weight.bfloat16(), moment, kept)[2] == 0.0


def test_refit_reports_its_condition() -> None:
    moment, weight, _ = problem(12, 3, 200)
    kept = torch.arange(2, 12)
    part = moment[2:, 2:]
    size = part.diagonal().sqrt()
    exact = float(torch.linalg.cond(part / size / size[:, None]))
    _, report = nystrom_refit(weight, moment, kept)
    assert 0.5 * exact < report["condition"] <= exact * (1 + 1e-9)


def test_refit_when_rank_deficient_keeps_what_calibration_never_saw() -> None:
    moment, weight, h_TN = problem(12, 5, 4)
    kept = torch.arange(10)
    refit, report = nystrom_refit(weight, moment, kept)
    assert report["fallback"]
    assert report["dropped"] == 6
    assert math.isfinite(report["condition"])
    assert output_error(weight, refit, kept, moment) < 1e-12
    scale = moment.diagonal()[:10].sqrt()
    unseen = torch.linalg.svd(h_TN[:, :10] / scale).Vh[4:]
    moved = (refit - weight[:, :10]) * scale
    assert float((moved @ unseen.T).abs().max()) < 1e-8 * float(moved.abs().max())


def test_refit_of_float32_moments_stays_small_though_rank_deficient() -> None:
    _, weight, h_TN = problem(60, 5, 30)
    noisy = (h_TN.float().T @ h_TN.float()).double()
    kept = torch.arange(5, 60)
    refit, _ = nystrom_refit(weight, noisy, kept)
    assert float(refit.abs().max()) < 1e3
    assert output_error(weight, refit, kept, h_TN.T @ h_TN) < 1e-6


def test_refit_rescues_a_round_off_negative_eigenvalue_with_jitter() -> None:
    vector = torch.linspace(1, 2, 30, dtype=torch.float64)
    vector /= vector.norm()
    correlations = torch.eye(30, dtype=torch.float64) - (1 + 1e-13) * torch.outer(vector, vector)
    _, weight, _ = problem(30, 3, 30)
    moment = torch.eye(31, dtype=torch.float64)
    moment[:30, :30] = correlations
    refit, report = nystrom_refit(torch.cat((weight, weight[:, :1]), 1), moment, torch.arange(30))
    assert 0 < report["jitter"] <= 1e-10
    assert not report["fallback"]
    torch.testing.assert_close(refit, weight)
    weight = torch.cat((weight, weight[:, :1]), 1)
    moment[30, :30] = moment[:30, 30] = 1e-7 * vector  # along the direction that the jitter holds up
    refit, report, error = refit_with_error(weight, moment, torch.arange(30))
    assert report["jitter"] > 0
    assert error == pytest.approx(output_error(weight, refit, torch.arange(30), moment), rel=1e-4)


def test_refit_and_error_with_dead_channels_and_zero_moments() -> None:
    moment, weight, _ = problem(6, 3, 40)
    moment[2] = moment[:, 2] = 0
    kept = torch.tensor([0, 2, 3])
    refit, report = nystrom_refit(weight, moment, kept)
    assert torch.equal(refit[:, 1], weight[:, 2])
    assert not report["fallback"]
    refit, _ = nystrom_refit(weight, torch.zeros(6, 6), kept)
    assert torch.equal(refit, weight[:, kept])
    assert output_error(weight, refit, kept, torch.zeros(6, 6)) == 0.0
    assert refit_with_error(weight, torch.zeros(6, 6), kept)[2] == 0.0
    assert output_error(torch.zeros(3, 6), refit, kept, torch.eye(6)) == math.inf
    assert output_error(weight, torch.zeros(3, 3), kept, torch.eye(6)) == pytest.approx(1.0)


def test_arguments() -> None:
    eye, weight = torch.eye(4), torch.ones(2, 4)
    nan = torch.full((4, 4), math.nan)
    for call in (lambda: select_leverage(eye, 0).channels, lambda: select_eliminate(eye, weight, 5).channels):
        with pytest.raises(ValueError, match=r"count must be within 1\.\.4"):
            call()
    for call in (lambda: ridge_leverage(nan)[0], lambda: nystrom_refit(weight, nan, torch.arange(2))):
        with pytest.raises(ValueError, match="moment: 16 of 16"):
            call()
    with pytest.raises(ValueError, match="weight: 1 of 8"):
        select_eliminate(eye, torch.tensor([[1.0, 1.0, 1.0, math.inf], [1.0] * 4]), 2)
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(4, 4\)"):
        nystrom_refit(torch.ones(2, 3), eye, torch.arange(2))
    for bad in ([1, 0], [0, 0], [0, 4], [-1, 2], []):
        with pytest.raises(ValueError, match=r"strictly ascending int64 vector within 0\.\.3"):
            nystrom_refit(weight, eye, torch.tensor(bad, dtype=torch.int64))
    with pytest.raises(ValueError, match="block"):
        select_eliminate(eye, weight, 2, 0)
    for ridge in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="ridge"):
            ridge_leverage(eye, ridge)[0]
    with pytest.raises(ValueError, match="diagonal holds -1"):
        ridge_leverage(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(ValueError, match="not positive semidefinite"):
        select_eliminate(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.ones(1, 2), 1)


@pytest.mark.parametrize("singular", [False, True])
def test_nested_losses_are_those_of_each_refit(singular: bool) -> None:
    source = torch.Generator().manual_seed(11)
    N, D = 14, 5
    values = torch.randn(9 if singular else 60, N, dtype=torch.float64, generator=source)
    values[:, 3] = 0.0  # a dead channel
    moment, weight = values.T @ values / len(values), torch.randn(D, N, dtype=torch.float64, generator=source)
    half = torch.randn(D, D, dtype=torch.float64, generator=source)
    metric, priority = half @ half.T, torch.randperm(N, generator=source)
    outputs = nested_outputs(moment, weight, priority)
    felt = torch.linalg.cholesky(metric).T
    torch.testing.assert_close(nested_outputs(moment, felt @ weight, priority), felt @ outputs)
    losses = nested_losses(felt @ outputs)
    assert losses.shape == (N + 1,)
    for count in range(1, N + 1):
        kept = priority[:count].sort().values
        change = weight.clone()
        change[:, kept] -= nystrom_refit(weight, moment, kept)[0]
        expected = 0.5 * torch.trace(metric @ change @ moment @ change.T)
        torch.testing.assert_close(losses[count], expected, rtol=1e-6, atol=1e-6 * float(losses[0]))
        refit = weight - change
        spread = refit @ moment @ refit.T
        first = outputs[:, :count]
        torch.testing.assert_close(first @ first.T, spread, rtol=1e-6, atol=1e-6 * float(spread.abs().max()))
    assert losses[0] == pytest.approx(float(0.5 * torch.trace(metric @ weight @ moment @ weight.T)), rel=1e-6)


def test_elimination_is_nested_and_its_set_is_that_of_select() -> None:
    source = torch.Generator().manual_seed(12)
    values = torch.randn(80, 30, dtype=torch.float64, generator=source)
    moment, weight = values.T @ values, torch.randn(6, 30, dtype=torch.float64, generator=source)
    order = eliminate(moment, weight, 4, block=3).order
    assert order.unique().numel() == 26
    for count in (29, 20, 11, 4):
        kept = select_eliminate(moment, weight, count).channels
        assert torch.equal(kept, torch.tensor(sorted(set(range(30)) - set(order[: 30 - count].tolist()))))


def test_nested_losses_wrong_input() -> None:
    moment, weight = torch.eye(4), torch.ones(2, 4)
    with pytest.raises(ValueError, match="not a permutation"):
        nested_outputs(moment, weight, torch.tensor([0, 1, 1, 3]))
    with pytest.raises(ValueError, match="do not fit"):
        nested_outputs(moment, torch.ones(2, 3), torch.arange(4))
    with pytest.raises(ValueError, match="NaN"):
        nested_outputs(moment, torch.full((2, 4), float("nan")), torch.arange(4))


def test_reports_say_what_was_done() -> None:
    moment, weight, _ = problem(12, 5, 200)
    refit, report = nystrom_refit(weight, moment, torch.arange(9))
    assert (report["jitter"], report["fallback"], report["dropped"]) == (0.0, False, 0)
    assert refit.dtype == torch.float64
    assert select_leverage(moment, 4).jitter == 0.0
    few, weight, _ = problem(12, 5, 6)
    _, report = nystrom_refit(weight, few, torch.arange(10))
    assert (report["fallback"], report["dropped"]) == (True, 4)  # six tokens carry six directions
    correlations = few[:10, :10] / few.diagonal()[:10].sqrt() / few.diagonal()[:10].sqrt()[:, None]
    kept = torch.linalg.eigvalsh(correlations).flip(0)[:6]
    assert report["condition"] == pytest.approx(float(kept[0] / kept[-1]), rel=1e-6)
