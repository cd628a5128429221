"""Axes and legends of plots."""

from __future__ import annotations

import re

import pytest
from matplotlib.axes import Axes

from pipeline.reporting.drawing import WIDTH_INCHES, draw, legend_below, make_logarithmic


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((21.0, 64.0), {"50"}),
        ((1.2, 80.0), {"1", "2", "5", "10", "20", "50"}),
        ((1e-4, 0.9), {"0.0001", "0.001", "0.01", "0.1", "1"}),
        ((1e-18, 1.0), {"1e-17", "1e-05"}),
    ],
)
def test_a_logarithmic_axis_is_labelled_by_plain_numbers(values: tuple[float, float], labels: set[str]) -> None:
    def plot(axes: Axes) -> None:
        axes.plot([0.0, 1.0], values)
        axes.set_xticks([])
        make_logarithmic(axes)

    shown = re.findall(r"<text[^>]*>([^<]+)</text>", draw("one", "caption", plot).svg.replace("−", "-"))
    assert {float(label) for label in labels} <= {float(label) for label in shown}
    assert all(re.fullmatch(r"[\d.e-]+", label) for label in shown)
    assert 1 <= len(shown) <= 10


@pytest.mark.parametrize(("label", "columns"), [("query_key", 4), ("query_key: rounding", 2), ("x" * 60, 1)])
def test_a_legend_has_the_columns_that_fit(label: str, columns: int) -> None:
    def plot(axes: Axes) -> None:
        for line in range(4):
            axes.plot([0.0, 1.0], [line, line], label=label)
        legend_below(axes, 4)

    svg = draw("one", "caption", plot).svg
    begins = {float(x) for x in re.findall(rf' x="([\d.]+)"[^>]*>{label}<', svg)}
    assert len(begins) == columns
    assert columns == 1 or max(begins) + 4.5 * len(label) < WIDTH_INCHES * 72.0
