"""Plots of a sweep: loss against size, with a ring around the points of the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from manifests.records import INFINITY
from pipeline.reporting.drawing import DASHES, GRID, INK, MARKERS, SERIES, Plot, draw, legend_below, make_logarithmic
from pipeline.sweeping.front import TOLERANCE, PlotPoint, front

SIZES = {"bytes": "bytes of the checkpoint", "cache": "bytes of the cache per token"}
LOSSES = {"perplexity": "perplexity", "loss_over_dense": "loss over dense (nats)", "divergence": "divergence"}
AXES_INCHES, LEGEND_ROW_INCHES = 2.8, 0.2  # heights
RING = f"no better point up to {TOLERANCE:.0%} larger"
STEEP = 4.0  # largest over smallest loss from which the axis is logarithmic


def sweep_plots(results: Mapping[str, Any]) -> dict[str, Plot]:
    """Return `LOSS-SIZE` -> plot, for each measured loss and each size in which the points differ."""
    return {
        f"{loss}-{size}": _plot(results, size, loss)
        for loss in LOSSES
        for size in SIZES
        if len({row[f"{size}_kept"] for row in results["points"] if _is_finite(row[loss])}) > 1
    }


def series_name(row: Mapping[str, Any]) -> str:
    """Return the name of the line that a point is drawn in: its points differ in size alone."""
    return "-".join(part for part in (row["series"], row["rounding"]) if part)


def _is_finite(loss: float | str | None) -> bool:
    return loss is not None and math.isfinite(float(loss))


def _plot(results: Mapping[str, Any], size: str, loss: str) -> Plot:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in results["points"]:
        line = lines.setdefault(series_name(row), [])
        if _is_finite(row[loss]):
            line.append((row[f"{size}_kept"], row[loss]))
    healed = _healed_lines(results, size, loss)
    dense = results["dense"]["perplexity"] if results["dense"] and loss == "perplexity" else None
    dense = None if dense == INFINITY else dense

    def plot(axes: Axes) -> None:
        for place, (name, points) in enumerate([*lines.items(), *healed.items()]):
            colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
            dash = DASHES[place // len(SERIES) % len(DASHES)]
            axes.plot(*_columns(sorted(points)), color=colour, marker=marker, linestyle=dash, label=name)
        measured = [PlotPoint(*point, name) for name, points in lines.items() for point in points]
        best = sorted(measured[place][:2] for place in front(measured))
        ring: dict[str, Any] = {"marker": "o", "markersize": 9.0, "fillstyle": "none", "color": INK}
        axes.plot(*_columns(best), linestyle="none", label=RING, **ring)
        if dense is not None:
            axes.axhline(dense, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
            at = ("axes fraction", "data")
            axes.annotate("dense", (0.01, dense), xycoords=at, color=INK, ha="left", va="bottom")
        losses = [point.loss for point in measured] + [loss for points in healed.values() for _, loss in points]
        _scale(axes, losses + ([dense] if dense is not None else []))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel(f"{SIZES[size]}, share of the dense model's")
        axes.set_ylabel(LOSSES[loss])
        legend_rows = math.ceil((len(lines) + len(healed) + 1) / 2)
        legend_below(axes, 2, AXES_INCHES + LEGEND_ROW_INCHES * legend_rows)

    caption = (
        f"{LOSSES[loss].capitalize()} by {SIZES[size]}. A ring marks a point that no other beats: no point of its size "
        f"has as little loss, and none of another curve has less that is larger by up to {TOLERANCE:.0%} of the dense "
        "size."
    ) + (" Healed points are not compared in this." if healed else "")
    return draw(f"{loss}-{size}", caption, plot)


def _healed_lines(results: Mapping[str, Any], size: str, loss: str) -> dict[str, list[tuple[float, float]]]:
    """Return the line of the healed points of each series."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in results["points"]:
        if (healed := row.get("healed")) and _is_finite(healed[loss]):
            lines.setdefault(f"{series_name(row)}, healed", []).append((row[f"{size}_kept"], healed[loss]))
    return lines


def _columns(points: Sequence[tuple[float, ...]]) -> tuple[list[float], list[float]]:
    """Return the x and the y values, which may be none."""
    return [x for x, _ in points], [y for _, y in points]


def _scale(axes: Axes, losses: Sequence[float]) -> None:
    """Make the y axis logarithmic if one large loss would flatten the others."""
    least = min(losses)
    if least <= 0 or max(losses) < STEEP * least:
        return
    make_logarithmic(axes)
    axes.grid(which="minor", color=GRID, linewidth=0.3)
