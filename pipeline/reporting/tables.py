"""The tables of a report."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from manifests.packages import DISTRIBUTION, SERVING_DISTRIBUTION
from manifests.records import INFINITY
from pipeline.console.progress import SHOWN
from pipeline.evaluation.losses import perplexity_of, shown_perplexity
from pipeline.evaluation.task_scores import read_scores, task_rows
from pipeline.methods.method import read_task_key
from pipeline.methods.registry import build_methods
from pipeline.reporting.run_data import Run
from pipeline.reporting.summary import compute_share, refined_cells

PACKAGES = (
    "torch", "ray", "transformers", "safetensors", "zarr", "numpy", DISTRIBUTION, SERVING_DISTRIBUTION,
)  # fmt: skip
NARROW_COLUMNS = 3
SCORES = {  # field of an evaluation -> heading
    "perplexity": "perplexity",
    "loss": "loss, nats per token",
    "tokens": "tokens scored",
    "windows": "windows",
    "window": "tokens in a window",
    "seen": "share of the text that occurs in the calibration samples",
}
UNITS = {  # kind of unit -> heading
    "windowforward": "forward, scored text",
    "choosegrids": "choose grids of sums",
    "checkgrids": "check grids of sums",
}
SHOWN_BESIDE = ("method", "ranks", "error", "condition", "fallback", "jitter")  # fields of a group without a note


@dataclass(frozen=True)
class Table:
    """A table of a page: the first `words` columns are text, the others right-aligned numbers.

    Without rows it is not shown. On a narrow screen, a table of more than NARROW_COLUMNS columns shows each row as a
    list of labelled cells.
    """

    name: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: int = 1

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def stacked(self) -> bool:
        """True if each row is a list on a narrow screen."""
        return len(self.headers) > NARROW_COLUMNS


def kept(run: Run) -> Table:
    """Return the dense and compressed sizes of a finished job."""
    counts = run.summary.get("counts", {})
    rows = [
        _compared(name.replace("_", " "), pair["dense"], pair["compressed"], ".4f") for name, pair in counts.items()
    ]
    return Table("kept", ("", "dense", "compressed", "kept"), rows)


def _compared(name: str, first: int, second: int | None, form: str) -> tuple[str, ...]:
    """Return the cells of two amounts and of the second over the first."""
    ratio = f"{second / first:{form}}" if second is not None and first else ""
    return name, f"{first:,}", "" if second is None else f"{second:,}", ratio


def scores(run: Run) -> Table:
    """Return the scores of the output, beside the dense model's if it was scored."""
    evaluation = run.summary.get("evaluation", {})
    compressed, dense = evaluation.get("perplexity") or {}, evaluation.get("dense") or {}
    rows = [
        (label, *(_score(name, scores.get(name)) for scores in (compressed, *([dense] if dense else []))))
        for name, label in SCORES.items()
        if name in compressed or name in dense
    ]
    return Table("scores", ("", "compressed", *(["dense"] if dense else [])), rows)


def tasks(run: Run) -> Table:
    """Return the scores on tasks, with a column for each model, as in the summary of `run`."""
    scored = run.summary.get("evaluation", {}).get("tasks", {})
    headers, *rows = task_rows({model: read_scores(scores) for model, scores in scored.items()})
    return Table("tasks", headers, rows, words=2)


def texts(run: Run) -> Table:
    """Return the dense model's scores on the calibration samples and on the evaluation text."""
    entered = run.summary.get("texts") or {}
    rows = [
        (name, shown_perplexity(perplexity_of(entered[kind]["loss"])), f"{entered[kind]['tokens']:,}")
        for kind, name in (("calibration", "calibration samples"), ("evaluation", "evaluation text"))
        if entered.get(kind)
    ]
    return Table("texts", (f"windows of {entered.get('window')} tokens", "dense perplexity", "tokens"), rows)


