"""The refit over a mixture, against the joint least-squares problem in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels.mixture_refit import MixtureResidual, Served, refit_mixture_

TOKENS, OUTPUTS = 400, 6


class Mixture:
    """Experts of unequal width, each on its own tokens; the last one on none."""

    def __init__(self, experts: int, seed: int = 0) -> None:
        source = torch.Generator().manual_seed(seed)
        self.target_TD = torch.randn(TOKENS, OUTPUTS, generator=source, dtype=torch.float64)
        shared_TF = torch.randn(TOKENS, 4, generator=source, dtype=torch.float64)
        self.parts, self.weights = [], []
        for expert in range(experts):
            width = 3 + expert % 3
            chosen_T = torch.rand(TOKENS, generator=source) < (0.6 if expert < experts - 1 else 0.0)
            values_TF = torch.randn(TOKENS, width, generator=source, dtype=torch.float64)
            values_TF += shared_TF @ torch.randn(4, width, generator=source, dtype=torch.float64)
            self.parts.append(Served(chosen_T.nonzero()[:, 0], values_TF[chosen_T]))
            self.weights.append(torch.randn(OUTPUTS, width, generator=source, dtype=torch.float64))

    def served(self, expert: int) -> Served:
        return self.parts[expert]

    def output(self, weights: list[Tensor]) -> Tensor:
        output_TD = torch.zeros_like(self.target_TD)
        for part, weight in zip(self.parts, weights, strict=True):
            output_TD[part.tokens] += part.values @ weight.T
        return output_TD

    def error(self, weights: list[Tensor]) -> float:
        return float((self.target_TD - self.output(weights)).square().sum())

    def least_error(self) -> float:
        columns = []
        for part in self.parts:
            whole_TF = torch.zeros(TOKENS, part.values.shape[1], dtype=torch.float64)
            whole_TF[part.tokens] = part.values
            columns.append(whole_TF)
        stacked_TF = torch.cat(columns, dim=1)
        solved = torch.linalg.lstsq(stacked_TF, self.target_TD, driver="gelsd").solution
        return float((self.target_TD - stacked_TF @ solved).square().sum())


@pytest.mark.parametrize("experts", [1, 3, 7])
def test_sweeps_reach_the_joint_solution(experts: int) -> None:
    mixture = Mixture(experts)
    before = [weight.clone() for weight in mixture.weights]
    errors = [
        mixture.error(refit_mixture_(MixtureResidual(mixture.target_TD, 1e-9), mixture.served, mixture.weights, n))
        for n in (1, 3, 60)
    ]
    assert errors[0] >= errors[1] >= errors[2] * (1 - 1e-12)
    assert errors[2] == pytest.approx(mixture.least_error(), rel=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(before, mixture.weights, strict=True))


def test_a_mixture_that_computes_its_target_keeps_its_writers() -> None:
    mixture = Mixture(4)
    fitted = refit_mixture_(MixtureResidual(mixture.output(mixture.weights)), mixture.served, mixture.weights)
    for weight, again in zip(mixture.weights, fitted, strict=True):
        torch.testing.assert_close(again, weight)


def test_tokens_fewer_than_channels_and_half_precision_are_refitted() -> None:
    mixture = Mixture(3)
    few = [Served(part.tokens[:2], part.values[:2].to(torch.bfloat16)) for part in mixture.parts]
    fitted = refit_mixture_(MixtureResidual(mixture.target_TD.float()), few.__getitem__, mixture.weights)
    assert all(torch.isfinite(weight).all() and float(weight.abs().max()) < 1e4 for weight in fitted)


def test_wrong_values_are_refused() -> None:
    mixture = Mixture(2)
    with pytest.raises(ValueError, match="do not fit"):
        refit_mixture_(MixtureResidual(mixture.target_TD), mixture.served, mixture.weights[::-1])
    with pytest.raises(ValueError, match="NaN"):
        MixtureResidual(mixture.target_TD * float("nan"))
    with pytest.raises(ValueError, match="targets"):
        MixtureResidual(mixture.target_TD[:0])
