"""A linear map before an RMS norm, fitted by x' and e', against the best of all maps found by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.normed import before_norm, inverse_rms

T, D, F, EPS = 400, 8, 6, 1e-6


def normed(y_TD: Tensor, gains_D: Tensor) -> Tensor:
    return gains_D * y_TD / (y_TD.square().mean(-1, keepdim=True) + EPS).sqrt()


def fitted(values_TF: Tensor, errors_TD: Tensor) -> Tensor:
    return torch.linalg.lstsq(values_TF, errors_TD).solution.T


def brute_force(x_TF: Tensor, y_TD: Tensor, errors_TD: Tensor, gains_D: Tensor) -> Tensor:
    """Minimise Σ ‖J_t Δ x_t − e_t‖² over all Δ (D, F), J_t the norm's Jacobian at token t."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda y_D: normed(y_D, gains_D)))(y_TD)
    rows_TDn = torch.einsum("tij,tf->tijf", jacobian, x_TF).flatten(2)
    solution = torch.linalg.lstsq(rows_TDn.flatten(0, 1), errors_TD.flatten(), driver="gelsd").solution
    return solution.unflatten(0, (D, F))


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_weighted_errors_are_those_behind_the_norm(size: float) -> None:
    """Of a few huge tokens, too, which the others would not count beside."""
    torch.manual_seed(0)
    stream_TD, error_TD = torch.randn(2, T, D, dtype=torch.float64)
    stream_TD[:3] *= size
    error_TD = 1e-5 * error_TD * stream_TD.norm(dim=1, keepdim=True)
    ones_D = torch.ones(D, dtype=torch.float64)
    directions_TD = stream_TD / stream_TD.norm(dim=1, keepdim=True)
    across_TD = error_TD - directions_TD * (directions_TD * error_TD).sum(dim=1, keepdim=True)
    seen_TD = normed(stream_TD + across_TD, ones_D) - normed(stream_TD, ones_D)
    assert torch.allclose(across_TD * inverse_rms(stream_TD), seen_TD, atol=1e-8)


def test_tokens_of_zeros_have_finite_weights() -> None:
    assert inverse_rms(torch.zeros(2, D)).flatten().tolist() == pytest.approx([1e3, 1e3])


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("sizes", ["alike", "various"])
def test_the_fit_is_nearly_the_best(spread: float, sizes: str) -> None:
    torch.manual_seed(0)
    weight_DF, change_DF = torch.randn(2, D, F, dtype=torch.float64)
    gains_D = (spread * torch.randn(D, dtype=torch.float64)).exp()
    x_TF = torch.randn(T, F, dtype=torch.float64)
    if sizes == "various":
        x_TF = x_TF * (2 * torch.rand(T, 1, dtype=torch.float64)).exp()
    y_TD = x_TF @ weight_DF.T
    noise_TD = 0.02 * torch.randn(T, D, dtype=torch.float64)
    errors_TD = normed(x_TF @ (weight_DF + 0.05 * change_DF).T, gains_D) - normed(y_TD, gains_D) + noise_TD
    before = errors_TD.clone()

    def left(change_DF: Tensor) -> float:
        """Return the share of the stream's error that remains after a change of the map."""
        gained_TD = normed(x_TF @ (weight_DF + change_DF).T, gains_D) - normed(y_TD, gains_D)
        return float((errors_TD - gained_TD).square().sum() / errors_TD.square().sum())

    values_TF, pulled_TD = before_norm(x_TF, y_TD, errors_TD, gains_D, EPS)
    assert torch.equal(errors_TD, before)
    ours, best = left(fitted(values_TF, pulled_TD)), left(brute_force(x_TF, y_TD, errors_TD, gains_D))
    assert ours < 1.02 * best
    if sizes == "various":  # as if no norm followed
        assert left(fitted(x_TF, errors_TD)) > 2 * ours


def test_a_scale_alone_is_divided_out() -> None:
    x_TF, y_TD, errors_TD = torch.randn(T, F), torch.randn(T, D), torch.randn(T, D)
    values_TF, pulled_TD = before_norm(x_TF, y_TD, errors_TD, torch.full((1,), 0.2), None)
    assert values_TF is x_TF
    torch.testing.assert_close(0.2 * pulled_TD, errors_TD, rtol=2e-4, atol=0.0)


@pytest.mark.parametrize("outputs", [0.0, 1e-30, 1e15])
def test_odd_outputs_and_gains_give_finite_numbers(outputs: float) -> None:
    gains_D = torch.tensor([0.0, 1e-20, -1.0, 3.0, 1.0, 1.0, 1.0, 1.0])
    errors_TD = torch.randn(T, D)
    values_TF, pulled_TD = before_norm(torch.randn(T, F), torch.full((T, D), outputs), errors_TD, gains_D, EPS)
    assert values_TF.isfinite().all()
    assert pulled_TD.isfinite().all()
    assert pulled_TD.abs().max() < 1e3
    unchanged_TD = before_norm(torch.randn(T, F), torch.full((T, D), outputs), 0 * errors_TD, gains_D, EPS)[1]
    assert not unchanged_TD.any()  # nothing is missing
