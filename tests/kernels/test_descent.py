"""Steps of a given relative length: singular values made equal, against a decomposition, and what stays."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels import descent
from pipeline.kernels.descent import Descent, descent_flops, equalized, equalizer

GENERATOR = torch.Generator().manual_seed(3)


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (30, 7), (3, 6, 8), (1, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_become_alike_and_directions_stay(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(dtype)
    before = matrix.clone()
    result = equalized(matrix, equalizer(matrix))
    assert torch.equal(matrix, before)
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    inner = left.mT @ result.double() @ right.mT
    singular = inner.diagonal(dim1=-2, dim2=-1)
    assert ((singular > 0.65) & (singular < 1.25)).all()
    assert (inner - torch.diag_embed(singular)).abs().max() < 1e-4


def test_long_sides_are_equalized_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(10, 30, generator=GENERATOR, dtype=torch.float64)
    whole = equalized(matrix, equalizer(matrix))
    monkeypatch.setattr(descent, "BLOCK", 4)
    result = equalized(matrix, equalizer(matrix))
    assert torch.equal(equalized(matrix.mT, equalizer(matrix.mT)), result.mT)
    assert not torch.allclose(result, whole)
    for start in (0, 4, 8):
        rows = matrix[start : start + 4]
        assert torch.allclose(result[start : start + 4], equalized(rows, equalizer(rows)))
    assert descent_flops(10, 30) == descent_flops(30, 10) < 3 * descent_flops(4, 30) + 1


def test_a_step_is_a_share_of_each_tensor() -> None:
    tensors = [torch.randn(6, 4, generator=GENERATOR), 1e-3 * torch.randn(5, generator=GENERATOR), torch.zeros(3)]
    for values in tensors:
        values.requires_grad_().grad = 1e4 * torch.randn(values.shape, generator=GENERATOR)
    before = [values.detach().clone() for values in tensors]
    Descent(tensors).step(0.01)
    changes = [
        float((values.detach() - old).square().mean().sqrt()) for values, old in zip(tensors, before, strict=True)
    ]
    sizes = [float(old.square().mean().sqrt()) for old in before]
    assert changes[0] == pytest.approx(0.01 * sizes[0], rel=1e-4)
    assert changes[1] == pytest.approx(0.01 * sizes[1], rel=1e-4)
    assert changes[2] == pytest.approx(0.01 * sizes[1], rel=1e-4)


@pytest.mark.parametrize("gradient", [None, 0.0])
def test_without_a_gradient_a_tensor_stays(gradient: float | None) -> None:
    for values in (torch.ones(4, 3), torch.ones(3)):
        values.requires_grad_().grad = None if gradient is None else torch.full_like(values, gradient)
        Descent([values]).step(0.1)
        assert torch.equal(values.detach(), torch.ones_like(values))


def test_a_factor_of_zeros_does_not_ruin_the_other() -> None:
    target = torch.randn(6, 8, generator=GENERATOR)
    left, right = torch.zeros(6, 3, requires_grad=True), torch.randn(3, 8, generator=GENERATOR).requires_grad_()
    training = Descent([left, right])
    errors = []
    for _ in range(9):
        left.grad = right.grad = None
        error = (left @ right - target).square().mean()
        error.backward()
        training.step(0.05)  # the first gradient of `right` is zero
        errors.append(float(error.detach()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]
