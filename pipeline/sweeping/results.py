"""The results of a sweep as JSON, CSV, HTML and a table in the terminal: a row for each point."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from manifests import VERSION
from manifests.entries import HealedPoint, HeldOutScoreEntry
from pipeline.driver.ledger_keys import RANKS, RESULT, TEXTS
from pipeline.evaluation.losses import WARNED_NATS, damage_warnings, json_perplexity
from pipeline.evaluation.text_remarks import text_lines
from pipeline.job.context import JobContext
from pipeline.job.output_scores import dense_score_key, dense_task_key
from pipeline.job.prediction import ENOUGH
from pipeline.ranks.calibration import CalibratedLoss
from pipeline.sweeping.front import PlotPoint, front
from pipeline.sweeping.healed_rows import HEADINGS, HEALED_COLUMNS, healed_cell, healed_columns
from pipeline.sweeping.plots import SIZES, series_name
from pipeline.sweeping.point_tasks import task_figures
from pipeline.sweeping.points import SweptPoint
from pipeline.sweeping.sweep_context import SweepContext
from pipeline.sweeping.sweep_page import render_sweep
from stores.run_directory import RESULTS
from stores.storage import Storage

RESULTS_VERSION = 1
SHARES = {"numbers": "decoder_parameters", "bytes": "bytes", "cache": "cache_bytes_per_token"}
MEASURED = {  # heading -> field and form
    "loss over dense": ("loss_over_dense", ".4f"),
    "divergence": ("divergence", ".3g"),
    "predicted": ("predicted_loss", ".3g"),
    "seconds": ("seconds", ".1f"),
}
DROPPED = ("seconds", "predicted", "numbers", "best by")  # columns that a narrow terminal lacks, in this order
GAP = 2
NAME_WIDTH = 26  # most characters of the points' names, gap included, that a table's width is divided by
COLUMNS = (
    "point", "series", "methods", "rounding", "numbers_kept", "bytes", "bytes_kept", "cache_bytes_per_token",
    "cache_kept", "perplexity", "loss", "loss_over_dense", "divergence", "held_out_perplexity", "damaged",
    "predicted_loss", "calibrated_loss", "best_by_bytes", "best_by_cache", "seconds", "output",
)  # fmt: skip


def sweep_results(sweep: SweepContext) -> dict[str, Any]:
    """Return all committed results as JSON: `dense`, and `points` in the order of the sweep."""
    job = sweep.job
    scored = next((job.ledger.get(key) for key in dense_score_key(job)), None)
    dense = scored.as_json() if scored else None
    texts = entered.as_json() if (entered := job.ledger.get(TEXTS)) else None
    rows = [row for point in sweep.points if (row := _row(sweep, point, dense)) is not None]
    for row, calibrated in zip(rows, calibrated_losses(rows), strict=True):
        row["calibrated_loss"] = calibrated
    for size in SIZES:
        best = front([PlotPoint(row[f"{size}_kept"], _loss(row), series_name(row)) for row in rows])
        for place, row in enumerate(rows):
            row[f"best_by_{size}"] = place in best
    return {
        "version": RESULTS_VERSION,
        "code_version": VERSION,
        "model": job.manifest.model.source,
        "dense": {name: dense[name] for name in ("perplexity", "loss", "tokens", "window")} if dense else None,
        "texts": texts,
        **({"tasks": _dense_tasks(job)} if job.manifest.evaluation.tasks else {}),
        "points": rows,
        **job.read_figures(),
        "warnings": _warnings(rows),
        "missing": [point.point.label for point in sweep.points if not sweep.is_done(point)],
        "seconds": {"phases": job.observer.seconds, "total": job.seconds()},
    }


def _dense_tasks(job: JobContext) -> dict[str, Any] | None:
    """Return the dense model's scores on tasks, if they are entered."""
    entered = job.ledger.get(dense_task_key(job))
    return entered.as_json()["tasks"] if entered else None