def _score(name: str, value: float | str | None) -> str:
    if value is None:
        return ""
    if value == INFINITY:
        return "infinite"
    assert not isinstance(value, str)
    return f"{value:.2%}" if name == "seen" else number(value)


def layers(run: Run) -> Table:
    """Return every group of every committed layer: ranks, notes, sizes and errors."""
    rows, methods = [], build_methods(run.manifest)
    for layer, entry in sorted(run.layers.items()):
        stored = run.stored_bytes(layer)
        for group, group_report in entry.groups.items():
            report = group_report.as_json()
            error, condition = report.get("error"), report.get("condition")
            rows.append(
                (
                    layer,
                    group,
                    methods[report["method"]].name,
                    ", ".join(f"{name} {rank:,}" for name, rank in report["ranks"].items()),
                    _notes(report),
                    f"{run.importance[layer]:.4f}" if layer in run.importance else "",
                    f"{stored.get(group, 0):,}",
                    f"{error:.3e}" if isinstance(error, float) else "",
                    f"{1 - error:.6f}" if isinstance(error, float) else "",
                    f"{condition:.3e}" if isinstance(condition, float) else "",
                )
            )
    headers: tuple[str, ...] = ("layer", "group", "method", "ranks", "notes")
    headers += ("importance", "bytes", "error", "kept energy", "condition")
    return Table("layers", headers, rows, words=5)


def refinement(run: Run) -> Table:
    """Return the refinement of each layer: errors before and after, rates that were tried, steps, kept or not."""
    refined = {layer: entry.refined for layer, entry in sorted(run.layers.items()) if entry.refined is not None}
    cells = {layer: refined_cells(figures.as_json()) for layer, figures in refined.items()}
    rows = [
        (
            layer,
            *row.values(),
            ", ".join(f"{rate:.2g}: {error:.3g}" for rate, error in refined[layer].rates),
            f"{refined[layer].samples:,} and {refined[layer].held_out:,}",
        )
        for layer, row in cells.items()
    ]
    names = [name for row in cells.values() for _, name in row]
    headers = ("layer", *dict.fromkeys(names), "rates and their held-out errors", "samples, held-out ones")
    return Table("refinement", headers, rows)


def predictions(run: Run) -> Table:
    """Return the predicted loss of each chosen size, where ranks follow curves."""
    rows = []
    for task, point in run.chosen_points.items():
        (layer, _, group), curve = read_task_key(task), run.curves[task]
        numbers, loss = curve.numbers[point], curve.loss[point]
        rows.append((layer, group, f"{numbers:,}", f"{numbers / curve.numbers[-1]:.4f}", f"{loss:.3e}"))
    headers = ("layer", "group", "numbers", "kept", "nats per token")
    return Table("predictions", headers, sorted(rows), words=2)


def expected(run: Run) -> Table:
    """Return the predicted loss of several sizes, and the expected one after calibration."""
    sizes = (run.summary.get("prediction") or {}).get("sizes", ())
    rows = [(f"{each['keep']:g}", f"{each['predicted']:.3e}", f"{each['expected']:.3e}") for each in sizes]
    return Table("expected", ("keep", "predicted, nats per token", "expected, nats per token"), rows, words=0)


def plan_and_measurement(run: Run) -> Table:
    """Return the planned amounts beside the measured ones."""
    summary, plan = run.summary, run.plan
    counts, peaks = summary.get("counts", {}), summary.get("peak_bytes", {})
    pairs = {
        "stored numbers": (plan.expected_numbers, counts.get("parameters", {}).get("compressed")),
        "output bytes": (plan.output_bytes, counts.get("bytes", {}).get("compressed")),
        "peak bytes of a worker": (
            plan.worker_peak_bytes,
            max([*peaks.get("workers", {}).values(), *(line["peak_bytes"] for line in run.units)], default=None),
        ),
        "peak bytes of the driver": (plan.driver_peak_bytes, peaks.get("driver")),
        "bytes of statistics, largest layer": (
            plan.statistics_bytes_per_layer,
            max(run.statistics_bytes.values(), default=None),
        ),
        "bytes of the run directory": (plan.run_dir_bytes, None),
        "bytes read": (plan.read_bytes, None),
        "calibration tokens": (plan.calibration_tokens, None),
    }
    rows = [_compared(name, planned, measured, ".3f") for name, (planned, measured) in pairs.items()]
    return Table("plan", ("", "plan", "measured", "measured / plan"), rows)


