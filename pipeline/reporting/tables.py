"""Tables of a report: what the plots show, as numbers, and what no plot shows."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from manifests.packages import DISTRIBUTION, SERVING_DISTRIBUTION
from manifests.records import INFINITY
from pipeline.console.progress import SHOWN
from pipeline.methods.method import read_task_key
from pipeline.methods.registry import build_methods
from pipeline.reporting.figures import chosen_point
from pipeline.reporting.run_data import Run
from pipeline.reporting.summary import compute_share

PACKAGES = (
    "torch", "ray", "transformers", "safetensors", "zarr", "numpy", DISTRIBUTION, SERVING_DISTRIBUTION,
)  # fmt: skip
NARROW_COLUMNS = 3
SCORES = {  # of an evaluation
    "perplexity": "perplexity",
    "loss": "loss, nats per token",
    "tokens": "tokens scored",
    "windows": "windows",
    "window": "tokens in a window",
    "seen": "share of the text that occurs in the calibration samples",
}
UNITS = {  # kind of unit -> in words
    "windowforward": "forward, scored text",
    "choosegrids": "choose grids of sums",
    "checkgrids": "check grids of sums",
}
OF_A_GROUP = ("method", "ranks", "error", "condition", "fallback", "jitter")


def table(name: str, headers: Sequence[str], rows: Iterable[Sequence[Any]], words: int = 1) -> str:
    """A table whose first `words` columns hold words and the others numbers, set right. Cells are escaped here.

    Where a screen is narrow, a table of more than `NARROW_COLUMNS` shows each row as a list of labelled cells.
    """
    found = list(rows)
    if not found:
        return ""
    stacked = len(headers) > NARROW_COLUMNS

    def row(cells: Sequence[Any], tag: str) -> str:
        attributes = ["" if place < words else " class=number" for place in range(len(cells))]
        if tag == "td" and stacked:
            labels = (f' data-label="{escape(header)}"' for header in headers)
            attributes = [attribute + label for attribute, label in zip(attributes, labels, strict=True)]
        parts = zip(attributes, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{attribute}>{escape(str(cell))}</{tag}>' for attribute, cell in parts)}</tr>"

    body = "\n".join(row(cells, "td") for cells in found)
    head = f"<thead>{row(headers, 'th')}</thead>"
    shape = " class=stack" if stacked else ""
    return f'<div class=wide><table id="{name}"{shape}>{head}\n<tbody>\n{body}\n</tbody></table></div>'


def kept(run: Run) -> str:
    """The counts of a job that is done."""
    counts = (run.summary or {}).get("counts", {})
    rows = [
        (
            name.replace("_", " "),
            f"{pair['dense']:,}",
            f"{pair['compressed']:,}",
            f"{pair['compressed'] / pair['dense']:.4f}" if pair["dense"] else "",
        )
        for name, pair in counts.items()
    ]
    return table("kept", ("", "dense", "compressed", "kept"), rows)


def scores(run: Run) -> str:
    """What was measured on the output, beside the dense model where that was scored, too."""
    evaluation = (run.summary or {}).get("evaluation", {})
    now, dense = evaluation.get("perplexity") or {}, evaluation.get("dense") or {}
    rows = [
        (label, *(_score(name, scored.get(name)) for scored in (now, *([dense] if dense else []))))
        for name, label in SCORES.items()
        if name in now or name in dense
    ]
    return table("scores", ("", "compressed", *(["dense"] if dense else [])), rows)


def _score(name: str, value: float | str | None) -> str:
    if value is None:
        return ""
    if value == INFINITY:
        return "infinite"
    assert not isinstance(value, str)
    return f"{value:.2%}" if name == "seen" else number(value)


def layers(run: Run) -> str:
    """Every group of every committed layer, and what had to be done for it."""
    rows, methods = [], build_methods(run.manifest)
    for layer, entry in sorted(run.layers.items()):
        stored = run.stored_bytes(layer)
        for group, entered in entry.groups.items():
            report = entered.as_json()
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
    headers = ("layer", "group", "method", "ranks", "notes")
    return table("layers", (*headers, "importance", "bytes", "error", "kept energy", "condition"), rows, words=5)


def predictions(run: Run) -> str:
    """What each choice is predicted to cost, where ranks follow curves."""
    rows = []
    for task, curve in run.curves.items():
        place = chosen_point(run, task)
        if place is not None:
            layer, _, group = read_task_key(task)
            numbers, loss = curve.numbers[place], curve.loss[place]
            rows.append((layer, group, f"{numbers:,}", f"{numbers / curve.numbers[-1]:.4f}", f"{loss:.3e}"))
    return table("predictions", ("layer", "group", "numbers", "kept", "nats per token"), sorted(rows), words=2)


def plan_and_measurement(run: Run) -> str:
    """What `pipeline.plan` says beside what was found; where nothing is measured yet, the plan alone."""
    summary, plan = run.summary or {}, run.plan
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
    rows = [
        (
            name,
            f"{planned:,}",
            f"{found:,}" if found is not None else "",
            f"{found / planned:.3f}" if found and planned else "",
        )
        for name, (planned, found) in pairs.items()
    ]
    return table("plan", ("", "plan", "measured", "measured / plan"), rows)


def seconds(run: Run) -> str:
    """Where the time of the last run went."""
    found = (run.summary or {}).get("seconds", {})
    rows = [(SHOWN.get(name, name), f"{spent:,.1f}") for name, spent in found.get("phases", {}).items()]
    rows += [("total", f"{found['total']:,.1f}")] if "total" in found else []
    return table("seconds", ("", "seconds"), rows)


def units(run: Run) -> str:
    """What the workers did."""
    found = (run.summary or {}).get("seconds", {}).get("units", {})
    rows = [
        (UNITS.get(kind, kind), f"{count:,.0f}", f"{spent:,.1f}", f"{computing / spent:.0%}" if spent else "")
        for kind, (count, spent, computing) in found.items()
    ]
    if rows:
        busy = sum(spent for _, spent, _ in found.values())
        share = compute_share({"units": found})
        rows.append(("all", f"{sum(count for count, _, _ in found.values()):,.0f}", f"{busy:,.1f}", f"{share:.0%}"))
    return table("units", ("unit", "done", "seconds of workers", "inside products"), rows)


def peaks(run: Run) -> str:
    """Memory of each process."""
    found = (run.summary or {}).get("peak_bytes", {})
    rows = [("driver", found["driver"])] if "driver" in found else []
    rows += sorted(found.get("workers", {}).items())
    return table("memory", ("process", "peak MiB"), [(name, f"{size / 2**20:,.0f}") for name, size in rows])


def versions(run: Run) -> str:
    """Of the job, and of what reads it now."""
    rows = [("code of the job", run.fingerprint["code"]), ("dtype", run.fingerprint["dtype"])]
    rows += [("device", run.fingerprint["device"]), ("Python of this report", platform.python_version())]
    rows += [(f"{name} of this report", found) for name in PACKAGES if (found := _version(name))]
    return table("versions", ("", ""), rows, words=2)


def digests(run: Run) -> str:
    """sha256 of what was read and of what was written."""
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
    return table("digests", ("", "name", "bytes", "sha256"), rows, words=2)


def number(value: float) -> str:
    """As a person reads it: whole numbers whole, others to six digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _notes(report: Mapping[str, Any]) -> str:
    """Fallbacks first, then whatever else a method reports."""
    told = ["fallback"] if report.get("fallback") else []
    told += [f"jitter {report['jitter']:.3g}"] if report.get("jitter") else []
    told += [
        f"{name.replace('_', ' ')} {number(value) if isinstance(value, (int, float)) else value}"
        for name, value in report.items()
        if name not in OF_A_GROUP and not name.endswith("spectrum") and value not in (0, False, None)
    ]
    return ", ".join(told)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
