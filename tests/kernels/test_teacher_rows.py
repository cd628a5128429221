"""Rows of a teacher: their size, what they keep, and an unbiased divergence whose noise falls with it."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.teacher_rows import (
    LIKELIEST,
    SAMPLES,
    encode_rows,
    full_divergence,
    row_bytes,
    row_divergence,
)


def logits(tokens: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(tokens, vocabulary, generator=generator)


@pytest.mark.parametrize("vocabulary", [3, 16, 40, 1000])
def test_rows_have_their_size_and_a_student_that_agrees_has_no_divergence(vocabulary: int) -> None:
    teacher_TV = logits(5, vocabulary)
    rows_TW = encode_rows(teacher_TV, 0)
    assert rows_TW.shape == (5, row_bytes(vocabulary))
    assert row_bytes(200_000) == (LIKELIEST + SAMPLES) * 5 + 2 <= 200
    student_TV = teacher_TV.clone().requires_grad_()
    divergence = row_divergence(student_TV, rows_TW)
    divergence.backward()
    assert divergence.item() == pytest.approx(0.0, abs=1e-6)
    assert student_TV.grad is not None
    assert student_TV.grad.abs().max() < 2e-4  # the steps of a stored probability


def test_ids_of_three_bytes_and_a_larger_vocabulary() -> None:
    teacher_TV = torch.full((1, 70_000), -20.0)
    teacher_TV[0, [3, 300, 69_999]] = torch.tensor([2.0, 1.0, 3.0])
    student_TV = teacher_TV.clone()
    student_TV[0, 69_999] = 0.0
    exact = full_divergence(teacher_TV, student_TV)
    assert row_divergence(student_TV, encode_rows(teacher_TV, 0)) == pytest.approx(exact.item(), rel=1e-3)
    with pytest.raises(ValueError, match="more than 16777216"):
        encode_rows(torch.empty(1, 1).expand(1, 2**24 + 1), 0)


def test_the_divergence_and_its_gradient_are_unbiased_over_many_places_of_samples() -> None:
    teacher_TV, student_TV = logits(4, 300), (logits(4, 300) + 0.3 * logits(4, 300, seed=1)).requires_grad_()
    full = full_divergence(teacher_TV, student_TV)
    (exact_TV,) = torch.autograd.grad(full, student_TV)
    estimates, gradients_TV = [], torch.zeros_like(exact_TV)
    for place in range(400):
        estimate = row_divergence(student_TV, encode_rows(teacher_TV, 4 * place))
        gradients_TV += torch.autograd.grad(estimate, student_TV)[0] / 400
        estimates.append(estimate.item())
    assert sum(estimates) / 400 == pytest.approx(full.item(), rel=0.01)
    assert (gradients_TV - exact_TV).norm() < 0.05 * exact_TV.norm()


def test_the_noise_falls_with_the_divergence() -> None:
    teacher_TV = logits(64, 1000)

    def noise(distance: float) -> float:
        student_TV = (teacher_TV + distance * logits(64, 1000, seed=1)).requires_grad_()
        (exact_TV,) = torch.autograd.grad(full_divergence(teacher_TV, student_TV), student_TV)
        (gradient_TV,) = torch.autograd.grad(row_divergence(student_TV, encode_rows(teacher_TV, 0)), student_TV)
        return float((gradient_TV - exact_TV).norm())

    assert noise(0.01) < 0.1 * noise(0.5)
