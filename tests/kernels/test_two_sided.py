"""Feedback on both sides, against the sum written out entry by entry in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels import gptq
from pipeline.kernels.gptq import Feedback, Rounded, error_feedback, round_with_feedback
from pipeline.kernels.levels import LevelKind
from pipeline.kernels.two_sided import OutputFeedback, output_feedback, round_both_sides
from tests.tensors import random

SHAPES = [(8, 8, 4, 1), (40, 64, 32, 1), (33, 70, None, 1), (64, 96, 16, 2), (90, 48, 16, 3), (1, 32, 16, 1)]


def moment(size: int, tokens: int, seed: int) -> Tensor:
    values = random(tokens, size, seed=seed) @ random(size, size, seed=seed + 1)
    return values.T @ values


def problem(rows: int, columns: int, sections: int, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, the moment of its inputs, and those of the gradients at each section of outputs."""
    height = rows // sections
    gradients = [moment(height, tokens or 4 * height, seed=10 + number) for number in range(sections)]
    return random(rows, columns, seed=3), moment(columns, tokens or 4 * columns, seed=1), torch.stack(gradients)


def feedback_of(inputs: Tensor, damping: float = 0.01, polish: int = 0) -> Feedback:
    feedback = error_feedback(inputs, damping, polish=polish)
    assert feedback is not None
    return feedback


def sections_of(gradients: Tensor, damping: float = 3.0) -> list[OutputFeedback]:
    return [output_feedback(gradient, damping) for gradient in gradients]


def loss(weight: Tensor, values: Tensor, inputs: Tensor, gradients: Tensor) -> float:
    """tr(G Δ M Δᵀ) over sections."""
    change = (values - weight).reshape(len(gradients), -1, weight.shape[1])
    return float((gradients @ change * (change @ inputs)).sum())


