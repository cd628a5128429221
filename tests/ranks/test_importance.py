"""IPRS: its sum, its bounds, its proportions; uniform ratios."""

import math
import random

import pytest

from pipeline.ranks.importance import angular_importance, preserve_importance


def test_angles() -> None:
    assert angular_importance([1.0, 0.0, -1.0, 0.5, 1.0 + 1e-12, -1.5]) == pytest.approx([0, 0.5, 1, 1 / 3, 0, 1])
    with pytest.raises(ValueError, match="mean cosine of layer 1 is nan"):
        angular_importance([0.5, math.nan])


def test_ratios_worked_by_hand() -> None:
    # B = 2: proportional 8/14 · 2 > 1 is clipped; then B = 1 over 3 + 2 + 1.
    assert preserve_importance([8, 3, 2, 1], 0.5) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 6])
    # The clip cascades: 2.4 · (10, 4, 1) / 15 = 1.6; then 1.4 · (4, 1) / 5 = 1.12.
    assert preserve_importance([10, 4, 1], 0.8) == pytest.approx([1, 1, 0.4])


def test_ratios_sum_bounds_and_proportions() -> None:
    dice = random.Random(0)
    for _ in range(500):
        layers = dice.randint(1, 80)
        importance = [dice.random() ** dice.choice([1, 4]) for _ in range(layers)]
        mean = dice.uniform(0.01, 1.0)
        ratios = preserve_importance(importance, mean)
        assert math.fsum(ratios) == pytest.approx(layers * mean, rel=1e-9)
        assert all(0.0 < ratio <= 1.0 for ratio in ratios)
        # Shares below 1e-9 of the largest get a sliver instead of their proportion.
        pairs = [(w, t) for w, t in zip(ratios, importance, strict=True) if t > 1e-8 * max(importance)]
        slopes = [w / t for w, t in pairs if w < 1.0]
        if slopes:
            assert max(slopes) == pytest.approx(min(slopes), rel=1e-6)
            # A clipped layer is one whose proportion would be above 1.
            assert all(t * max(slopes) >= 1 - 1e-6 for w, t in pairs if w == 1.0)


def test_no_importance_is_equal_importance() -> None:
    assert preserve_importance([0.0, 0.0, 0.0], 0.4) == [0.4, 0.4, 0.4]
    assert preserve_importance([0.2, 0.7], 1.0) == [1.0, 1.0]
    ratios = preserve_importance([1.0, 0.0, 0.0], 0.5)
    assert ratios == pytest.approx([1.0, 0.25, 0.25])
    assert preserve_importance([1e-300, 2e-300], 0.3) == pytest.approx([0.2, 0.4])
    # Nothing but rounding is left for the last layer.
    assert 0.0 < preserve_importance([1.0] * 79 + [0.0], math.nextafter(1.0, 0.0))[-1] <= 1.0
    assert 0.0 < preserve_importance([1.0] * 79 + [0.0], 79 / 80)[-1] <= 1.0


def test_refusals() -> None:
    for mean in (0.0, -0.1, 1.0001, math.nan):
        with pytest.raises(ValueError, match=r"within \(0, 1\]"):
            preserve_importance([1.0], mean)
    for importance in ([], [-0.1, 1.0]):
        with pytest.raises(ValueError, match="given and not negative"):
            preserve_importance(importance, 0.5)
    with pytest.raises(ValueError, match="importance of layer 1 is inf"):
        preserve_importance([1.0, math.inf], 0.5)
