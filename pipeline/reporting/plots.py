"""Draws the data of one figure. Each function gets the axes, the data, and the number of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from manifests.entries import HealingCurve
from pipeline.reporting.drawing import DASHES, GRID, INK, MARKERS, SERIES, legend_below, make_logarithmic, set_height
from pipeline.reporting.layer_data import DepthLine, Stacks
from pipeline.reporting.time_data import BACKGROUND, Bar, Steps

ByLayer = Mapping[int, float]
MAP_INCHES = 3.1  # height
DEPTHS = LinearSegmentedColormap.from_list("depths", ["#4f7fe0", "#d4613c"])  # from the first layer to the last


def bars(axes: Axes, values: ByLayer, num_layers: int) -> None:
    """Draw a bar for each layer."""
    axes.bar([*values], [*values.values()], color=SERIES[0])
    _limit_layers(axes, num_layers)


def ranks(axes: Axes, data: tuple[Mapping[int, int], Sequence[int | None]], num_layers: int) -> None:
    """Draw the rank of each layer, below the full ranks if all are known."""
    rank_by_layer, full = dict(sorted(data[0].items())), [cap for cap in data[1] if cap]
    if len(full) == len(rank_by_layer):
        axes.step([*rank_by_layer], full, where="mid", color=INK, linestyle="--", linewidth=1.0)
    axes.plot([*rank_by_layer], [*rank_by_layer.values()], color=SERIES[0], marker=MARKERS[0])
    _limit_layers(axes, num_layers)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.08 * max([*full, *rank_by_layer.values()]))


def stacks(axes: Axes, data: Stacks, num_layers: int) -> None:
    """Draw a stack of bars for each layer, a colour for each group."""
    bottom = [0.0] * len(data.layers)
    for place, (group, heights) in enumerate(data.heights.items()):
        colour = GRID if group == "rest" else SERIES[place % len(SERIES)]
        axes.bar(data.layers, heights, bottom=bottom, color=colour, label=group)
        bottom = [under + height for under, height in zip(bottom, heights, strict=True)]
    if data.dense is not None:
        axes.axhline(data.dense, color=INK, linestyle="--", linewidth=1.0, label="dense")
    _limit_layers(axes, num_layers)
    legend_below(axes, 4)


def lines(axes: Axes, values_by_line: Mapping[str, ByLayer], num_layers: int) -> None:
    """Draw the positive values by layer on a logarithmic axis."""
    for place, (line, values) in enumerate(values_by_line.items()):
        shown = {layer: value for layer, value in values.items() if value > 0}
        (drawn,) = axes.plot([*shown], [*shown.values()], label=line, color=SERIES[place % len(SERIES)])
        drawn.set(linestyle=DASHES[place % len(DASHES)], marker=MARKERS[place % len(MARKERS)])
    make_logarithmic(axes)
    _limit_layers(axes, num_layers)
    legend_below(axes, 3)


def lines_by_depth(axes: Axes, line_by_layer: Mapping[int, DepthLine], num_layers: int) -> None:
    """Draw a line for each layer, coloured by its depth, on a logarithmic axis, with a dot at the chosen point."""
    for layer, line in line_by_layer.items():
        colour = DEPTHS(layer / max(1, num_layers - 1))
        axes.plot([x for x, _ in line.points], [y for _, y in line.points], color=colour, linewidth=0.9)
        if line.chosen is not None:
            axes.plot(*line.chosen, MARKERS[0], color=colour)
    make_logarithmic(axes)
    first, last = (Line2D([], [], color=DEPTHS(depth)) for depth in (0.0, 1.0))
    axes.legend([first, last], ["layer 0", f"layer {num_layers - 1}"], loc="lower left")


def healing(axes: Axes, curve: HealingCurve, _: int) -> None:
    """Draw the divergences of a healing, with a mark at the best step."""
    axes.plot(curve.steps, curve.divergences, color=SERIES[0], marker=MARKERS[0])
    best = curve.divergences[curve.steps.index(curve.best)]
    axes.plot([curve.best], [best], MARKERS[1], color=SERIES[1])


def heat_map(axes: Axes, values: Mapping[tuple[int, int], float], _: int, logarithmic: bool = False) -> None:
    """Draw values by layer and expert as colours, whose label is that of the y axis."""
    layers = sorted({layer for layer, _ in values})
    experts = 1 + max(expert for _, expert in values)
    table_LE = np.full((len(layers), experts), np.nan)
    for (layer, expert), value in values.items():
        table_LE[layers.index(layer), expert] = value
    positive = table_LE[table_LE > 0]
    scale = (
        LogNorm(positive.min(), max(positive.max(), positive.min() * 10.0))
        if logarithmic and len(positive)
        else Normalize(0.0, max(1.0, float(np.nanmax(table_LE))))
    )
    image = axes.pcolormesh(np.arange(experts + 1) - 0.5, np.arange(len(layers) + 1) - 0.5, table_LE, norm=scale)
    set_height(axes, MAP_INCHES).colorbar(image, ax=axes, label=axes.get_ylabel())
    axes.set(xlabel="expert", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))


logarithmic_map = partial(heat_map, logarithmic=True)


def commits(axes: Axes, times_by_kind: Mapping[str, Sequence[float]], num_layers: int) -> None:
    """Draw the number of committed layers of each kind of work, by time."""
    for place, (kind, times) in enumerate(times_by_kind.items()):
        counts = range(1, len(times) + 1)
        (drawn,) = axes.step(times, counts, where="post", label=kind, color=SERIES[place])
        drawn.set(linestyle=DASHES[place], marker=MARKERS[place], markersize=2.5)
    axes.axhline(num_layers, color=INK, linestyle=":", linewidth=1.0)
    axes.set_ylim(bottom=0)
    legend_below(axes, 3)


def timeline(axes: Axes, bars_by_worker: Mapping[str, Mapping[str, Sequence[Bar]]], _: int) -> None:
    """Draw a row for each worker, and in it a bar for its units, coloured by the kind of work."""
    for row, bars_by_kind in enumerate(bars_by_worker.values()):
        for place, (kind, drawn) in enumerate(bars_by_kind.items()):
            used = row == 0 and any(others[kind] for others in bars_by_worker.values())
            span = (row + 0.15, 0.25) if kind == BACKGROUND else (row - 0.4, 0.8)
            colour = SERIES[place % len(SERIES)]
            axes.broken_barh(drawn, span, color=colour, label=kind if used else None)
    rows = len(bars_by_worker)
    axes.set_yticks(range(rows), [*bars_by_worker])
    axes.set_ylim(rows - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    legend_below(axes, 4, 1.6 + 0.2 * rows)


def rates(axes: Axes, data: Steps, _: int) -> None:
    """Draw numbers per second, by time."""
    axes.step(data.times, data.values, where="post", color=SERIES[0])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def memory(axes: Axes, data: Steps, _: int) -> None:
    """Draw the memory by time, below the planned one."""
    assert data.planned is not None
    axes.step(data.times, data.values, where="post", color=SERIES[0], label="measured")
    axes.axhline(data.planned, color=INK, linestyle="--", linewidth=1.0, label="plan")
    axes.set_ylim(0, 1.1 * max(data.planned, *data.values))
    axes.legend(loc="lower right")


def phases(axes: Axes, seconds_by_phase: Mapping[str, float], _: int) -> None:
    """Draw a bar for the seconds of each phase, the first on top."""
    set_height(axes, 1.0 + 0.28 * len(seconds_by_phase))
    drawn = axes.barh([*seconds_by_phase][::-1], [*seconds_by_phase.values()][::-1], color=SERIES[0], height=0.6)
    axes.bar_label(drawn, fmt="{:,.1f}", padding=3, color=INK, fontsize=8.5)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)


def _limit_layers(axes: Axes, num_layers: int) -> None:
    axes.set_xlim(-0.6, max(1, num_layers) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
