"""Weights that read one input, stored as one stack: sizes by rank, and factors that give the product."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels.pivoted import PivotedFactors, expand
from pipeline.methods.loss_aware.stacks import Stack

GENERATOR = torch.Generator().manual_seed(3)
FIRST, SECOND = torch.randn(3, 10, generator=GENERATOR), torch.randn(12, 3, generator=GENERATOR)
PARTS = {"q": torch.zeros(8, 10), "k": torch.zeros(4, 10)}


def stack(pivoted: bool = False, roles: tuple[str, ...] = ("q", "k")) -> Stack:
    return Stack("query_key", roles, 12, 10, 16, pivoted)


def test_plain_factors_count_until_the_dense_weights_are_smaller() -> None:
    assert [stack().numbers(rank) for rank in (1, 5, 6, 10)] == [22, 110, 120, 120]


def test_pivoted_factors_count_their_indices() -> None:
    """Rows (r, 10), coefficients (12 − r, r), and r indices of 32 bits in numbers of 16."""
    assert stack(pivoted=True).numbers(4) == 4 * 10 + 8 * 4 + 2 * 4


def test_points_end_at_the_dense_weights_without_loss() -> None:
    losses = torch.linspace(1.0, 0.1, 11, dtype=torch.float64)
    points = stack().points(losses, multiple=2)
    assert [dict(point.ranks)["query_key"] for point in points] == [2, 4, 10]
    assert [point.numbers for point in points] == [44, 88, 120]
    assert [point.loss for point in points] == pytest.approx([float(losses[2]), float(losses[4]), 0.0])


def test_joint_factors_give_the_rows_of_the_product() -> None:
    tensors, forms = stack().store(PARTS, FIRST, SECOND)
    assert {form.form for form in forms.values()} == {"joint_low_rank"}
    first = tensors["q.first.weight"]
    assert torch.equal(tensors["q.second.weight"] @ first, SECOND[:8] @ FIRST)
    assert torch.equal(tensors["k.second.weight"] @ first, SECOND[8:] @ FIRST)


def test_pivoted_rows_give_the_product() -> None:
    tensors, forms = stack(pivoted=True).store(PARTS, FIRST.double(), SECOND.double())
    path = "query_key.pivoted"
    form = PivotedFactors(
        indices=tensors[f"{path}.indices"].long(),
        rows=tensors[f"{path}.rows.weight"],
        coefficients=tensors[f"{path}.coefficients.weight"],
    )
    assert torch.allclose(expand(form), SECOND.double() @ FIRST.double(), rtol=0, atol=1e-12)
    assert forms["q"] == forms["k"]
    assert forms["q"].rank == 3


def test_a_single_role_has_factors_of_its_own() -> None:
    tensors, forms = stack(roles=("q",)).store({"q": torch.zeros(12, 10)}, FIRST, SECOND)
    assert forms["q"].form == "low_rank"
    assert torch.equal(tensors["q.second.weight"] @ tensors["q.first.weight"], SECOND @ FIRST)
