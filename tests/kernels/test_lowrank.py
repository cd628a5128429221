"""Truncated SVDs, plain and weighted by the input, against full float64 SVDs; condition numbers."""

import math

import pytest
import torch
from torch import Tensor

from pipeline.kernels import lowrank
from pipeline.kernels.lowrank import (
    InputRoots,
    input_roots,
    joint_low_rank,
    log_condition,
    low_rank,
    rank_limit,
    truncated_svd,
)


def matrix(outputs: int, inputs: int, seed: int = 0, condition: float = 30.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    short = min(outputs, inputs)
    left = torch.linalg.qr(torch.randn(outputs, short, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(inputs, short, generator=generator, dtype=torch.float64)).Q
    return left * torch.logspace(0, -math.log10(condition), short, dtype=torch.float64) @ right.T


def calibration(tokens: int, width: int) -> Tensor:
    return 5 * torch.randn(tokens, width, generator=torch.Generator().manual_seed(9)).double() @ matrix(width, width, 3)


GRID = [(1, 1), (1, 5), (5, 1), (4, 9), (9, 4), (7, 7)]


@pytest.mark.parametrize(("outputs", "inputs"), GRID)
@pytest.mark.parametrize("condition", [30.0, 1e9, 1e15])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_svd_is_the_full_one_cut(outputs: int, inputs: int, condition: float, scale: float) -> None:
    whole = matrix(outputs, inputs, condition=condition) * scale
    before = whole.clone()
    exact = torch.linalg.svd(whole, full_matrices=False)
    for rank in range(1, min(outputs, inputs) + 1):
        left, values, right = truncated_svd(whole, rank)
        assert left.shape == (outputs, rank)
        assert right.shape == (inputs, rank)
        atol = 1e-8 * float(exact.S[0])
        torch.testing.assert_close(values, exact.S, rtol=0, atol=atol)
        torch.testing.assert_close(values[:rank], exact.S[:rank], rtol=1e-5, atol=1e-14 * float(exact.S[0]))
        best = exact.U[:, :rank] * exact.S[:rank] @ exact.Vh[:rank]
        torch.testing.assert_close(left * values[:rank] @ right.T, best, rtol=0, atol=atol)
        error = torch.linalg.norm(whole - left * values[:rank] @ right.T)
        assert float(error) <= float(exact.S[rank:].square().sum().sqrt()) * (1 + 1e-6) + 1e-12 * float(exact.S[0])
        assert bool((right.gather(0, right.abs().argmax(0, keepdim=True)) > 0).all())
    assert torch.equal(whole, before)


def test_svd_of_zero_and_of_rank_deficient_matrices() -> None:
    left, values, right = truncated_svd(torch.zeros(3, 5), 2)
    assert torch.equal(left * values[:2] @ right.T, torch.zeros(3, 5, dtype=torch.float64))
    low = matrix(6, 2) @ matrix(2, 8)
    left, values, right = truncated_svd(low, 4)
    torch.testing.assert_close(left * values[:4] @ right.T, low)


@pytest.mark.parametrize(("outputs", "inputs"), GRID)
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_low_rank_error_is_the_dropped_values(outputs: int, inputs: int, balanced: bool, weighted: bool) -> None:
    weight, x_TD = matrix(outputs, inputs), calibration(50, inputs)
    moment = x_TD.T @ x_TD
    roots = input_roots(moment) if weighted else None
    unit = moment / moment.diagonal().mean() if weighted else torch.eye(inputs, dtype=torch.float64)
    for rank in range(1, min(outputs, inputs) + 1):
        first, second, values = low_rank(weight, rank, roots, balanced)
        residual = weight - second @ first
        error = float(torch.trace(residual @ unit @ residual.T))
        assert error == pytest.approx(float(values[rank:].square().sum()), rel=1e-6, abs=1e-12)
        norms = first.norm(dim=1), second.norm(dim=0)
        if not weighted:
            torch.testing.assert_close(norms[0], values[:rank].sqrt() if balanced else torch.ones_like(norms[0]))
        torch.testing.assert_close(norms[1], values[:rank].sqrt() if balanced else values[:rank])
    torch.testing.assert_close(second @ first, weight, rtol=1e-8, atol=1e-9)


def test_input_weighting_is_optimal_on_the_inputs() -> None:
    weight, x_TD = matrix(7, 6), calibration(80, 6)
    first, second, _ = low_rank(weight, 3, input_roots(x_TD.T @ x_TD))
    outputs_Tm = x_TD @ weight.T

    def error(first: Tensor, second: Tensor) -> float:
        return float((outputs_Tm - x_TD @ first.T @ second.T).square().sum())

    best = torch.linalg.svdvals(outputs_Tm)[3:].square().sum()
    assert error(first, second) == pytest.approx(float(best), rel=1e-9)
    plain = low_rank(weight, 3)
    assert error(first, second) < error(plain.first, plain.second)


def test_input_weighting_with_inputs_of_low_rank_stays_finite_and_exact() -> None:
    weight, x_TD = matrix(8, 6), calibration(3, 6)
    roots = input_roots(x_TD.T @ x_TD)
    assert roots.clipped == 3
    first, second, _ = low_rank(weight, 3, roots)
    torch.testing.assert_close(x_TD @ first.T @ second.T, x_TD @ weight.T, rtol=1e-6, atol=1e-6)
    first, second, _ = low_rank(weight, 6, roots)
    torch.testing.assert_close(second @ first, weight, rtol=0, atol=1e-8)
    zero = low_rank(weight, 2, input_roots(torch.zeros(6, 6)))
    plain = low_rank(weight, 2)
    torch.testing.assert_close(zero.second @ zero.first, plain.second @ plain.first)


def test_joint_is_the_stack_and_shares_its_first_factor() -> None:
    gate, up = matrix(5, 4, 1), matrix(7, 4, 2)
    first, seconds, values = joint_low_rank([gate, up], 3)
    assert [tuple(second.shape) for second in seconds] == [(5, 3), (7, 3)]
    stack = torch.cat((gate, up)).double()
    error = float((stack - torch.cat(seconds) @ first).square().sum())
    assert error == pytest.approx(float(torch.linalg.svdvals(stack)[3:].square().sum()), rel=1e-9)
    torch.testing.assert_close(first.norm(dim=1), values[:3].sqrt())
    x_TD = calibration(40, 4)
    roots = input_roots(x_TD.T @ x_TD)
    weighted = joint_low_rank([gate, up], 3, roots)
    error = float((x_TD @ (stack - torch.cat(weighted[1]) @ weighted[0]).T).square().sum())
    assert error == pytest.approx(float(torch.linalg.svdvals(x_TD @ stack.T)[3:].square().sum()), rel=1e-8)


def test_rank_limit_is_the_last_that_saves() -> None:
    for outputs, inputs in ((1, 1), (3, 7), (22016, 4096), (4096, 4096), (2, 2)):
        limit = rank_limit(outputs, inputs)
        assert limit * (outputs + inputs) < outputs * inputs <= (limit + 1) * (outputs + inputs)


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 9), (9, 5), (6, 6)])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1e6, 1e12])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_log_condition(outputs: int, inputs: int, condition: float, scale: float) -> None:
    weight = matrix(outputs, inputs, condition=condition) * scale
    value, clipped = log_condition(weight)
    assert value == pytest.approx(math.log(condition), abs=1e-3)
    assert not clipped


