"""Plots over time: committed layers, the units of each worker, tokens, memory, and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from matplotlib.axes import Axes

from pipeline.console.progress import SHOWN
from pipeline.reporting.drawing import DASHES, INK, MARKERS, SERIES, Plot, draw, legend_below
from pipeline.reporting.run_data import Run
from pipeline.units.units import ConcurrentUnit

COMMITTED = {
    "dense": "dense pass",
    "gradient": "gradient pass",
    "curves": "loss curves",
    "measured": "measured weights",
    "statistics": "statistics",
    "layer": "compressed",
}
BACKGROUND = "beside"
BACKGROUND_KINDS = {unit.__name__.lower() for unit in get_args(ConcurrentUnit)}  # of a worker's second thread
WORK = {  # kind of unit -> label and colour of its bars
    **dict.fromkeys(("forward", "pair", "backward"), "passes"),
    **dict.fromkeys(("choosegrids", "collect", "reduce"), "sums"),
    **dict.fromkeys(("measure", "begincurve", "curvepieces", "predict"), "curves"),
    "solve": "solves",
    **dict.fromkeys(("windowforward", "score", "compare"), "scores"),
    **dict.fromkeys(BACKGROUND_KINDS, BACKGROUND),
}
MINUTE_S, HOUR_S = 60.0, 3600.0
GIBI = 2**30
BINS = 80
SHOWN_WORKERS = 32
JOINED = 1 / 400  # gaps below this share of the whole are not drawn


def commits(run: Run) -> list[Plot]:
    """Draw the layers that were committed, by time."""
    times: dict[str, list[float]] = {}
    for time, key in run.commits:
        kind, slash, _ = key.partition("/")
        if kind in COMMITTED and slash:
            times.setdefault(kind, []).append(time)
    if not times:
        return []
    all_times = [time for kind_times in times.values() for time in kind_times]
    start = min(all_times)
    unit_s, unit_name = _time_unit(max(all_times) - start)

    def plot(axes: Axes) -> None:
        for place, kind in enumerate(kind for kind in COMMITTED if kind in times):
            elapsed = [(time - start) / unit_s for time in sorted(times[kind])]
            counts = list(range(1, len(elapsed) + 1))
            (drawn,) = axes.step(elapsed, counts, where="post", label=COMMITTED[kind], color=SERIES[place])
            drawn.set(linestyle=DASHES[place], marker=MARKERS[place], markersize=2.5)
        axes.axhline(run.geometry.num_layers, color=INK, linestyle=":", linewidth=1.0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{unit_name} since the first commit")
        axes.set_ylabel("layers")
        axes.set_title("layers committed")
        legend_below(axes, 3)

    caption = "Time of the latest commit of each layer. A flat stretch is a wait or an interruption."
    return [draw("commits", caption, plot, height_inches=3.1)]


def phases(run: Run) -> list[Plot]:
    """Draw the seconds of each phase."""
    phases = (run.summary or {}).get("seconds", {}).get("phases", {})
    if not phases:
        return []

    def plot(axes: Axes) -> None:
        names = list(phases)[::-1]
        labels, lengths = [SHOWN.get(name, name) for name in names], [phases[name] for name in names]
        bars = axes.barh(labels, lengths, color=SERIES[0], height=0.6)
        axes.bar_label(bars, [f"{length:,.1f}" for length in lengths], padding=3, color=INK, fontsize=8.5)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.15)
        axes.set_xlabel("seconds")
        axes.set_title("seconds by phase")

    return [draw("phases", "Wall time of the last run, by phase.", plot, 1.0 + 0.28 * len(phases))]


def timeline(run: Run) -> list[Plot]:
    """Draw the units of each worker, by time."""
    if not run.units:
        return []
    start, span_s = _span(run.units)
    unit_s, unit_name = _time_unit(span_s)
    workers = sorted({line["worker"] for line in run.units})
    units = [{**line, "kind": WORK.get(line["kind"], line["kind"])} for line in run.units]
    kinds = dict.fromkeys([*WORK.values(), *sorted(line["kind"] for line in units)])

    def plot(axes: Axes) -> None:
        for kind_place, kind in enumerate(kinds):
            for place, worker in enumerate(workers[:SHOWN_WORKERS]):
                bars = joined_bars(units, worker, kind, start, span_s * JOINED)
                drawn = [(begin / unit_s, length / unit_s) for begin, length in bars]
                label = kind if place == 0 and any(line["kind"] == kind for line in units) else None
                row = (place + 0.15, 0.25) if kind == BACKGROUND else (place - 0.4, 0.8)
                axes.broken_barh(drawn, row, color=SERIES[kind_place % len(SERIES)], label=label)
        rows = min(len(workers), SHOWN_WORKERS)
        axes.set_yticks(range(rows), workers[:SHOWN_WORKERS])
        axes.set_ylim(rows - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{unit_name} since the first unit of the last run")
        axes.set_title("workers")
        legend_below(axes, 4)

    busy_s = sum(line["seconds"] for line in run.units if line["kind"] not in BACKGROUND_KINDS)
    idle = max(0.0, 1 - busy_s / (span_s * len(workers)))
    caption = (
        "Units of each worker. Narrow bars are sums and writes in its second thread. A gap is idle time "
        f"({idle:.0%} of the time from first to last unit)."
    )
    return [draw("timeline", caption, plot, 1.6 + 0.2 * min(len(workers), SHOWN_WORKERS))]


def joined_bars(
    units: Sequence[Mapping[str, Any]], worker: str, kind: str, start: float, gap: float
) -> list[tuple[float, float]]:
    """Return (begin, length) of a worker's units of a kind, in seconds after `start`.

    Units that are at most `gap` seconds apart become one bar.
    """
    spans = sorted(
        (line["ended"] - line["seconds"] - start, line["ended"] - start)
        for line in units
        if line["worker"] == worker and line["kind"] == kind
    )
    bars: list[tuple[float, float]] = []
    for begin, end in spans:
        if bars and begin - sum(bars[-1]) <= gap:
            first = bars[-1][0]
            bars[-1] = (first, max(end, sum(bars[-1])) - first)
        else:
            bars.append((begin, end - begin))
    return bars


def tokens(run: Run) -> list[Plot]:
    """Draw the calibration tokens per second, by time."""
    if not any(line["tokens"] for line in run.units):
        return []
    start, span_s = _span(run.units)
    unit_s, unit_name = _time_unit(span_s)
    bin_s = span_s / BINS
    rates = [0.0] * BINS
    for line in run.units:
        rates[min(int((line["ended"] - start) / bin_s), BINS - 1)] += line["tokens"] / bin_s

    def plot(axes: Axes) -> None:
        axes.step([place * bin_s / unit_s for place in range(BINS)], rates, where="post", color=SERIES[0])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"{unit_name} since the first unit of the last run")
        axes.set_ylabel("tokens / s")
        axes.set_title("tokens per second")

    return [draw("tokens", "Calibration tokens per second through a layer, of all workers together.", plot)]


def memory(run: Run) -> list[Plot]:
    """Draw the largest memory of a worker, by time."""
    if not run.units:
        return []
    start, span_s = _span(run.units)
    unit_s, unit_name = _time_unit(span_s)
    times, highest = [0.0], [0.0]
    for line in run.units:
        if line["peak_bytes"] / GIBI > highest[-1]:
            times.append(max(0.0, line["ended"] - start) / unit_s)
            highest.append(line["peak_bytes"] / GIBI)

    def plot(axes: Axes) -> None:
        axes.step([*times, span_s / unit_s], [*highest, highest[-1]], where="post", color=SERIES[0], label="measured")
        planned = run.plan.worker_peak_bytes / GIBI
        axes.axhline(planned, color=INK, linestyle="--", linewidth=1.0, label="plan")
        axes.set_ylim(0, 1.1 * max(planned, highest[-1]))
        axes.set_xlabel(f"{unit_name} since the first unit of the last run")
        axes.set_ylabel("GiB")
        axes.set_title("largest memory of a worker")
        axes.legend(loc="lower right")

    return [draw("memory", "The largest memory of any worker so far, beside the plan's.", plot)]


def _span(units: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the time at which the first unit began, and the seconds until the last one ended."""
    start = min(line["ended"] - line["seconds"] for line in units)
    return start, max(max(line["ended"] for line in units) - start, 1e-9)


def _time_unit(span_s: float) -> tuple[float, str]:
    """Return the length in seconds and the name of a unit in which a time span is a small number."""
    if span_s > 3 * HOUR_S:
        return HOUR_S, "hours"
    return (MINUTE_S, "minutes") if span_s > 3 * MINUTE_S else (1.0, "seconds")
