"""The plots of when: layers committed, what each worker did, tokens, memory, and the phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from matplotlib.axes import Axes

from pipeline.console.progress import SHOWN
from pipeline.reporting.drawing import DASHES, INK, MARKERS, MUTED, SERIES, Plot, draw, legend_below
from pipeline.reporting.run_data import Run
from pipeline.units.units import BesideUnit

COMMITTED = {
    "dense": "dense pass",
    "gradient": "gradient pass",
    "curves": "loss curves",
    "measured": "measured weights",
    "statistics": "statistics",
    "layer": "compressed",
}
ASIDE = "beside"
BESIDE = {unit.__name__.lower() for unit in get_args(BesideUnit)}  # kinds that a worker's second thread does
WORK = {  # what units of a kind are drawn as: a colour for each
    **dict.fromkeys(("forward", "pair", "backward"), "passes"),
    **dict.fromkeys(("choosegrids", "collect", "reduce"), "sums"),
    **dict.fromkeys(("measure", "begincurve", "curvepieces", "predict"), "curves"),
    "solve": "solves",
    **dict.fromkeys(("windowforward", "score", "compare"), "scores"),
    **dict.fromkeys(BESIDE, ASIDE),
}
MINUTE_S, HOUR_S = 60.0, 3600.0
BINS = 80
SHOWN_WORKERS = 32
JOINED = 1 / 400  # gaps below this share of the whole are not drawn


def time_plots(run: Run) -> list[Plot]:
    """In the order of the page."""
    plots = [_commits(run), _timeline(run), _tokens(run), _memory(run), _phases(run)]
    return [plot for plot in plots if plot is not None]


def _commits(run: Run) -> Plot | None:
    times: dict[str, list[float]] = {}
    for when, key in run.commits:
        if key.split("/")[0] in COMMITTED and "/" in key:
            times.setdefault(key.split("/")[0], []).append(when)
    if not times:
        return None
    start = min(when for found in times.values() for when in found)
    span = max(when for found in times.values() for when in found) - start
    unit, name = _time_unit(span)

    def plot(axes: Axes) -> None:
        for place, kind in enumerate(kind for kind in COMMITTED if kind in times):
            passed = [(when - start) / unit for when in sorted(times[kind])]
            counts = list(range(1, len(passed) + 1))
            (drawn,) = axes.step(passed, counts, where="post", label=COMMITTED[kind], color=SERIES[place])
            drawn.set(linestyle=DASHES[place], marker=MARKERS[place], markersize=2.5)
        axes.axhline(run.geometry.num_layers, color=MUTED, linestyle=":", linewidth=1.0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{name} since the first commit")
        axes.set_ylabel("layers")
        axes.set_title("layers committed")
        legend_below(axes, 3)

    told = "When each layer was committed, the last time it was: a flat stretch is a wait or an interruption."
    return Plot("time", draw("commits", plot, height_inches=3.1), told)


def _phases(run: Run) -> Plot | None:
    phases = (run.summary or {}).get("seconds", {}).get("phases", {})
    if not phases:
        return None

    def plot(axes: Axes) -> None:
        names = list(phases)[::-1]
        labels, lengths = [SHOWN.get(name, name) for name in names], [phases[name] for name in names]
        bars = axes.barh(labels, lengths, color=SERIES[0], height=0.6)
        axes.bar_label(bars, [f"{phases[name]:,.1f}" for name in names], padding=3, color=INK, fontsize=8.5)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.15)
        axes.set_xlabel("seconds")
        axes.set_title("seconds by phase")

    told = "Wall time of the last run, by phase."
    return Plot("time", draw("phases", plot, height_inches=1.0 + 0.28 * len(phases)), told)


def _timeline(run: Run) -> Plot | None:
    if not run.units:
        return None
    start, span = _span(run.units)
    unit, name = _time_unit(span)
    workers = sorted({line["worker"] for line in run.units})[:SHOWN_WORKERS]
    units = [{**line, "kind": WORK.get(line["kind"], line["kind"])} for line in run.units]
    kinds = dict.fromkeys([*WORK.values(), *sorted(line["kind"] for line in units)])

    def plot(axes: Axes) -> None:
        for kind_place, kind in enumerate(kinds):
            for place, worker in enumerate(workers):
                bars = joined_bars(units, worker, kind, start, span * JOINED)
                drawn = [(begin / unit, length / unit) for begin, length in bars]
                label = kind if place == 0 and any(line["kind"] == kind for line in units) else None
                row = (place + 0.15, 0.25) if kind == ASIDE else (place - 0.4, 0.8)
                axes.broken_barh(drawn, row, color=SERIES[kind_place % len(SERIES)], label=label)
        axes.set_yticks(range(len(workers)), workers)
        axes.set_ylim(len(workers) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{name} since the first unit of the last run")
        axes.set_title("workers")
        legend_below(axes, 4)

    busy = sum(line["seconds"] for line in run.units if line["kind"] not in BESIDE)
    idle = 1 - busy / (span * len({line["worker"] for line in run.units}) or 1)
    share = f"{max(0.0, idle):.0%} of the time from first to last unit"
    told = f"What each worker did, narrow what it added and wrote beside; a gap is idle time ({share})."
    return Plot("time", draw("timeline", plot, height_inches=1.6 + 0.2 * len(workers)), told)


def joined_bars(
    units: Sequence[Mapping[str, Any]], worker: str, kind: str, start: float, gap: float
) -> list[tuple[float, float]]:
    """(begin, length) in seconds after `start` of a worker's units of a kind; those that all but touch are one."""
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