def damped_factor(matrix: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The order by falling diagonal, and the unit upper triangular U of the damped matrix U D Uᵀ in it."""
    order = torch.argsort(matrix.diagonal(), descending=True, stable=True)
    damped = matrix[order][:, order] + damping * matrix.diagonal().mean() * torch.eye(len(matrix))
    lower = torch.linalg.cholesky(damped.flip(0, 1))
    upper = lower.flip(0, 1)
    return order, upper / upper.diagonal()


def by_hand(weight: Tensor, inputs: Tensor, gradients: Tensor, found: Rounded, dampings: tuple[float, float]) -> Tensor:
    """The stored values, entry by entry."""
    width = weight.shape[1] // found.scales.shape[1]
    steps = found.scales.double().repeat_interleave(width, dim=1)
    table = found.levels
    levels = torch.arange(found.codes.min(), found.codes.max() + 1) if table is None else table
    height, (columns, right) = len(weight) // len(gradients), damped_factor(inputs, dampings[0])
    values = torch.empty_like(weight)
    for number, gradient in enumerate(gradients):
        rows, left = damped_factor(gradient, dampings[1])
        rows = rows + number * height
        target, scale = weight[rows][:, columns], steps[rows][:, columns]
        error = torch.zeros_like(target)
        for j in range(target.shape[1]):
            for i in range(len(target)):
                wanted = target[i, j] + left[: i + 1, i] @ error[: i + 1, : j + 1] @ right[: j + 1, j]
                each = levels.double() * scale[i, j]
                error[i, j] = target[i, j] - each[(wanted - each).abs().argmin()]
        values[rows[:, None], columns] = target - error
    return values


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("levels", ["uniform", "normal"])
@pytest.mark.parametrize(("rows", "columns", "group", "sections"), SHAPES)
def test_codes_are_those_of_the_sum_written_out(
    rows: int,
    columns: int,
    group: int | None,
    sections: int,
    levels: LevelKind,
    bits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gptq, "TABLE_SWEEPS", 0)  # of polishing, which is tested below
    weight, inputs, gradients = problem(rows, columns, sections)
    before = weight.clone(), inputs.clone(), gradients.clone()
    feedback = feedback_of(inputs, 0.1)
    found = round_both_sides(weight, feedback, sections_of(gradients, 1.0), bits, group, torch.float32, levels)
    expected = by_hand(weight, inputs, gradients, found, (0.1, 1.0))
    # A number half way between two levels may go either way, and takes later entries along.
    assert torch.isclose(found.values, expected, atol=1e-6).double().mean() > 0.9
    mine, other = (loss(weight, values, inputs, gradients) for values in (found.values, expected))
    assert mine == pytest.approx(other, rel=0.03)
    for tensor, copy in zip((weight, inputs, gradients), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("tokens", [None, 24], ids=["full", "deficient"])
@pytest.mark.parametrize(("rows", "columns", "sections"), [(64, 96, 1), (128, 64, 2)])
def test_both_sides_beat_one(rows: int, columns: int, sections: int, tokens: int | None) -> None:
    weight, inputs, gradients = problem(rows, columns, sections, tokens)
    feedback, outputs = feedback_of(inputs), sections_of(gradients, 0.01)
    one = round_with_feedback(weight, feedback, 3, 32, torch.float32)
    both = round_both_sides(weight, feedback, outputs, 3, 32, torch.float32)
    assert loss(weight, both.values, inputs, gradients) < 0.8 * loss(weight, one.values, inputs, gradients)


@pytest.mark.parametrize("levels", ["uniform", "learned"])
@pytest.mark.parametrize(
    ("tokens", "damping", "gain"), [(500, 3.0, 0.98), (500, 0.1, 1.0), (1, 0.1, 1.0)], ids=["damped", "full", "one"]
)
@pytest.mark.parametrize("sections", [1, 2])
def test_polishing_adds_no_error(
    sections: int, tokens: int, damping: float, gain: float, levels: LevelKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However closely the rows depend on each other: with one token, G has rank one."""
    weight, inputs, _ = problem(128, 64, 1)
    gradients = torch.stack([moment(128 // sections, tokens, seed=20 + number) for number in range(sections)])

    def polished(sweeps: int) -> float:
        monkeypatch.setattr(gptq, "TABLE_SWEEPS", sweeps)
        feedback = feedback_of(inputs, 0.1, polish=sweeps)
        rounded = round_both_sides(weight, feedback, sections_of(gradients, damping), 3, 32, torch.bfloat16, levels)
        return loss(weight, rounded.values, damped_moment(inputs, 0.1), damped_moment(gradients, damping))

    losses = [polished(sweeps) for sweeps in (0, 1, 3)]
    assert losses[1] <= gain * losses[0] * (1 + 1e-5)
    assert losses[2] <= losses[1] * (1 + 1e-5)


def damped_moment(moments: Tensor, damping: float) -> Tensor:
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    return moments + damping * mean * torch.eye(moments.shape[-1])


@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_sizes_of_numbers_change_no_code(size: float) -> None:
    weight, inputs, gradients = problem(40, 64, 1)
    once, again = (
        round_both_sides(weight * by, feedback_of(inputs * by), sections_of(gradients / by), 4, 32, torch.float32)
        for by in (1.0, size)
    )
    assert torch.equal(once.codes, again.codes)


def test_gradients_that_say_nothing_leave_one_side() -> None:
    weight, inputs, _ = problem(64, 64, 1)
    feedback = feedback_of(inputs)
    one = round_with_feedback(weight, feedback, 4, 32, torch.float32)
    for gradients in (torch.zeros(2, 32, 32), torch.eye(32, dtype=torch.float64).repeat(2, 1, 1)):
        both = round_both_sides(weight, feedback, sections_of(gradients), 4, 32, torch.float32)
        assert torch.equal(both.scales, one.scales)
        assert (both.codes == one.codes).double().mean() > 0.99
    half = torch.stack((torch.zeros(32, 32, dtype=torch.float64), moment(32, 100, seed=5)))
    both = round_both_sides(weight, feedback, sections_of(half, 0.1), 4, 32, torch.float32)
    assert (both.codes[:32] == one.codes[:32]).double().mean() > 0.99
    assert (both.codes[32:] != one.codes[32:]).any()


def test_wrong_input() -> None:
    weight, inputs, gradients = problem(6, 8, 1)
    feedback, outputs = feedback_of(inputs), sections_of(gradients)
    with pytest.raises(ValueError, match=r"sections of \[6\] outputs do not fit a weight \(4, 8\)"):
        round_both_sides(weight[:4], feedback, outputs, 4, 4, torch.float32)
    with pytest.raises(ValueError, match=r"moment \(8, 8\) does not fit a weight \(6, 4\)"):
        round_both_sides(weight[:, :4], feedback, outputs, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="moment: 36 of 36 numbers"):
        sections_of(gradients / 0.0)
    with pytest.raises(ValueError, match="far from positive semidefinite"):
        sections_of(-gradients)
    broken = weight.clone()
    broken[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weight: 1 of 48 numbers"):
        round_both_sides(broken, feedback, outputs, 4, 4, torch.float32)
