"""Curves of Tucker decompositions: the loss of a change, and the sizes between those that are solved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipeline.methods.lestd import SOLVED, TuckerBlock, interpolated_curve, loss_moments
from pipeline.methods.method import Statistics
from pipeline.methods.moments import input_moment, output_gradient
from pipeline.ranks.budget import RankVariable
from pipeline.ranks.curves import from_columns
from tests.families.geometries import llama
from tests.methods.tucker_weights import group_of, lestd

TOKENS = 50


def square(width: int, seed: int) -> Tensor:
    root = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T


def test_the_loss_is_half_the_trace_of_each_matrix() -> None:
    block, group = llama().layers[0].attention, group_of(lestd(), llama(), "attention")
    assert isinstance(group, TuckerBlock)
    entered = {}
    for seed, moment in enumerate(loss_moments(block)):
        width = next(
            m.inputs if input_moment(m) == moment else m.outputs
            for m in block.matrices
            if moment in (input_moment(m), output_gradient(m))
        )
        entered[moment] = square(width, seed)[None]
    statistics = Statistics(entered, TOKENS)
    source = torch.Generator().manual_seed(9)
    changes = {m: torch.randn(m.shape, generator=source, dtype=torch.float64) for m in block.matrices}
    expected = sum(
        0.5
        * torch.trace(statistics.mean(output_gradient(m))[0] @ change @ statistics.mean(input_moment(m))[0] @ change.T)
        for m, change in changes.items()
    )
    errors = {  # by D, width of a head, heads
        m.role: change.unflatten(1, (-1, block.head_dim)).permute(0, 2, 1)
        if m.writes_stream
        else change.unflatten(0, (-1, block.head_dim)).permute(2, 1, 0)
        for m, change in changes.items()
    }
    assert group.with_data({}, statistics).loss_of(errors) == pytest.approx(float(expected))


def test_sizes_between_solved_ones_follow_the_logarithm_of_the_loss() -> None:
    """A loss that falls exponentially is met at every size; the cap loses nothing."""
    variable = RankVariable(0, "attention", "core", 400, 1, lambda size: 3.0 * size)
    solved: list[int] = []

    def loss_at(size: int) -> float:
        solved.append(size)
        return math.exp(-0.02 * size)

    points = from_columns(interpolated_curve(variable, 7, loss_at))
    assert len(solved) == len(set(solved)) <= len(SOLVED)
    *below, cap = points
    assert len(below) > 2 * len(solved)
    assert (cap.ranks, cap.numbers, cap.loss) == ({"core": 400}, 1200, 0.0)
    for point in below:
        size = point.ranks["core"]
        assert (point.numbers, point.cache) == (3 * size, 7)
        if solved[0] <= size <= solved[-1]:
            assert point.loss == pytest.approx(math.exp(-0.02 * size))
