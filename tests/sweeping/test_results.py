"""Results of a sweep: which points no other beats, a table that fits, plots that say what they show."""

from __future__ import annotations

import csv
import io
import random
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pipeline.reporting.drawing import INK, MARKERS, SERIES
from pipeline.sweeping.front import PlotPoint, front
from pipeline.sweeping.plots import RING, sweep_plots
from pipeline.sweeping.results import as_csv, calibrated_losses, print_results
from pipeline.sweeping.sweep_page import render_sweep
from tests.contrast import contrast


def row(point: str, kept: float, perplexity: float, **other: Any) -> dict[str, Any]:
    series, _, _ = point.rpartition("-")
    found = {
        "point": point,
        "series": series,
        "methods": [series],
        "rounding": "",
        "numbers_kept": kept,
        "bytes_kept": kept,
        "cache_kept": 1.0,
        "bytes": round(1000 * kept),
        "cache_bytes_per_token": 64,
        "perplexity": perplexity,
        "loss": perplexity,
        "loss_over_dense": perplexity - 2.0,
        "divergence": 0.1,
        "held_out_perplexity": 3.0,
        "damaged": False,
        "predicted_loss": None,
        "calibrated_loss": None,
        "best_by_bytes": perplexity < 4,
        "best_by_cache": False,
        "seconds": 1.5,
        "output": None,
    }
    return found | other


def results(count: int = 3) -> dict[str, Any]:
    rows = [
        row(f"method-{name}-{keep:g}", keep, 2.0 + 3 * (1 - keep) * (1 + place))
        for place, name in enumerate("abcdefgh"[:count])
        for keep in (0.9, 0.7, 0.5)
    ]
    dense = {"perplexity": 2.0, "loss": 0.7, "tokens": 10, "window": 5}
    return {"model": "/models/tiny", "dense": dense, "points": rows, "warnings": [], "missing": ["method-z-0.9"]}


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_no_point_beats(seed: int) -> None:
    """By its definition, pair by pair; ties in both stay together."""
    generator = random.Random(seed)
    points = [(generator.randint(0, 6), generator.randint(0, 6)) for _ in range(generator.randint(1, 15))]
    beaten = {
        i
        for i, (size, loss) in enumerate(points)
        for other, lost in points
        if other <= size and lost <= loss and (other < size or lost < loss)
    }
    named = [PlotPoint(size, loss, str(place % 3)) for place, (size, loss) in enumerate(points)]
    assert front(named) == set(range(len(points))) - beaten


def test_a_curve_that_wins_for_a_hair_s_breadth_more_bytes_takes_the_ring() -> None:
    """One percent of the dense model's bytes is no advantage over another curve; over its own curve it is one."""
    curves = {"svd": [(0.795, 4.0)], "loss_aware": [(0.8, 1.0), (0.605, 5.0), (0.599, 5.1)], "flat": [(0.64, 4.9)]}
    points = [PlotPoint(size, loss, name) for name, line in curves.items() for size, loss in line]
    assert front(points) == {1, 2, 3, 4}
    assert front(points, tolerance=0.0) == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_each_line_has_a_colour_and_a_marker_of_its_own() -> None:
    """Ten methods and baselines; the legend says what a ring is, and its tolerance."""
    svg = sweep_plots(results(8))["perplexity-bytes"].svg
    assert sum(f"stroke: {colour}" in svg for colour in SERIES) == 8
    assert RING in svg
    assert "1%" in RING
    assert len(set(SERIES)) == len(set(MARKERS)) == len(SERIES) == 10


