"""The data of figures over time: committed layers, the units of each worker, tokens, memory, and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pipeline.console.progress import SHOWN
from pipeline.reporting.run_data import Data, Run, single
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

Unit = Mapping[str, Any]
Bar = tuple[float, float]  # begin, length


class Steps(NamedTuple):
    """A value from each time on; and the planned value, if there is one."""

    times: Sequence[float]
    values: Sequence[float]
    planned: float | None = None


def commits(run: Run) -> Data[dict[str, list[float]]]:
    """Return kind of work -> the times at which its layers were committed."""
    times: dict[str, list[float]] = {}
    for time, key in sorted(run.commits):
        kind, slash, _ = key.partition("/")
        if kind in COMMITTED and slash:
            times.setdefault(kind, []).append(time)
    if not times:
        return []
    start, end = min(map(min, times.values())), max(map(max, times.values()))
    unit_s, unit = _time_unit(end - start)
    elapsed = {
        label: [(time - start) / unit_s for time in times[kind]] for kind, label in COMMITTED.items() if kind in times
    }
    return [(elapsed, {"unit": unit})]


def timeline(run: Run) -> Data[dict[str, dict[str, list[Bar]]]]:
    """Return worker -> kind of work -> its bars, of the first workers."""
    if not run.units:
        return []
    start, span_s, unit_s, words = _span(run.units)
    units = [{**line, "kind": WORK.get(line["kind"], line["kind"])} for line in run.units]
    kinds = dict.fromkeys([*WORK.values(), *sorted(line["kind"] for line in units)])
    workers = sorted({line["worker"] for line in units})
    bars = {
        worker: {
            kind: [(begin / unit_s, length / unit_s) for begin, length in joined]
            for kind in kinds
            for joined in [joined_bars(units, worker, kind, start, span_s * JOINED)]
        }
        for worker in workers[:SHOWN_WORKERS]
    }
    busy_s = sum(line["seconds"] for line in run.units if line["kind"] not in BACKGROUND_KINDS)
    return [(bars, {**words, "idle": f"{max(0.0, 1 - busy_s / (span_s * len(workers))):.0%}"})]


def joined_bars(units: Sequence[Unit], worker: str, kind: str, start: float, gap: float) -> list[Bar]:
    """Return the bars of a worker's units of a kind, in seconds after `start`.

    Units that are at most `gap` seconds apart become one bar.
    """
    spans = sorted(
        (line["ended"] - line["seconds"] - start, line["ended"] - start)
        for line in units
        if line["worker"] == worker and line["kind"] == kind
    )
    bars: list[Bar] = []
    for begin, end in spans:
        if bars and begin - sum(bars[-1]) <= gap:
            first = bars[-1][0]
            bars[-1] = (first, max(end, sum(bars[-1])) - first)
        else:
            bars.append((begin, end - begin))
    return bars


def tokens(run: Run) -> Data[Steps]:
    """Return the calibration tokens per second."""
    if not any(line["tokens"] for line in run.units):
        return []
    start, span_s, unit_s, words = _span(run.units)
    bin_s = span_s / BINS
    rates = [0.0] * BINS
    for line in run.units:
        rates[min(int((line["ended"] - start) / bin_s), BINS - 1)] += line["tokens"] / bin_s
    return [(Steps([place * bin_s / unit_s for place in range(BINS)], rates), words)]


def memory(run: Run) -> Data[Steps]:
    """Return the largest memory of a worker so far, in GiB."""
    if not run.units:
        return []
    start, span_s, unit_s, words = _span(run.units)
    times, highest = [0.0], [0.0]
    for line in run.units:
        if line["peak_bytes"] / GIBI > highest[-1]:
            times.append(max(0.0, line["ended"] - start) / unit_s)
            highest.append(line["peak_bytes"] / GIBI)
    steps = Steps([*times, span_s / unit_s], [*highest, highest[-1]], run.plan.worker_peak_bytes / GIBI)
    return [(steps, words)]


def phases(run: Run) -> Data[dict[str, float]]:
    """Return the seconds of each phase."""
    seconds = run.summary.get("seconds", {}).get("phases", {})
    return single({SHOWN.get(name, name): spent for name, spent in seconds.items()})


def _span(units: Sequence[Unit]) -> tuple[float, float, float, dict[str, str]]:
    """Return the time at which the first unit began, the seconds until the last one ended, and the seconds and the
    name of a unit of time for them."""
    start = min(line["ended"] - line["seconds"] for line in units)
    span_s = max(max(line["ended"] for line in units) - start, 1e-9)
    unit_s, unit = _time_unit(span_s)
    return start, span_s, unit_s, {"unit": unit}


def _time_unit(span_s: float) -> tuple[float, str]:
    """Return the length in seconds and the name of a unit in which a time span is a small number."""
    if span_s > 3 * HOUR_S:
        return HOUR_S, "hours"
    return (MINUTE_S, "minutes") if span_s > 3 * MINUTE_S else (1.0, "seconds")
