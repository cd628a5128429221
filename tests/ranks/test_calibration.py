"""The map from predicted to measured loss, against scipy's and on losses measured on trained models."""

from __future__ import annotations

import itertools
import random

import pytest
from scipy.interpolate import PchipInterpolator

from pipeline.ranks.calibration import MOST, CalibratedLoss, loss_ratios, other_sizes, runs_of_layers

MEASURED = {  # `loss_aware`, keep -> (predicted, measured), held-out text of 16,320 tokens
    "babyllama-361": {
        0.9: (6.35e-5, 7.37e-5), 0.8: (1.103e-3, 1.479e-3), 0.7: (1.057e-2, 1.542e-2), 0.6: (4.282e-2, 7.051e-2),
        0.5: (0.1074, 0.1962),
    },
    "gptj-tiny-ts": {
        0.9: (9.89e-7, 1.344e-4), 0.8: (2.309e-4, 4.429e-4), 0.7: (1.404e-3, 1.896e-3), 0.6: (5.476e-3, 7.666e-3),
        0.5: (1.617e-2, 2.511e-2),
    },
}  # fmt: skip


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_between_measurements_it_is_scipys_monotone_cubic(count: int, seed: int) -> None:
    draw = random.Random(f"{count} {seed}")
    predicted = sorted(draw.uniform(1e-6, 1.0) ** 3 for _ in range(count))
    measured = list(itertools.accumulate(draw.uniform(1e-6, 1.0) for _ in range(count)))
    expected, calibrated = PchipInterpolator(predicted, measured), CalibratedLoss(zip(predicted, measured, strict=True))
    for share in (0.0, 0.01, 0.3, 0.5, 0.99, 1.0):
        for low, high in itertools.pairwise(predicted):
            at = low + share * (high - low)
            assert calibrated(at) == pytest.approx(float(expected(at)), rel=1e-9)


@pytest.mark.parametrize("model", MEASURED)
@pytest.mark.parametrize("keep", [0.9, 0.8, 0.7, 0.6, 0.5])
def test_three_measurements_are_enough(model: str, keep: float) -> None:
    losses = MEASURED[model]
    calibrated = CalibratedLoss(losses[size] for size in (keep, *(size / 1000 for size in other_sizes(keep * 1000))))
    for predicted, measured in losses.values():
        assert calibrated(predicted) == pytest.approx(measured, rel=0.15)


def test_it_rises_and_meets_what_was_measured() -> None:
    """Also where noise makes a smaller model look better, and beyond the measurements."""
    calibrated = CalibratedLoss([(0.3, 0.4), (0.1, 0.2), (0.2, 0.1), (0.0, 0.5)])
    assert [calibrated(at) for at in (0.1, 0.2, 0.3)] == pytest.approx([0.2, 0.2, 0.4])
    values = [calibrated(place / 100) for place in range(60)]
    assert values == pytest.approx(sorted(values))
    assert calibrated(0.0) == 0.0


def test_few_measurements() -> None:
    assert CalibratedLoss([])(0.3) == 0.3
    assert CalibratedLoss([(0.1, 0.2)])(0.3) == pytest.approx(0.6)
    two = CalibratedLoss([(0.1, 0.2), (0.2, 0.5)])
    assert [two(at) for at in (0.05, 0.15, 0.3)] == pytest.approx([0.1, 0.35, 0.8])


@pytest.mark.parametrize(
    ("size", "others"),
    [(900, (700, 500)), (860, (700, 500)), (500, (900, 700)), (700, (900, 500)), (600, (900, 500)), (300, (900, 500))],
)
def test_sizes_that_are_measured_span_the_range(size: int, others: tuple[int, int]) -> None:
    assert other_sizes(size) == others


@pytest.mark.parametrize(
    ("count", "sizes"), [(30, [5] * 6), (3, [1, 1, 1]), (8, [1, 2, 1, 1, 2, 1]), (1, [1]), (0, [])]
)
def test_blocks_of_layers_are_about_equal(count: int, sizes: list[int]) -> None:
    layers = [10 + number for number in range(count)]
    blocks = runs_of_layers(layers)
    assert [len(block) for block in blocks] == sizes
    assert [layer for block in blocks for layer in block] == layers


@pytest.mark.parametrize(
    ("measured", "mlps", "expected"),
    [
        (0.10, {"mlp", "deep"}, {"mlp": 3.0, "deep": 3.0}),
        (0.001, {"mlp", "deep"}, {"mlp": 1 / MOST, "deep": 1 / MOST}),
        (9.0, {"mlp", "deep"}, {"mlp": MOST, "deep": MOST}),
        (0.08, set(), {"mlp": 2.0, "deep": 2.0, "attention": 2.0}),
    ],
)
def test_mlps_bear_what_was_not_predicted(measured: float, mlps: set[str], expected: dict[str, float]) -> None:
    predicted = {"mlp": 0.02, "deep": 0.01, "attention": 0.01}
    assert loss_ratios(measured, predicted, mlps) == pytest.approx(expected)


def test_what_loses_nothing_is_not_corrected() -> None:
    assert loss_ratios(0.1, {"mlp": 0.0}, {"mlp"}) == {"mlp": 1.0}