@pytest.mark.parametrize("paper", ["#ffffff", "#10141a", "#000000"])
def test_a_plot_can_be_read_on_light_and_on_dark_paper(paper: str) -> None:
    """Its lines as WCAG 2 asks it of graphics; its text, which pages colour, as of large text."""
    assert min(contrast(colour, paper) for colour in SERIES) > 3
    assert contrast(INK, paper) > 4


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_fits(width: int) -> None:
    """Whole rows in one line each; what was not measured has no column; the narrow one drops what the CSV has."""
    text = io.StringIO()
    found = results()
    print_results(found, Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 2 + 1 + len(found["points"])
    assert "predicted" not in lines[0]
    assert ("seconds" in lines[0]) == (width > 80)
    for line, point in zip(lines[3:], found["points"], strict=True):
        assert line.startswith(point["point"])
        assert f"{point['perplexity']:.4f}" in line


@pytest.mark.slow
def test_plots_of_what_was_measured() -> None:
    """The cache is the same for all points: it is no axis. Every series is named; the front is ringed."""
    plots = sweep_plots(results(8))
    assert list(plots) == ["perplexity-bytes", "loss_over_dense-bytes", "divergence-bytes"]
    page = render_sweep(results(8))
    for name in "abcdefgh":
        assert f"method-{name}" in plots["perplexity-bytes"].svg
        assert f">method-{name}-0.9</td>" in page
    assert "missing: method-z-0.9" in page
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_a_plot_is_a_file_of_its_own() -> None:
    (plot, *_) = sweep_plots(results()).values()
    root = ElementTree.fromstring(plot.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("viewBox")
    assert root.findtext("{http://www.w3.org/2000/svg}title") == plot.caption
    text = "".join(root.itertext())
    assert "perplexity" in text
    assert "method-a" in text


def test_without_an_evaluation_text() -> None:
    found = results() | {"dense": None}
    for point in found["points"]:
        point |= {"perplexity": None, "loss": None, "loss_over_dense": None}
    assert list(sweep_plots(found)) == ["divergence-bytes"]
    text = io.StringIO()
    print_results(found, Console(file=text, width=120))
    assert "perplexity" not in text.getvalue()
    assert as_csv(found).splitlines()[1].startswith("method-a-0.9,method-a,")


def test_three_points_of_a_curve_calibrate_its_predictions() -> None:
    """Measured losses are twice the predicted ones and a floor. Other curves have no prediction or too few points."""
    measured = {0.9: 0.01, 0.8: 0.05, 0.7: 0.1, 0.6: 0.2, 0.5: 0.4}
    rows = [
        row(f"a-{keep}", keep, 2.5, predicted_loss=loss, divergence=2 * loss + 0.01) for keep, loss in measured.items()
    ]
    rows += [row("b-0.9", 0.9, 2.5), row("c-0.9", 0.9, 2.5, predicted_loss=0.1)]
    *calibrated, none, too_few = calibrated_losses(rows)
    assert (none, too_few) == (None, None)
    assert calibrated == pytest.approx([row["divergence"] for row in rows[:5]])


def with_healed() -> dict[str, Any]:
    """Return results with a healed point, and one that healing did not make better."""
    found = results()
    scores = {"perplexity": 1.9, "loss": 0.64, "loss_over_dense": 0.0625, "divergence": 0.0321, "damaged": False}
    found["points"][0]["healed"] = {"best_step": 16, "steps": 16, **scores}
    found["points"][1]["healed"] = {"best_step": 0, "steps": 16, **dict.fromkeys(scores)}
    return found


@pytest.mark.parametrize("width", [80, 160])
def test_healed_scores_stand_beside_those_of_the_solved_layers(width: int) -> None:
    text = io.StringIO()
    print_results(with_healed(), Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    first, second, third = (
        " ".join(line for line in lines if line.startswith(point["point"])) for point in with_healed()["points"][:3]
    )
    assert ("0.0625" in first, "0.0321" in first, "2.3000" in first) == (True, True, True)
    assert ("no gain" in second, "no gain" in third) == (True, False)
    table = list(csv.DictReader(io.StringIO(as_csv(with_healed()))))
    assert [line["healed_loss_over_dense"] for line in table[:3]] == ["0.0625", "", ""]
    assert "healed" not in as_csv(results()).splitlines()[0]


def test_names_and_figures_stay_whole_where_many_tasks_need_several_tables() -> None:
    tasks = {
        f"task_{number}": {"documents": 5, "metrics": {"acc": {"value": 0.4375, "stderr": None}}} for number in "ab"
    }
    found = with_healed() | {"tasks": tasks}
    found["points"] = [point | {"tasks": tasks} for point in found["points"]]
    text = io.StringIO()
    print_results(found, Console(file=text, width=60))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    for point in found["points"]:
        rows = " ".join(line for line in lines if line.startswith(point["point"]))
        assert rows.split().count("0.4375") == len(tasks)
        assert f"{point['bytes_kept']:.4f}" in rows


@pytest.mark.slow
def test_healed_points_have_a_line_of_their_own() -> None:
    plots, page = sweep_plots(with_healed()), render_sweep(with_healed())
    assert "method-a, healed" in plots["perplexity-bytes"].svg
    assert "Healed points are not compared in this." in plots["perplexity-bytes"].caption
    assert "healed" not in sweep_plots(results())["perplexity-bytes"].svg
    assert "healed divergence" in page
    assert "no gain" in page