def seconds(run: Run) -> Table:
    """Return the seconds of the last run by phase."""
    times = run.summary.get("seconds", {})
    rows = [(SHOWN.get(name, name), f"{spent:,.1f}") for name, spent in times.get("phases", {}).items()]
    rows += [("total", f"{times['total']:,.1f}")] if "total" in times else []
    return Table("seconds", ("", "seconds"), rows)


def units(run: Run) -> Table:
    """Return the number and seconds of the workers' units by kind."""
    kinds = run.summary.get("seconds", {}).get("units", {})
    rows = [
        (UNITS.get(kind, kind), f"{count:,.0f}", f"{spent:,.1f}", f"{computing / spent:.0%}" if spent else "")
        for kind, (count, spent, computing) in kinds.items()
    ]
    if rows:
        count, busy, _ = map(sum, zip(*kinds.values(), strict=True))
        rows.append(("all", f"{count:,.0f}", f"{busy:,.1f}", f"{compute_share({'units': kinds}):.0%}"))
    return Table("units", ("unit", "done", "seconds of workers", "inside products"), rows)


def peaks(run: Run) -> Table:
    """Return the peak memory of each process."""
    peak_bytes = run.summary.get("peak_bytes", {})
    rows = [("driver", peak_bytes["driver"])] if "driver" in peak_bytes else []
    rows += sorted(peak_bytes.get("workers", {}).items())
    return Table("memory", ("process", "peak MiB"), [(name, f"{size / 2**20:,.0f}") for name, size in rows])


def versions(run: Run) -> Table:
    """Return the version of the job's code, and those of the packages that render this report."""
    rows = [("code of the job", run.fingerprint["code"]), ("dtype", run.fingerprint["dtype"])]
    rows += [("device", run.fingerprint["device"]), ("Python of this report", platform.python_version())]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            rows.append((f"{name} of this report", version(name)))
    return Table("versions", ("", ""), rows, words=2)


def digests(run: Run) -> Table:
    """Return the sha256 of the source's files, the written layers, the record and the calibration tokens."""
    rows = [
        ("source", name, f"{file['size']:,}", file["sha256"])
        for name, file in sorted(run.fingerprint["source"].items())
    ]
    rows += [
        ("compressed", f"layer {layer}", f"{entry.staged.size:,}", entry.staged.sha256)
        for layer, entry in sorted(run.layers.items())
    ]
    rows += [("output", "compression.json", "", run.record_sha256)] if run.record_sha256 else []
    tokens = run.fingerprint.get("calibration_tokens")
    rows += [("calibration", "token ids", "", tokens)] if isinstance(tokens, str) else []
    return Table("digests", ("", "name", "bytes", "sha256"), rows, words=2)


def number(value: float) -> str:
    """Format a number: integers whole, others to six digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _notes(report: Mapping[str, Any]) -> str:
    """Join the notes on a group: fallbacks first, then the other figures that a method reports."""
    notes = ["fallback"] if report.get("fallback") else []
    notes += [f"jitter {report['jitter']:.3g}"] if report.get("jitter") else []
    notes += [
        f"{name.replace('_', ' ')} {number(value) if isinstance(value, (int, float)) else value}"
        for name, value in report.items()
        if name not in SHOWN_BESIDE
        and not name.endswith(("spectrum", "by_expert", "by_source"))
        and value not in (0, False, None)
    ]
    return ", ".join(notes)
