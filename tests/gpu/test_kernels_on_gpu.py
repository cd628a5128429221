"""Kernels on a CUDA device, or the emulated one, against the same on the CPU."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels import spectra
from pipeline.kernels.elimination import prune
from pipeline.kernels.exact_sums import MomentSum, choose_grid, sample_squares, whole_moment
from pipeline.kernels.gptq import Rounded, error_feedback
from pipeline.kernels.levels import LevelKind
from pipeline.kernels.selection import nth_largest
from pipeline.kernels.spectra import eigh_descending
from pipeline.kernels.two_sided import output_feedback, round_both_sides
from tests.kernels.test_nystrom import problem
from tests.kernels.test_two_sided import problem as two_sided_problem

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.mark.slow
def test_elimination_and_refit() -> None:
    moment, weight, _ = problem(300, 80, 900)
    expected, found = prune(moment, weight, 200), prune(moment.to(CUDA), weight.to(CUDA), 200)
    assert torch.equal(found.channels.cpu(), expected.channels)
    torch.testing.assert_close(found.weight.cpu(), expected.weight, rtol=1e-8, atol=1e-9)
    assert found.error == pytest.approx(expected.error, rel=1e-8)


@pytest.mark.parametrize("limit", [1000, 40])
def test_eigenproblems_whole_and_split(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, _, _ = problem(120, 4, 400)
    expected, _ = eigh_descending(moment)
    monkeypatch.setattr(spectra, "LARGEST_EIGENPROBLEM", limit)
    values, vectors = eigh_descending(moment.to(CUDA))
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-10, atol=1e-10 * float(expected[0]))
    torch.testing.assert_close(
        (vectors * values) @ vectors.mT, moment.to(CUDA), rtol=0, atol=1e-10 * float(expected[0])
    )


def test_sums_without_an_order() -> None:
    rows = torch.randn(6000, 96, generator=torch.Generator().manual_seed(0)).bfloat16().to(CUDA)
    grid = choose_grid(sample_squares(rows[:500]), 500, len(rows), rows.dtype)
    moments = []
    for order in (1, -1):
        total = MomentSum(grid, 1, rows.device)
        for part in rows.split(1500)[::order]:
            total.add_(part)
        moments.append(whole_moment(total.bands(), grid))
    assert torch.equal(*moments)
    torch.testing.assert_close(moments[0][0], rows.double().T @ rows.double(), rtol=1e-5, atol=1e-2)


def test_nth_largest() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert float(nth_largest(values.to(CUDA), 1234)) == float(nth_largest(values, 1234))


@pytest.mark.parametrize("levels", ["uniform", "normal"])
def test_feedback_on_both_sides(levels: LevelKind) -> None:
    weight, inputs, gradients = two_sided_problem(40, 64, 2)

    def rounded(device: str) -> Rounded:
        feedback = error_feedback(inputs.to(device), 0.1)
        assert feedback is not None
        outputs = [output_feedback(gradient.to(device)) for gradient in gradients]
        return round_both_sides(weight.to(device), feedback, outputs, 4, 32, torch.bfloat16, levels)

    expected, found = rounded("cpu"), rounded(CUDA)
    torch.testing.assert_close(found.scales.cpu(), expected.scales)
    assert (found.codes.cpu() == expected.codes).double().mean() > 0.95  # sums of float32 in another order
