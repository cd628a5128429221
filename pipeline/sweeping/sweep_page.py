"""Renders the results of a sweep as one HTML file without external resources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from pipeline.evaluation.text_remarks import text_lines
from pipeline.reporting.page import Section, render_page
from pipeline.reporting.tables import Table
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
    plots = sweep_plots(results)
    missing = f"; missing: {', '.join(results['missing'])}" if results["missing"] else ""
    sections = [
        Section(f"By {label}", [plot for key, plot in plots.items() if key.endswith(f"-{size}")])
        for size, label in SIZES.items()
    ]
    return render_page(
        PurePosixPath(results["model"]).name,
        f"{len(results['points'])} points{missing}",
        [*sections, Section("Points", parts=[_points(results)])],
        lines=text_lines(results),
        warnings=results["warnings"],
    )


def _points(results: Mapping[str, Any]) -> Table:
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
    return Table("points", ("point", *headings, *tasks, "best by"), rows)
