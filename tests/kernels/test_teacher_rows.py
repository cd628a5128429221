"""Rows of a teacher: their size, what they keep, and an unbiased divergence whose noise falls with it."""

from __future__ import annotations

import math

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


def reference(student_TV: torch.Tensor, rows_TW: torch.Tensor) -> torch.Tensor:
    """The divergence as the module's docstring writes it, in float64, for torch to differentiate."""
    tokens, kept = len(rows_TW), min(LIKELIEST, student_TV.shape[1] - 1)
    numbers = rows_TW.long()
    ids_TN = (numbers[:, : (kept + SAMPLES) * 3].reshape(tokens, -1, 3) * torch.tensor([1, 2**8, 2**16])).sum(dim=2)
    logs_TC = (numbers[:, (kept + SAMPLES) * 3 :].reshape(tokens, -1, 2) * torch.tensor([1, 2**8])).sum(dim=2) / -2048.0
    p_TN, r_T1 = logs_TC[:, :-1].double().exp(), logs_TC[:, -1:].double().exp()
    q_TV = student_TV.softmax(dim=1)
    q_TN = q_TV.gather(1, ids_TN)
    rest_T1 = q_TV.scatter(1, ids_TN[:, :kept], 0.0).sum(dim=1, keepdim=True)
    p_TC, q_TC = torch.cat([p_TN[:, :kept], r_T1], dim=1), torch.cat([q_TN[:, :kept], rest_T1], dim=1)
    p_TC = p_TC / p_TC.sum(dim=1, keepdim=True)
    e_TR = ((q_TN / rest_T1) / (p_TN / r_T1))[:, kept:]
    c = (r_T1.sum() * SAMPLES / (r_T1 * e_TR.detach() ** 2).sum()).item()
    return (p_TC * (p_TC / q_TC).log()).sum() + (r_T1 * (c * (e_TR - 1.0) - e_TR.log())).sum() / SAMPLES


@pytest.mark.parametrize("vocabulary", [3, 40, 1000])
@pytest.mark.parametrize("distance", [0.1, 2.0])
def test_the_divergence_and_its_gradient_are_those_of_float64(vocabulary: int, distance: float) -> None:
    teacher_TV = logits(6, vocabulary)
    student_TV = (teacher_TV + distance * logits(6, vocabulary, seed=1)).requires_grad_()
    exact_TV = student_TV.detach().double().requires_grad_()
    rows_TW = encode_rows(teacher_TV, 5)
    estimate, exact = row_divergence(student_TV, rows_TW) * 0.5, reference(exact_TV, rows_TW) * 0.5
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-4, abs=1e-6)
    estimate.backward()
    exact.backward()
    assert student_TV.grad is not None
    assert exact_TV.grad is not None
    assert (student_TV.grad - exact_TV.grad).norm() < 1e-4 * exact_TV.grad.norm() + 1e-6


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_seen(spoilt: float) -> None:
    student_TV = logits(2, 40)
    student_TV[1, 7] = spoilt
    student_TV.requires_grad_()
    divergence = row_divergence(student_TV, encode_rows(logits(2, 40), 0))
    divergence.backward()
    assert not math.isfinite(divergence.item())
    assert student_TV.grad is not None
    assert not student_TV.grad.isfinite().all()


def test_a_student_that_is_sure_of_a_likely_token_has_a_finite_divergence() -> None:
    teacher_TV, student_TV = logits(1, 200), torch.full((1, 200), -150.0)
    student_TV[0, teacher_TV.argmax()] = 0.0
    student_TV.requires_grad_()
    divergence = row_divergence(student_TV, encode_rows(teacher_TV, 0))
    divergence.backward()
    assert 0.0 < divergence.item() < math.inf
    assert student_TV.grad is not None
    assert student_TV.grad.isfinite().all()


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