def test_log_condition_of_singular_matrices() -> None:
    assert log_condition(torch.zeros(3, 3)) == (pytest.approx(-math.log(torch.finfo(torch.float64).eps)), True)
    assert log_condition(torch.diag(torch.tensor([1.0, 1e-3, 0.0])), 1e-6) == (pytest.approx(math.log(1e6)), True)
    assert log_condition(torch.ones(1, 4)) == (0.0, False)


def test_arguments() -> None:
    eye = torch.eye(3)
    for rank in (0, 4):
        with pytest.raises(ValueError, match=r"rank must be within 1\.\.3"):
            truncated_svd(torch.ones(3, 5), rank)
    with pytest.raises(ValueError, match="weight: 1 of 9"):
        low_rank(torch.eye(3).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan)), 1)
    with pytest.raises(ValueError, match=r"\(3, 3\) do not fit weights of shapes \[\(2, 4\)\]"):
        low_rank(torch.ones(2, 4), 1, InputRoots(eye, eye, 0))
    with pytest.raises(ValueError, match=r"\[\(3, 3\), \(2, 4\)\]"):
        joint_low_rank([eye, torch.ones(2, 4)], 1)
    with pytest.raises(ValueError, match="matrix is needed"):
        truncated_svd(torch.ones(3), 1)
    with pytest.raises(ValueError, match="floor"):
        log_condition(eye, 0.0)


def test_tall_stacks_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not divide the rows give what one block gives, and the stack that is never built."""
    weights = [matrix(23, 6, seed=1), matrix(10, 6, seed=2)]
    first, seconds, values = joint_low_rank(weights, 4)
    stack = torch.cat(weights)
    product = torch.cat(seconds) @ first
    assert float((stack - product).square().sum()) == pytest.approx(float(values[4:].square().sum()), rel=1e-9)
    monkeypatch.setattr(lowrank, "BLOCK_ROWS", 4)
    for found, expected in zip(joint_low_rank(weights, 4)[1], seconds, strict=True):
        torch.testing.assert_close(found, expected)


def test_rank_limit_is_a_whole_number() -> None:
    limit = rank_limit(11, 7)
    assert isinstance(limit, int)
    assert limit * 18 < 77 <= (limit + 1) * 18


@pytest.mark.parametrize("outputs", [3, 8])
def test_factors_of_half_weights_are_float32(outputs: int) -> None:
    weight = matrix(outputs, 5).to(torch.bfloat16)
    found = low_rank(weight, 2)
    assert (found.first.dtype, found.second.dtype, found.values.dtype) == (torch.float32, torch.float32, torch.float64)
    exact = low_rank(weight.double(), 2)
    torch.testing.assert_close(found.second @ found.first, (exact.second @ exact.first).float(), rtol=1e-5, atol=1e-6)
    assert log_condition(weight)[0] == pytest.approx(log_condition(weight.double())[0], rel=1e-12)
