"""The choice of a number of experts and a width, against every combination of tiny cases."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from manifests.methods import LossAware
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.experts.method import EXPERTS, WIDTH
from pipeline.methods.loss_aware.shapes import Shape, ShapedExperts
from pipeline.ranks.curves import Point, choose, summed
from tests import factories

CONFIG = factories.make_config("mixtral", num_local_experts=4, intermediate_size=6)
LAYER = geometry_of(standard_config(CONFIG.to_dict())).layers[0]
ENTRY = LossAware(method="loss_aware", shapes="layer", rank_multiple=2)
(SHAPE,) = ShapedExperts(ENTRY).groups(LAYER)
assert isinstance(SHAPE, Shape)


def make_layer(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    losses_En = torch.rand(4, 3, generator=source, dtype=torch.float64).sort(dim=1, descending=True).values
    losses_En[:, -1] = 0.0
    return torch.rand(4, generator=source, dtype=torch.float64), losses_En


def points_of(seed: int) -> list[Point]:
    assert (SHAPE.counts, SHAPE.widths) == ([2, 3, 4], [2, 4, 6])
    return SHAPE.points(*make_layer(seed), [1.0, 1.0, 1.0])


def test_points_add_the_removed_and_the_narrowed() -> None:
    removal_E, losses_En = make_layer(0)
    order = sorted(range(4), key=lambda expert: float(removal_E[expert]))
    for point in points_of(0):
        count, width = point.ranks[EXPERTS], point.ranks[WIDTH]
        gone, stay = order[: 4 - count], order[4 - count :]
        lost = float(removal_E[gone].sum() + losses_En[stay, SHAPE.widths.index(width)].sum())
        assert point.loss == pytest.approx(lost)
        assert point.numbers == SHAPE.numbers(count, width)
    assert points_of(0)[-1].loss == 0.0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.65, 0.8, 1.0])
def test_one_shape_for_all_is_the_best_of_every_shape(share: float) -> None:
    layers = [points_of(seed) for seed in range(3)]
    target = share * 3 * SHAPE.numbers(4, 6)
    chosen = choose({"": summed(layers)}, target)[""]
    sums = [(sum(p.numbers for p in row), sum(p.loss for p in row)) for row in zip(*layers, strict=True)]
    best = min(loss for numbers, loss in sums if numbers <= target)
    assert best - 1e-12 <= chosen.loss <= 1.25 * best
    assert chosen.numbers <= target


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_shapes_by_layer_come_near_the_best_combination(share: float) -> None:
    layers = {str(seed): points_of(seed) for seed in range(4)}
    target = share * 4 * SHAPE.numbers(4, 6)
    chosen = choose(layers, target)
    combinations = itertools.product(*layers.values())
    within = [row for row in combinations if sum(point.numbers for point in row) <= target]
    best = min(sum(point.loss for point in row) for row in within)
    found = sum(point.loss for point in chosen.values())
    assert sum(point.numbers for point in chosen.values()) <= target
    assert best - 1e-12 <= found <= 1.25 * best


def test_a_refit_leaves_a_share_of_the_removals_loss() -> None:
    removal_E, losses_En = make_layer(0)
    whole, refitted = points_of(0), SHAPE.points(removal_E, losses_En, [0.5, 0.25, 1.0])
    at_full_width = {point.ranks[EXPERTS]: point.loss for point in whole if point.ranks[WIDTH] == 6}
    losses = {point.ranks[EXPERTS]: point.loss for point in refitted if point.ranks[WIDTH] == 6}
    assert losses == pytest.approx({2: 0.5 * at_full_width[2], 3: 0.25 * at_full_width[3], 4: 0.0})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="out of reach"):
        choose({"a": points_of(0)}, SHAPE.least_numbers() - 1)
    with pytest.raises(ValueError, match="do not fit"):
        SHAPE.points(torch.zeros(4), torch.zeros(3, 3), [1.0, 1.0, 1.0])