def calibrated_losses(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the predicted loss of each row, corrected by three measured points of its curve.

    These are the points of the smallest, the middle and the largest loss. None for a row without a predicted loss, and
    on curves with fewer points.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["predicted_loss"] is not None and row["divergence"] is not None:
            curves.setdefault(series_name(row), []).append((row["predicted_loss"], row["divergence"]))
    calibrated = {
        name: CalibratedLoss((points[0], points[len(points) // 2], points[-1]))
        for name, points in ((name, sorted(points)) for name, points in curves.items())
        if len(points) >= ENOUGH
    }
    of_row = [(row["predicted_loss"], calibrated.get(series_name(row))) for row in rows]
    return [None if loss is None or corrected is None else corrected(loss) for loss, corrected in of_row]


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning that names the damaged points, if there are any."""
    damaged = [row["point"] for row in rows if row["damaged"]]
    warning = (
        f"WARNING: {len(damaged)} of {len(rows)} points are badly damaged, their loss more than {WARNED_NATS:g} nats "
        f"per token above the dense model's: {', '.join(damaged)}"
    )
    return [warning] if damaged else []


def as_csv(results: Mapping[str, Any]) -> str:
    """Return a line for each point with the columns COLUMNS, those of healed points if there are any, and one for each
    task and metric. A figure that was not measured is empty."""
    text = io.StringIO()
    rows = [{**row, **task_figures(row.get("tasks")), **healed_columns(row)} for row in results["points"]]
    tasks = dict.fromkeys(name for row in results["points"] for name in task_figures(row.get("tasks")))
    healed = HEALED_COLUMNS if any(row.get("healed") for row in results["points"]) else ()
    writer = csv.DictWriter(text, [*COLUMNS, *healed, *tasks], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "methods": "+".join(row["methods"])} for row in rows)
    return text.getvalue()


def write_results(run_dir: Storage, results: Mapping[str, Any]) -> None:
    """Write sweep.json, sweep.csv and sweep.html. Raises StorageError."""
    contents = (json.dumps(results, indent=2) + "\n", as_csv(results), render_sweep(results))
    for name, content in zip(RESULTS, contents, strict=True):
        run_dir.replace(name, content.encode())


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print a row for each point. A width that is too small for all figures drops some, and makes further tables of the
    others."""
    columns = _columns(results)
    room = console.width - max(len(cell) for cell in columns["point"])
    for dropped in DROPPED:
        if sum(_width(*column) for column in columns.items()) - _width("point", columns["point"]) > room:
            columns.pop(dropped, None)
    for shown in _parts(columns, console.width):
        console.print(_table(shown))
    for line in text_lines(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for warning in results["warnings"]:
        console.print(warning, style="bold red", markup=False, highlight=False, soft_wrap=True)


def _parts(columns: Mapping[str, list[str]], width: int) -> Iterator[dict[str, list[str]]]:
    """Yield the columns of one table after another, each with the points' names. Long names are folded."""
    names = {"point": columns["point"]}
    shown = dict(names)
    room = width - min(_width("point", columns["point"]), NAME_WIDTH) + GAP
    for name, cells in columns.items():
        used = sum(_width(*column) for column in shown.items() if column[0] != "point")
        if len(shown) > 1 and used + _width(name, cells) > room:
            yield shown
            shown = dict(names)
        shown[name] = cells
    yield shown


def _table(columns: Mapping[str, list[str]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        words = name in ("point", "best by")
        shown.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    return shown


def _columns(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return heading -> cells of the columns that are not empty; the dense model's cell is the first."""
    dense, rows = results["dense"], results["points"]
    columns = {"point": ["dense", *(row["point"] for row in rows)]}
    for name in SHARES:
        columns[name] = ["1", *(f"{row[f'{name}_kept']:.4f}" for row in rows)]
    columns["perplexity"] = [_short(dense and dense["perplexity"], ".4f")]
    columns["perplexity"] += [_short(row["perplexity"], ".4f") for row in rows]
    for heading, (name, form) in MEASURED.items():
        columns[heading] = ["", *(_short(row[name], form) for row in rows)]
    for name, form in HEADINGS.items():
        columns[f"healed\n{name.replace('_', ' ')}"] = ["", *(healed_cell(row, name, form) for row in rows)]
    for name, value in task_figures(results.get("tasks"), first=True).items():
        of_rows = [task_figures(row.get("tasks")).get(name) for row in rows]
        columns[name] = [_short(figure, ".4f") for figure in (value, *of_rows)]
    columns["best by"] = ["", *(", ".join(size for size in SIZES if row[f"best_by_{size}"]) for row in rows)]
    return {name: cells for name, cells in columns.items() if any(cells)}


def _width(heading: str, cells: Sequence[str]) -> int:
    return max(len(line) for cell in (heading, *cells) for line in cell.split("\n")) + GAP


def _row(sweep: SweepContext, point: SweptPoint, dense: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the results of a point, or None if it has none yet."""
    ledger, manifest = point.ledger(sweep.job.ledger), point.point.manifest
    entry, ranks = ledger.get(RESULT), ledger.get(RANKS)
    if entry is None or entry.text != sweep.text:
        return None
    counts, held_out, loss = entry.counts, entry.held_out, entry.loss
    healed = entry.healed
    shares = {f"{name}_kept": counts[of]["compressed"] / counts[of]["dense"] for name, of in SHARES.items()}
    return {
        "point": point.point.label,
        "series": point.point.series,
        "methods": [entry.method for entry in manifest.methods],
        "budget": manifest.budget.model_dump(mode="json", exclude_none=True) if manifest.budget else None,
        "rounding": point.point.rounding,
        **shares,
        "bytes": counts["bytes"]["compressed"],
        "cache_bytes_per_token": counts["cache_bytes_per_token"]["compressed"],
        "counts": entry.as_json()["counts"],
        **_scores(loss, held_out, dense),
        "predicted_loss": entry.predicted,
        "ranks": ranks.as_json()["ranks"] if ranks else {},
        "seconds": entry.seconds,
        "output": entry.output,
        **({"tasks": entry.as_json()["tasks"]} if entry.tasks else {}),
        **({"healed": _healed(healed, dense)} if healed else {}),
    }


def _scores(loss: float | None, held_out: HeldOutScoreEntry | None, dense: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the scores of a point's layers, solved or healed, as columns of its row."""
    score = {"perplexity": json_perplexity(loss), "loss": loss} if loss is not None else None
    compared = held_out.as_json() if held_out else None
    return {
        "perplexity": score and score["perplexity"],
        "loss": loss,
        "loss_over_dense": loss - dense["loss"] if loss is not None and dense else None,
        "divergence": held_out.divergence if held_out else None,
        "held_out_perplexity": compared and compared["perplexity"],
        "damaged": bool(damage_warnings({"held_out": compared, "evaluation": {"perplexity": score, "dense": dense}})),
    }


def _healed(entry: HealedPoint, dense: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the figures of a healing and the scores after it; without scores if no step was better."""
    tasks = {"tasks": entry.as_json()["tasks"]} if entry.tasks else {}
    return {**entry.as_json()["figures"], **_scores(entry.loss, entry.held_out, dense), **tasks}


def _loss(row: Mapping[str, Any]) -> float:
    """Return the loss on the evaluation text, or else the divergence on held-out text."""
    return float(row["divergence"] if row["loss"] is None else row["loss"])


def _short(value: float | str | None, form: str) -> str:
    return "" if value is None else f"{float(value):{form}}"
