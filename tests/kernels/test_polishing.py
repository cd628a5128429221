"""Polishing never adds error, and ends where no single code and no single scale does better."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.levels import normal_levels
from pipeline.kernels.packing import scaled
from pipeline.kernels.polishing import Polishing, polish
from tests.tensors import random

SHAPES = [(7, 32, 8), (5, 24, None), (3, 300, None), (4, 160, 32)]  # rows, columns, group
DAMPING = 0.01
POLISHING = Polishing(4, DAMPING, signed=True)


def problem(rows: int, columns: int, group: int | None, bits: int, tokens: int) -> tuple[Tensor, ...]:
    """A weight, codes at random near it, scales, levels, and a moment."""
    inputs = random(tokens, columns, seed=1) * torch.linspace(0.1, 3.0, columns)
    codes = torch.randint(
        -(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), generator=torch.Generator().manual_seed(2)
    )
    scales = random(rows, 1 if group is None else columns // group, seed=3).float()
    return random(rows, columns), codes.to(torch.int8), scales, normal_levels(bits).float(), inputs.T @ inputs


def errors(weight: Tensor, values: Tensor, moment: Tensor) -> Tensor:
    """By row, with damping."""
    change = values - weight
    damped = moment + DAMPING * moment.diagonal().mean() * torch.eye(len(moment))
    return ((change @ damped) * change).sum(dim=1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [400, 10], ids=["full", "deficient"])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_no_row_gets_worse_and_each_is_at_rest(
    rows: int, columns: int, group: int | None, tokens: int, bits: int
) -> None:
    weight, codes, scales, levels, moment = problem(rows, columns, group, bits, tokens)
    before = [tensor.clone() for tensor in (weight, codes, scales, levels, moment)]

    def error(codes: Tensor, scales: Tensor) -> Tensor:
        return errors(weight, scaled(codes, scales.double(), levels), moment)

    first = error(codes, scales)
    for _ in range(40):
        last = error(codes, scales)
        before_step = codes, scales
        codes, scales = polish(weight, codes, scales, levels, moment, POLISHING)
        assert (error(codes, scales) <= last * (1 + 1e-4)).all()
        if torch.equal(codes, before_step[0]) and torch.equal(scales, before_step[1]):
            break
    rest = error(codes, scales)
    assert (rest < first).all()
    for column in (0, columns - 1):  # no other code is better there
        for code in range(-(2 ** (bits - 1)), 2 ** (bits - 1)):
            other = codes.clone()
            other[:, column] = code
            assert (error(other, scales) >= rest * (1 - 1e-3)).all()
    assert (error(codes, 1.01 * scales) >= rest).all()
    assert (error(codes, 0.99 * scales) >= rest).all()
    for tensor, copy in zip((weight, levels, moment), (before[0], before[3], before[4]), strict=True):
        assert torch.equal(tensor, copy)


def test_groups_of_zero_levels_and_huge_weights_keep_finite_scales() -> None:
    tiny, levels = torch.finfo(torch.bfloat16).tiny, normal_levels(2).bfloat16()
    weight, codes, scales = torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.int8), torch.ones(2, 2).bfloat16()
    weight[1], scales[0] = 1e9, tiny
    polished_codes, polished_scales = polish(
        weight, codes, scales, levels, torch.eye(8, dtype=torch.float64), POLISHING
    )
    values = scaled(polished_codes, polished_scales.double(), levels)
    assert values[0].abs().max() <= tiny
    assert values[1] == pytest.approx(1e9, rel=0.01)
