"""Renders the results of a sweep as one HTML file without external resources."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import PurePosixPath
from typing import Any

from pipeline.evaluation.text_remarks import text_lines
from pipeline.reporting.page import document, figures, section, warning_lines
from pipeline.reporting.tables import table
from pipeline.sweeping.healed_rows import HEADINGS, healed_cell
from pipeline.sweeping.plots import SIZES, sweep_plots
from pipeline.sweeping.point_tasks import task_figures

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


def render_sweep(results: Mapping[str, Any]) -> str:
    """Render the whole file."""
    plots, name = sweep_plots(results), PurePosixPath(results["model"]).name
    by_size = {size: [plot for key, plot in plots.items() if key.endswith(f"-{size}")] for size in SIZES}
    parts = [section(f"By {label}", figures(by_size[size])) for size, label in SIZES.items()]
    missing = f"; missing: {', '.join(results['missing'])}" if results["missing"] else ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in text_lines(results))
    count = f"{len(results['points'])} points{escape(missing)}"
    head = f"<header><h1>{escape(name)}</h1><p>{count}</p>{lines}{warning_lines(results['warnings'])}</header>"
    return document(f"{name}: sweep", head, [*parts, section("Points", _points(results))])


def _points(results: Mapping[str, Any]) -> str:
    tasks = list(task_figures(results.get("tasks"), first=True))
    healed = HEADINGS if any(row.get("healed") for row in results["points"]) else {}
    rows = [
        (
            row["point"],
            *("" if row[column] is None else f"{float(row[column]):{form}}" for column, (_, form) in FIGURES.items()),
            *(healed_cell(row, name, form) for name, form in healed.items()),
            *(f"{task_figures(row['tasks'])[name]:.4f}" if row.get("tasks") else "" for name in tasks),
            ", ".join(size for size in SIZES if row[f"best_by_{size}"]),
        )
        for row in results["points"]
    ]
    headings = [heading for heading, _ in FIGURES.values()]
    headings += [f"healed {name.replace('_', ' ')}" for name in healed]
    return table("points", ("point", *headings, *tasks, "best by"), rows)
