"""The results of a sweep as one HTML file that needs nothing else, and its plots as files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import PurePosixPath
from typing import Any

from pipeline.reporting.drawing import Plot
from pipeline.reporting.page import document, figures, section
from pipeline.reporting.style import DARK, LIGHT
from pipeline.reporting.tables import table
from pipeline.sweeping.plots import SIZES, sweep_plots

FIGURES = {
    "numbers_kept": ("numbers", ".4f"),
    "bytes_kept": ("bytes", ".4f"),
    "cache_kept": ("cache", ".4f"),
    "perplexity": ("perplexity", ".4f"),
    "loss_over_dense": ("loss over dense", ".4f"),
    "divergence": ("divergence", ".3g"),
    "predicted_loss": ("predicted", ".3g"),
    "seconds": ("seconds", ".1f"),
}


def render_sweep(found: Mapping[str, Any]) -> str:
    """The whole file."""
    plots, name = list(sweep_plots(found).values()), PurePosixPath(found["model"]).name
    parts = [section(f"By {told}", figures(plots, size)) for size, told in SIZES.items()]
    told = "".join(f"<p class=error><b>{escape(warning)}</b></p>" for warning in found["warnings"])
    head = (
        f"<header><h1>{escape(name)}</h1><p>{len(found['points'])} points{escape(_missing(found))}</p>{told}</header>"
    )
    return document(f"{name}: sweep", head, [*parts, section("Points", _points(found))])


def standalone(plot: Plot) -> str:
    """A plot as an SVG file: its colours follow the reader's scheme, on whatever ground it is shown."""
    style = (
        f"<style>:root {{{LIGHT}}} @media (prefers-color-scheme: dark) {{ :root {{{DARK}}} }} "
        "text {{ font-family: system-ui, sans-serif !important; }}</style>"
    )
    opening, _, rest = plot.svg.partition(">")
    names = ' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f"{opening}{names}>\n<title>{escape(plot.caption)}</title>\n{style}{rest}\n"


def _missing(found: Mapping[str, Any]) -> str:
    return f"; missing: {', '.join(found['missing'])}" if found["missing"] else ""


def _points(found: Mapping[str, Any]) -> str:
    rows = [
        (
            row["point"],
            *("" if row[column] is None else f"{float(row[column]):{form}}" for column, (_, form) in FIGURES.items()),
            ", ".join(kept for kept in SIZES if row[f"best_by_{kept}"]),
        )
        for row in found["points"]
    ]
    return table("points", ("point", *(heading for heading, _ in FIGURES.values()), "best by"), rows)
