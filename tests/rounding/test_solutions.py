"""By which moment a matrix of a solution is rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import FormSpec
from pipeline.methods.method import Moment, Solution
from pipeline.rounding.solutions import multiplied, round_solution
from tests.families.geometries import llama
from tests.tensors import random

READS = llama("gqa").layers[0].reads | {"experts.3.gate": "mlp.in", "experts.3.down": "experts.3.down.in"}
ROWS, COLUMNS, RANK = 48, 64, 32


WEIGHT = random(ROWS, COLUMNS, seed=1)
INPUTS = random(40, COLUMNS, seed=2) @ random(COLUMNS, COLUMNS, seed=3)
FACTORS = random(RANK, COLUMNS, seed=4), random(ROWS, RANK, seed=5)


def rounded(role: str, shrinkage: float, moment: Tensor, rank: int | None = None) -> Tensor:
    """The stored matrix of this role."""
    tensors, forms = {f"{role}.weight": WEIGHT}, {}
    if rank is not None:
        tensors = dict(zip((f"{role}.first.weight", f"{role}.second.weight"), FACTORS, strict=True))
        forms = {role: FormSpec(form="low_rank", rank=rank)}
    solution = Solution(tensors, forms)
    weights = {f"{role}.weight": WEIGHT.float()}
    moments = {Moment(READS[role]): moment[None]}
    found = round_solution(solution, Quantize(bits=3, shrinkage=shrinkage), 3, moments, weights, READS)
    return multiplied(solution, found.rounded)[role,]


@pytest.mark.parametrize("rank", [None, RANK])
@pytest.mark.parametrize("role", ["q", "v", "up", "experts.3.gate", "o", "down", "experts.3.down"])
def test_moments_of_the_residual_stream_alone_are_shrunk(role: str, rank: int | None) -> None:
    moment = INPUTS.T @ INPUTS
    plain, found = (rounded(role, shrinkage, moment, rank) for shrinkage in (0.0, 0.3))
    writes = role.endswith(("o", "down"))
    assert torch.equal(found, plain) == writes
    if rank is None and not writes:
        by_shrunk = rounded(role, 0.0, 0.7 * moment + 0.3 * torch.diag(moment.diagonal()))
        assert float((found == by_shrunk).double().mean()) > 0.95  # sums round otherwise