def _tokens(run: Run) -> Plot | None:
    if not any(line["tokens"] for line in run.units):
        return None
    start, span = _span(run.units)
    unit, name = _time_unit(span)
    width = span / BINS or 1.0
    rates = [0.0] * BINS
    for line in run.units:
        rates[min(int((line["ended"] - start) / width), BINS - 1)] += line["tokens"] / width

    def plot(axes: Axes) -> None:
        axes.step([place * width / unit for place in range(BINS)], rates, where="post", color=SERIES[0])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"{name} since the first unit of the last run")
        axes.set_ylabel("tokens / s")
        axes.set_title("tokens per second")

    return Plot("time", draw("tokens", plot), "Calibration tokens that went through a layer, all workers together.")


def _memory(run: Run) -> Plot | None:
    if not run.units:
        return None
    start, span = _span(run.units)
    unit, name = _time_unit(span)
    gibi = 2**30
    seen: dict[str, float] = {}
    times, highest = [0.0], [0.0]
    for line in run.units:
        seen[line["worker"]] = line["peak_bytes"] / gibi
        if max(seen.values()) > highest[-1]:
            times.append(max(0.0, line["ended"] - start) / unit)
            highest.append(max(seen.values()))

    def plot(axes: Axes) -> None:
        axes.step([*times, span / unit], [*highest, highest[-1]], where="post", color=SERIES[0], label="measured")
        planned = run.plan.worker_peak_bytes / gibi
        axes.axhline(planned, color=MUTED, linestyle="--", linewidth=1.0, label="plan")
        axes.set_ylim(0, 1.1 * max(planned, highest[-1]))
        axes.set_xlabel(f"{name} since the first unit of the last run")
        axes.set_ylabel("GiB")
        axes.set_title("largest memory of a worker")
        axes.legend(loc="lower right")

    return Plot("time", draw("memory", plot), "The largest memory that any worker has had, beside the plan's.")


def _span(units: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """When the first unit began, and the seconds until the last one ended."""
    start = min(line["ended"] - line["seconds"] for line in units)
    return start, max(max(line["ended"] for line in units) - start, 1e-9)


def _time_unit(span_s: float) -> tuple[float, str]:
    """Seconds in what a span is best told in."""
    if span_s > 3 * HOUR_S:
        return HOUR_S, "hours"
    return (MINUTE_S, "minutes") if span_s > 3 * MINUTE_S else (1.0, "seconds")
