"""The weighting of LeSTD's tensors gives the error of outputs, and is undone exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.methods.lestd_problems import Problem
from pipeline.methods.lestd_sizes import ProblemShape
from tests.tensors import random

D, W, H = 6, 4, 3


def moment(*shape: int, seed: int) -> Tensor:
    values = random(*shape[:-1], 4 * shape[-1], seed=seed)
    return values @ values.transpose(-1, -2)


def problem_of(tensor: Tensor, **divisors: float) -> Problem:
    return Problem(ProblemShape(D, W, ((tensor.shape[2], H),), 16), [tensor], [tuple(divisors)], divisors)


def test_the_norm_of_weighted_inputs_is_that_of_the_outputs() -> None:
    tensor, moment_DD = random(D, W, 2, H, seed=1), moment(D, D, seed=2)
    problem = problem_of(tensor, q=1.0, k=1.0).weighted_inputs(moment_DD)
    outputs = torch.einsum("xwth,xy,ywth->", tensor, moment_DD, tensor)  # Σ (wᵀ x)² over the text
    normed = outputs / moment_DD.diagonal().mean()
    assert torch.allclose(problem.tensors[0].square().sum(), normed)


def test_errors_lose_the_weighting_of_inputs_and_of_projections() -> None:
    tensor, error = random(D, W, 2, H, seed=3), random(D, W, 2, H, seed=4)
    problem = problem_of(tensor, q=2.0, k=0.5).weighted_inputs(moment(D, D, seed=5))
    assert problem.rows is not None
    errors = problem.errors([problem.tensors[0] - torch.tensordot(problem.rows.root, error, dims=1)])
    assert torch.allclose(errors["q"], 2.0 * error[:, :, 0])
    assert torch.allclose(errors["k"], 0.5 * error[:, :, 1])


def test_errors_lose_the_weighting_of_columns_and_heads() -> None:
    tensor, error, moment_Hdd = random(D, W, 1, H, seed=6), random(D, W, 1, H, seed=7), moment(H, W, W, seed=8)
    moment_Hdd *= torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64)[:, None, None]
    problem = problem_of(tensor, o=1.0).weighted_output(moment_Hdd)
    assert problem.columns is not None
    assert problem.scales is not None
    weighted = torch.einsum("ed,xdth,h->xeth", problem.columns.root, error, problem.scales)
    errors = problem.errors([problem.tensors[0] - weighted])
    assert torch.allclose(errors["o"], error[:, :, 0])
    assert problem.scales[1] > problem.scales[0] > problem.scales[2], "louder heads weigh more"
