"""Plots of a sweep: what is lost against what is stored; points that no other one beats are ringed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from manifests.records import INFINITY
from pipeline.reporting.drawing import DASHES, GRID, INK, MARKERS, MUTED, SERIES, Plot, draw, legend_below
from pipeline.sweeping.front import TOLERANCE, Point, front

SIZES = {"bytes": "bytes of the checkpoint", "cache": "bytes of the cache per token"}
LOSSES = {"perplexity": "perplexity", "loss_over_dense": "loss over dense, nats per token", "divergence": "divergence"}
TALL_INCHES, ROW_INCHES = 2.8, 0.2  # of the axes, and of each row of the legend
RING = f"no better point up to {TOLERANCE:.0%} larger"
STEEP = 4.0  # the largest over the smallest, from which on an axis is logarithmic


def sweep_plots(found: Mapping[str, Any]) -> dict[str, Plot]:
    """`LOSS-SIZE` -> plot, of each loss that was measured and each size that the points differ in."""
    return {
        f"{loss}-{size}": _plot(found, size, loss)
        for loss in LOSSES
        for size in SIZES
        if len({row[f"{size}_kept"] for row in _measured(found, loss)}) > 1
    }


def series_of(found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The points that are drawn as one line: alike but for their size."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["points"]:
        lines.setdefault(series_name(row), []).append(row)
    return lines


def series_name(row: Mapping[str, Any]) -> str:
    """Returns the name of the line that a point is drawn in."""
    return "-".join(part for part in (row["series"], row["rounding"]) if part)


def _measured(found: Mapping[str, Any], loss: str) -> list[Mapping[str, Any]]:
    """Those that a plot has room for: not where perplexity is infinite."""
    return [row for row in found["points"] if _has(row, loss)]


def _has(row: Mapping[str, Any], loss: str) -> bool:
    return row[loss] is not None and math.isfinite(float(row[loss]))


def _plot(found: Mapping[str, Any], size: str, loss: str) -> Plot:
    rows = _measured(found, loss)
    dense = found["dense"]["perplexity"] if found["dense"] and loss == "perplexity" else None
    dense = None if dense == INFINITY else dense

    def plot(axes: Axes) -> None:
        for place, (name, line) in enumerate(series_of(found).items()):
            points = sorted((row[f"{size}_kept"], row[loss]) for row in line if _has(row, loss))
            _line(axes, place, name, points)
        measured = [Point(row[f"{size}_kept"], row[loss], series_name(row)) for row in rows]
        best = sorted(measured[place][:2] for place in front(measured))
        ring: dict[str, Any] = {"marker": "o", "markersize": 9.0, "fillstyle": "none", "color": INK}
        axes.plot(*_columns(best), linestyle="none", label=RING, **ring)
        if dense is not None:
            axes.axhline(dense, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)))
            axes.annotate(
                "dense", (0.01, dense), xycoords=("axes fraction", "data"), color=MUTED, ha="left", va="bottom"
            )
        _scale(axes, [row[loss] for row in rows] + ([dense] if dense is not None else []))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel(f"{SIZES[size]}, share of the dense model's")
        axes.set_ylabel(LOSSES[loss])
        legend_below(axes, 2)

    told = (
        f"{LOSSES[loss].capitalize()} by {SIZES[size]}. Ringed: no other point is as small and loses as little, nor "
        f"does one of another curve with {TOLERANCE:.0%} of the dense model's bytes more lose less."
    )
    rows_below = math.ceil((len(series_of(found)) + 1) / 2)
    return Plot(size, draw(f"{loss}-{size}", plot, TALL_INCHES + ROW_INCHES * rows_below), told)


def _line(axes: Axes, place: int, name: str, points: Sequence[tuple[float, float]]) -> None:
    colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
    dash = DASHES[place // len(SERIES) % len(DASHES)]
    axes.plot(*_columns(points), color=colour, marker=marker, linestyle=dash, label=name)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x and y; of no points, too."""
    return [x for x, _ in points], [y for _, y in points]


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the values ask for it: one bad point hides the others else."""
    least = min(values)
    if least <= 0 or max(values) < STEEP * least:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="minor", color=GRID, linewidth=0.3)
