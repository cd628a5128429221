"""Plots of a run: the values that they draw."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manifests.records import Curve
from pipeline.reporting import figures
from pipeline.reporting.drawing import Plot
from tests.families.geometries import llama, manifest

GEOMETRY = llama()  # 6 layers
CURVE = Curve(ranks={"width": (1, 2, 3, 4)}, numbers=(20, 10, 30, 40), cache=(0, 0, 0, 0), loss=(0.3, 0.1, 0.2, 0.0))


def run_of(**fields: Any) -> Any:
    empty: dict[str, Any] = {"ranks": {}, "caps": {}, "curves": {}, "layers": {}, "importance": {}, "healing": None}
    return SimpleNamespace(geometry=GEOMETRY, manifest=manifest(), **{**empty, **fields})


def layers_of(reports: dict[int, dict[str, dict[str, Any]]]) -> Any:
    def entry(groups: dict[str, dict[str, Any]]) -> Any:
        shown = {name: SimpleNamespace(as_json=lambda report=report: report) for name, report in groups.items()}
        return SimpleNamespace(groups=shown, refined=None)

    return {layer: entry(groups) for layer, groups in reports.items()}


@pytest.fixture
def axes_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Axes]:
    """The axes of each plot that was drawn, by its name."""
    drawn: dict[str, Axes] = {}

    def draw(name: str, caption: str, plot: Callable[[Axes], None], height_inches: float = 1.0) -> Plot:
        drawn[name] = Figure().add_subplot()
        plot(drawn[name])
        return Plot("", caption)

    monkeypatch.setattr(figures, "draw", draw)
    return drawn


def lines(axes: Axes) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.lines]


def test_a_run_without_data_has_no_figures(axes_of: dict[str, Axes]) -> None:
    run = run_of(summary=None, units=(), commits=(), ended=None, statistics_bytes={})
    assert not any(figures.plots_of(run, section) for section in figures.PLOTS)
    assert not axes_of


def test_ranks_and_full_ranks_in_the_order_of_layers(axes_of: dict[str, Axes]) -> None:
    ranks = {"2/0/value_output": {"rank": 5}, "0/0/value_output": {"rank": 3}, "0/0/experts.1": {"width": 9}}
    caps = {("0/0/value_output", "rank"): 16, ("2/0/value_output", "rank"): 12}
    figures._ranks(run_of(ranks=ranks, caps=caps))
    (axes,) = axes_of.values()  # ranks of experts are in a heat map
    assert lines(axes) == [[(0, 16), (2, 12)], [(0, 3), (2, 5)]]
    assert axes.get_ylim() == (0, 1.08 * 16)


def test_a_rank_without_a_known_full_rank(axes_of: dict[str, Axes]) -> None:
    figures._ranks(run_of(ranks={"3/0/value_output": {"rank": 7}}))
    assert lines(axes_of["rank-0-value_output-rank"]) == [[(3, 7)]]
    assert axes_of["rank-0-value_output-rank"].get_ylim() == (0, 1.08 * 7)


def test_a_curve_shows_its_frontier_and_the_chosen_point(axes_of: dict[str, Axes]) -> None:
    assert figures._frontier(CURVE) == [(0.25, 0.1), (1.0, 0.0)]  # 20 and 30 numbers lose more than 10
    run = run_of(curves={"1/0/mlp": CURVE}, ranks={"1/0/mlp": {"width": 3}})
    assert figures.chosen_point(run, "1/0/mlp") == 2
    figures._curves(run)
    assert lines(axes_of["curves-mlp"]) == [[(0.25, 0.1)], [(0.75, 0.2)]]  # a loss of 0 has no logarithm


@pytest.mark.parametrize("ranks", [{}, {"1/0/mlp": {"width": 5}}])
def test_ranks_that_are_not_on_the_curve(axes_of: dict[str, Axes], ranks: dict[str, dict[str, int]]) -> None:
    run = run_of(curves={"1/0/mlp": CURVE}, ranks=ranks)
    assert figures.chosen_point(run, "1/0/mlp") is None
    assert not figures._predicted_loss(run)


def test_predicted_losses_are_stacked_by_group_and_experts_are_one(axes_of: dict[str, Axes]) -> None:
    curves = {f"{layer}/0/{group}": CURVE for layer in (0, 4) for group in ("experts.0", "experts.1", "value_output")}
    ranks = {task: {"width": 1} for task in curves if task != "4/0/experts.1"}
    figures._predicted_loss(run_of(curves=curves, ranks=ranks))
    bars = [[(bar.get_y(), bar.get_height()) for bar in group] for group in axes_of["predicted-loss"].containers]
    assert bars == [[(0.0, 0.6), (0.0, 0.3)], [(0.6, pytest.approx(0.3)), (0.3, pytest.approx(0.3))]]


SPECTRUM = [1.0, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("error", "place"),
    [(0.5, 1 / 3), (0.375, 0.5), (0.125, 2.5 / 3), (1.0, 0.0), (1.5, 0.0)],
    ids=["on a step", "between steps", "beyond the last", "nothing kept", "more than everything"],
)
def test_a_dot_lies_where_the_spectrum_has_the_error(axes_of: dict[str, Axes], error: float, place: float) -> None:
    figures._spectra(run_of(layers=layers_of({0: {"query": {"spectrum": SPECTRUM, "error": error}}})))
    curve, dot = lines(axes_of["spectrum-query"])
    assert curve == [(0.0, 1.0), (1 / 3, 0.5), (2 / 3, 0.25)]
    assert dot == [(pytest.approx(place), error)]


def test_spectra_of_several_matrices_and_of_zeros(axes_of: dict[str, Axes]) -> None:
    report = {"up_spectrum": SPECTRUM, "up_error": 0.25, "gate_spectrum": [0.0, 0.0]}
    figures._spectra(run_of(layers=layers_of({0: {"mlp": report}})))
    assert lines(axes_of["spectrum-mlp-up"])[1] == [(pytest.approx(2 / 3), 0.25)]
    assert lines(axes_of["spectrum-mlp-gate"]) == []


def test_errors_of_each_figure(axes_of: dict[str, Axes]) -> None:
    reports = {1: {"mlp": {"error": 0.5, "up_error": 0.0, "errors": [1.0], "experts": 3}}, 0: {"mlp": {"error": 0.25}}}
    assert figures._figures(run_of(layers=layers_of(reports)), "error") == {
        "mlp": {0: 0.25, 1: 0.5},
        "mlp: up": {1: 0.0},
    }
    figures._errors(run_of(layers=layers_of(reports)))
    assert lines(axes_of["errors"]) == [[(0, 0.25), (1, 0.5)], []]
    assert figures._errors(run_of(layers=layers_of({0: {"mlp": {"error": 0.0}}}))) == []
