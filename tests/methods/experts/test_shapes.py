"""The choice of a number of experts and a width, against every combination of tiny cases."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pipeline.methods.experts.shapes import EXPERTS, WIDTH, shape_points
from pipeline.ranks.curves import Point, choose, summed

WIDTHS, COUNTS, PER_CHANNEL = [2, 4, 6], [2, 3, 4], 10


def make_layer(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    losses_En = torch.rand(4, 3, generator=source, dtype=torch.float64).sort(dim=1, descending=True).values
    losses_En[:, -1] = 0.0
    return torch.rand(4, generator=source, dtype=torch.float64), losses_En


def points_of(seed: int) -> list[Point]:
    return shape_points(*make_layer(seed), WIDTHS, COUNTS, PER_CHANNEL)


def test_points_add_the_removed_and_the_narrowed() -> None:
    removal_E, losses_En = make_layer(0)
    order = sorted(range(4), key=lambda expert: float(removal_E[expert]))
    for point in points_of(0):
        count, width = point.ranks[EXPERTS], point.ranks[WIDTH]
        gone, stay = order[: 4 - count], order[4 - count :]
        lost = float(removal_E[gone].sum() + losses_En[stay, WIDTHS.index(width)].sum())
        assert point.loss == pytest.approx(lost)
        assert point.numbers == count * width * PER_CHANNEL
    assert points_of(0)[-1].loss == 0.0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.65, 0.8, 1.0])
def test_one_shape_for_all_is_the_best_of_every_shape(share: float) -> None:
    layers = [points_of(seed) for seed in range(3)]
    target = share * 3 * 4 * 6 * PER_CHANNEL
    chosen = choose({"": summed(layers)}, target)[""]
    sums = [(sum(p.numbers for p in row), sum(p.loss for p in row)) for row in zip(*layers, strict=True)]
    best = min(loss for numbers, loss in sums if numbers <= target)
    assert best - 1e-12 <= chosen.loss <= 1.25 * best
    assert chosen.numbers <= target


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_shapes_by_layer_come_near_the_best_combination(share: float) -> None:
    layers = {str(seed): points_of(seed) for seed in range(4)}
    target = share * 4 * 4 * 6 * PER_CHANNEL
    chosen = choose(layers, target)
    combinations = itertools.product(*layers.values())
    within = [row for row in combinations if sum(point.numbers for point in row) <= target]
    best = min(sum(point.loss for point in row) for row in within)
    found = sum(point.loss for point in chosen.values())
    assert sum(point.numbers for point in chosen.values()) <= target
    assert best - 1e-12 <= found <= 1.25 * best


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="out of reach"):
        choose({"a": points_of(0)}, 39)
    with pytest.raises(ValueError, match="do not fit"):
        shape_points(torch.zeros(4), torch.zeros(3, 3), WIDTHS, COUNTS, PER_CHANNEL)
