"""Rounding with error feedback, against GPTQ written out: after each column the inverse of what is left, in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.gptq import (
    Rounded,
    choose_scales,
    error_feedback,
    round_to_nearest,
    rounding_error,
)
from pipeline.kernels.gptq import round_with_feedback as round_with
from pipeline.kernels.levels import LevelKind
from pipeline.kernels.packing import code_range

DAMPING = 0.01
SHAPES = [(60, 8, 4), (60, 32, 8), (40, 160, 32), (60, 24, None), (20, 300, 100)]  # rows, columns, group


def problem(rows: int, columns: int, tokens: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, dtype=torch.float64, generator=source)
    inputs = torch.randn(tokens or 4 * columns, columns, dtype=torch.float64, generator=source) @ mix
    weight = torch.randn(rows, columns, dtype=torch.float64, generator=source)
    return weight, inputs.T @ inputs


def round_with_feedback(weight: Tensor, moment: Tensor, bits: int, group: int | None, dtype: torch.dtype) -> Rounded:
    return round_with(weight, error_feedback(moment, DAMPING), bits, group, dtype)


def by_hand(weight: Tensor, moment: Tensor, bits: int, scales: Tensor, damping: float) -> Tensor:
    """One column at a time: rounded, its error fed to all others by the inverse, then taken out of the inverse."""
    low, high = code_range(bits)
    left, codes = weight.clone(), torch.zeros_like(weight)
    inverse = torch.linalg.inv(moment + damping * moment.diagonal().mean() * torch.eye(len(moment)))
    steps = scales.double().repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)
    for column in torch.argsort(moment.diagonal(), descending=True, stable=True).tolist():
        codes[:, column] = (left[:, column] / steps[:, column]).round().clamp(low, high)
        error = (left[:, column] - codes[:, column] * steps[:, column]) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        inverse = inverse - inverse[:, [column]] @ inverse[[column]] / inverse[column, column]
    return codes.to(torch.int8)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_feedback_is_that_of_the_inverse(rows: int, columns: int, group: int | None, bits: int) -> None:
    weight, moment = problem(rows, columns)
    before = weight.clone(), moment.clone()
    found = round_with_feedback(weight, moment, bits, group, torch.float32)
    expected = by_hand(weight, moment, bits, found.scales, DAMPING)
    # A number half way between two codes may go either way, and takes the rest of its row along.
    assert (found.codes == expected).all(dim=1).double().mean() > 0.8
    by_values = expected.double() * found.scales.double().repeat_interleave(group or columns, dim=1)
    mine, other = (rounding_error(weight, values, moment) for values in (found.values, by_values))
    assert mine == pytest.approx(other, rel=1e-2)
    assert found.damping == DAMPING
    assert torch.equal(weight, before[0])
    assert torch.equal(moment, before[1])


@pytest.mark.parametrize(("bits", "levels"), [(3, "uniform"), (8, "uniform"), (4, "iq4_nl"), (3, "learned")])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_shrinkage_is_that_of_the_moment(
    rows: int, columns: int, group: int | None, bits: int, levels: LevelKind
) -> None:
    """For codes, scales and their polishing."""
    weight, moment = problem(rows, columns, tokens=columns // 2)
    before = moment.clone()
    shrunk = 0.7 * moment + 0.3 * torch.diag(moment.diagonal())
    found, expected = (
        round_with(weight, feedback, bits, group, torch.float32, levels)
        for feedback in (
            error_feedback(moment, DAMPING, polish=2, shrinkage=0.3),
            error_feedback(shrunk, DAMPING, polish=2),
        )
    )
    assert (found.codes == expected.codes).all(dim=1).double().mean() > 0.9  # sums round otherwise
    assert torch.equal(moment, before)
    mine, other = (rounding_error(weight, each.values, shrunk) for each in (found, expected))
    assert mine == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("tokens", [None, 20])
def test_feedback_beats_nearest(bits: int, tokens: int | None) -> None:
    weight, moment = problem(16, 96, tokens)
    fed = round_with_feedback(weight, moment, bits, 32, torch.float32)
    nearest = round_to_nearest(weight, bits, 32, torch.float32)
    fed_error = rounding_error(weight, fed.values, moment)
    assert fed_error < 0.6 * rounding_error(weight, nearest.values, moment)
    again = round_with_feedback(weight * 2.0**40, moment * 2.0**-60, bits, 32, torch.float32)
    assert torch.equal(again.codes, fed.codes)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nearest_is_the_nearest(bits: int, dtype: torch.dtype) -> None:
    weight, _ = problem(4, 48)
    found = round_to_nearest(weight, bits, 16, dtype)
    assert found.scales.dtype == dtype
    assert found.scales.shape == (4, 3)
    low, high = code_range(bits)
    steps = found.scales.double().repeat_interleave(16, dim=1)
    every = torch.arange(low, high + 1, dtype=torch.float64)[:, None, None] * steps
    assert torch.equal((found.values - weight).abs(), (every - weight).abs().amin(0))


def test_no_other_clip_is_better() -> None:
    weight, _ = problem(3, 32)
    importance = torch.linspace(0.1, 9.0, 32, dtype=torch.float64)

    def error(scales: Tensor) -> Tensor:
        codes = (weight / scales.double()).round().clamp(-8, 7)
        return ((codes * scales.double() - weight).square() * importance).sum(1, keepdim=True)

    found = choose_scales(weight, 4, None, torch.float32, importance)
    whole = weight.abs().amax(1, keepdim=True) / 7.5
    for clip in torch.linspace(0.525, 1.0, 20).tolist():
        assert (error(found) <= error((whole * clip).float()) * (1 + 1e-9)).all()
    assert (found < whole).any()
    assert torch.equal(
        choose_scales(weight, 8, None, torch.float32), (weight.abs().amax(1, keepdim=True) / 127.5).float()
    )


def test_moments_that_say_little() -> None:
    weight, moment = problem(4, 32)
    alike = torch.ones(32, dtype=torch.float64)
    for tiny, importance in ((torch.zeros(32, 32), None), (1e-300 * alike.diag(), alike)):
        nearest = round_to_nearest(weight, 4, 16, torch.float32, importance)
        found = round_with_feedback(weight, tiny, 4, 16, torch.float32)
        assert torch.equal(found.codes, nearest.codes)
        assert torch.equal(found.scales, nearest.scales)
    dead = moment.clone()
    dead[5], dead[:, 5] = 0.0, 0.0
    found = round_with_feedback(weight, dead, 4, 16, torch.float32)
    steps = found.scales.double().repeat_interleave(16, dim=1)
    alone = (weight / steps)[:, 5].clamp(-8.0, 7.0)
    assert (alone - found.codes[:, 5]).abs().max() < 0.5 + 1e-5  # its own error alone
    lone = torch.outer(moment[0], moment[0])  # rank one
    once = round_with_feedback(weight, lone, 4, 16, torch.float32)
    assert rounding_error(weight, once.values, lone) < 0.05 * rounding_error(weight, nearest.values, lone)
    skew = moment - 0.1 * moment.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    assert round_with_feedback(weight, skew, 4, 16, torch.float32).damping > DAMPING
    with pytest.raises(ValueError, match="far from positive semidefinite"):
        round_with_feedback(weight, -moment, 4, 16, torch.float32)


def test_zeros_and_tiny_weights() -> None:
    weight, moment = problem(3, 16)
    weight[1] = 0.0
    found: Rounded = round_with_feedback(weight, moment, 4, 8, torch.float16)
    assert not found.codes[1].any()
    assert torch.equal(found.scales[1], torch.ones(2, dtype=torch.float16))
    tiny = round_with_feedback(1e-12 * weight, moment, 4, 8, torch.float16)
    assert (tiny.scales > 0).all()
    assert not tiny.codes.any()


def test_wrong_input() -> None:
    weight, moment = problem(2, 8)
    with pytest.raises(ValueError, match="groups of 3 do not divide 8 columns"):
        round_to_nearest(weight, 4, 3, torch.float32)
    with pytest.raises(ValueError, match=r"moment \(7, 7\) does not fit a weight \(2, 8\)"):
        round_with_feedback(weight, moment[:7, :7], 4, 4, torch.float32)
    with pytest.raises(ValueError, match="weight: 1 of 16 numbers"):
        round_with_feedback(
            weight.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(torch.nan).double()),
            moment,
            4,
            4,
            torch.float32,
        )
    with pytest.raises(ValueError, match="moment: 64 of 64 numbers"):
        round_with_feedback(weight, moment / 0.0, 4, 4, torch.float32)
    with pytest.raises(ValueError, match=r"is beyond torch\.float16"):
        round_to_nearest(1e9 * weight, 4, 4, torch.float16)
    with pytest.raises(ValueError, match=r"a matrix is needed, not shape \(8,\)"):
        round_to_nearest(weight[0], 4, 4, torch.float32)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_polished_uniform_codes_lose_less(rows: int, columns: int, group: int | None, bits: int) -> None:
    weight, moment = problem(rows, columns)
    plain, polished = (
        round_with(weight, error_feedback(moment, DAMPING, 0.5, sweeps), bits, group, torch.bfloat16)
        for sweeps in (0, 1)
    )
    damped = moment + DAMPING * moment.diagonal().mean() * torch.eye(columns)
    before, after = (rounding_error(weight, rounded.values, damped) for rounded in (plain, polished))
    assert after < 0.95 * before
    low, high = code_range(bits)
    assert polished.levels is None
    assert low <= int(polished.codes.min()) <= int(polished.codes.max()) <= high
    assert (polished.scales > 0.0).all()


def test_eight_bits_are_not_polished() -> None:
    weight, moment = problem(8, 64)
    plain, polished = (
        round_with(weight, error_feedback(moment, DAMPING, 0.5, sweeps), 8, 32, torch.bfloat16) for sweeps in (0, 1)
    )
    assert torch.equal(plain.codes, polished.codes)
    assert torch.equal(plain.scales, polished.scales)
