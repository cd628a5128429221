"""Plots as SVG that takes its colours from the page: one file for light, dark and print.

matplotlib knows fixed colours only. So each role of a colour is drawn in a colour that stands for nothing else, which
is then replaced by a CSS variable (`style.py` gives them values).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0400{number:02x}" for number in range(1, 11))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")  # so that a print without colours can be read
DASHES = ("-", "--", "-.", ":", "-", "--", "-.", ":", "-", "--")
DEPTHS = 100
WIDTH_INCHES, HEIGHT_INCHES = 4.6, 2.7  # as wide as a phone shows at its own size

STYLE: dict[Any, Any] = {  # matplotlib's types list every name
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.0,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


@dataclass(frozen=True)
class Plot:
    """An SVG element, what it shows in one sentence, and the section it belongs to."""

    section: str
    svg: str
    caption: str


def depth_colour(share: float) -> str:
    """The colour of a layer, from the first (0) to the last (1)."""
    return f"#0500{round(share * DEPTHS):02x}"


def draw(name: str, plot: Callable[[Axes], None], height_inches: float = HEIGHT_INCHES) -> str:
    """The SVG element of one plot. `name` tells its identifiers apart from another plot's on the page."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        plot(axes)
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(content.getvalue(), name)


def by_layer(axes: Axes, layers: int, label: str) -> None:
    """An axis of layers below, a quantity at the side."""
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    axes.set_xlim(-0.6, max(1, layers) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(axes: Axes, columns: int) -> None:
    """A legend below everything, for which room is made."""
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(loc="outside lower center", ncols=columns)


def _inline(svg: str, name: str) -> str:
    """Without what belongs to a file, with the page's colours and identifiers of its own."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', element, count=1)
    element = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', element)
    element = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", element)
    for colour, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid")):
        element = element.replace(colour, f"var(--{variable})")
    element = re.sub(r"#0400(\w\w)", lambda found: f"var(--series-{int(found[1], 16)})", element)
    return re.sub(r"#0500(\w\w)", lambda found: _mixed(int(found[1], 16)), element)


def _mixed(percent: int) -> str:
    return f"color-mix(in oklab, var(--last) {percent}%, var(--first))"
