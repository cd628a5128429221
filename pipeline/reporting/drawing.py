"""Draws plots as SVG elements, for a page, whose style colours their text, or for a file on white or dark ground."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# Every colour has a contrast of 3 or more to white and to the pages' dark ground (WCAG 2, graphics).
INK, GRID = "#757d87", "#757d8759"
# After the ten colours of M. A. Petroff, "Accessible Color Sequences for Data Visualization" (arXiv 2107.02270), which
# colour-blind readers tell apart.
SERIES = (
    "#3f90da", "#e76300", "#9a55c9", "#d8402b", "#7c8488", "#c08000", "#2f969d", "#b07562", "#8d8440", "#d6569b",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")  # so that a print without colours can be read
DASHES = ("-", "--", "-.", ":", "-", "--", "-.", ":", "-", "--")
WIDTH_INCHES, HEIGHT_INCHES = 4.6, 2.7  # as wide as a phone shows at its own size
WITH_LEGEND_INCHES = 3.1  # height
LETTER, LEGEND_LINE, LEGEND_GAP = 0.58, 2.8, 2.0  # widths in a legend, in sizes of its font
SHORT_LOG_AXIS = 300.0  # an axis whose ends have a smaller ratio is labelled at 1, 2 and 5 of each decade

STYLE: dict[Any, Any] = {  # matplotlib's types list every name
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
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
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Plot:
    """An SVG element and a caption."""

    svg: str
    caption: str


def draw(name: str, caption: str, plot: Callable[[Axes], None]) -> Plot:
    """Draw one plot. `name` begins its SVG identifiers, so that a page can hold several plots."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        plot(figure.add_subplot())
        content = io.StringIO()
        # `savefig` would draw a figure with a layout twice. All grounds are transparent by STYLE.
        canvas.print_svg(content, metadata={"Title": caption, "Date": None, "Creator": None})
    return Plot(_element(content.getvalue(), name), caption)


def set_height(axes: Axes, inches: float) -> Figure:
    """Set the height of a plot, HEIGHT_INCHES without this. Return its figure."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(inches)
    return figure


def make_logarithmic(axes: Axes) -> None:
    """Make the y axis of a finished plot logarithmic.

    Labels are plain numbers: matplotlib takes as long to set the powers of ten of one axis as for the rest of a plot.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < SHORT_LOG_AXIS:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend_below(axes: Axes, most_columns: int, height_inches: float = WITH_LEGEND_INCHES) -> None:
    """Put a legend below the axes, in as many columns as fit the width of the figure, and set the figure's height."""
    figure = set_height(axes, height_inches)
    lengths, columns = [len(label) for label in axes.get_legend_handles_labels()[1]], most_columns
    while columns > 1 and _legend_inches(lengths, columns) > WIDTH_INCHES:
        columns -= 1
    figure.legend(loc="outside lower center", ncols=columns)


def _legend_inches(lengths: Sequence[int], columns: int) -> float:
    """Return the width of a legend whose labels have these numbers of letters, column by column."""
    longest = [max(part, default=0) for part in np.array_split(np.asarray(lengths), columns)]
    widths = [LEGEND_LINE + LETTER * letters + LEGEND_GAP for letters in longest]
    return (sum(widths) - LEGEND_GAP) * float(STYLE["legend.fontsize"]) / 72.0


def _element(svg: str, name: str) -> str:
    """Return the SVG element of a file, without its fixed size and with identifiers that begin with `name`."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    element = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', element)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", element)
