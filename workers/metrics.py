"""What Prometheus is told of a job, through Ray's metrics: the names, and who counts what.

Ray puts `ray_` before each name and exports them, with its own, on the metrics port of every node. Workers count what
they did; the pool, in the driver's process, counts workers and what went wrong with them. `run` is the name of the run
directory: `job` is a label of Prometheus' own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

import psutil

from pipeline.units.units import ShardDone, Unit
from workers.config import WorkerConfig
from workers.trace import unit_kind

UNIT_SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


@dataclass(frozen=True)
class Metric:
    """A name as Ray is given it; a counter's ends in `_total`. `tags` are those beside `run`."""

    name: str
    kind: Literal["Counter", "Gauge", "Histogram"]
    description: str
    tags: tuple[str, ...] = ()


UNITS = Metric("lamina_units_total", "Counter", "Units that workers have done.", ("kind",))
ERRORS = Metric("lamina_unit_errors_total", "Counter", "Units that ended by an error for the user.", ("kind",))
SECONDS = Metric("lamina_unit_seconds", "Histogram", "Time from a unit's beginning to its end.", ("kind",))
COMPUTE = Metric("lamina_compute_seconds_total", "Counter", "Of this, inside products and decompositions.", ("kind",))
TOKENS = Metric("lamina_tokens_total", "Counter", "Calibration tokens that went through a layer.", ("kind",))
READ = Metric("lamina_read_bytes_total", "Counter", "Bytes that workers read from files and sockets.")
WRITTEN = Metric("lamina_written_bytes_total", "Counter", "Bytes that workers wrote to files and sockets.")
PEAK = Metric("lamina_worker_peak_bytes", "Gauge", "Largest memory of a worker so far: of its device if it has one.")
WORKERS = Metric("lamina_workers", "Gauge", "Workers of the job by state: wanted, ready.", ("state",))
WAITING = Metric("lamina_units_waiting", "Gauge", "Units that no worker has in hand yet.")
LONGEST = Metric("lamina_longest_unit_seconds", "Gauge", "Age of the unit that a worker has had in hand longest.")
DEATHS = Metric("lamina_worker_deaths_total", "Counter", "Workers that died or were lost with their node.")
RETRIES = Metric("lamina_units_retried_total", "Counter", "Units that were in hand of a worker that died.")
PHASE_SECONDS = Metric("lamina_phase_seconds_total", "Counter", "Time in phases in which workers work.", ("phase",))
PHASE_DONE = Metric("lamina_phase_progress", "Gauge", "Share of a phase's forward units that are done.", ("phase",))
OF_WORKERS = (UNITS, ERRORS, SECONDS, COMPUTE, TOKENS, READ, WRITTEN, PEAK)
OF_THE_POOL = (WORKERS, WAITING, LONGEST, DEATHS, RETRIES, PHASE_SECONDS, PHASE_DONE)


class Maker(Protocol):
    """`ray.util.metrics`, which only files that import Ray have."""

    Counter: Any
    Gauge: Any
    Histogram: Any


class Meters:
    """Some metrics of one run in one process."""

    def __init__(self, maker: Maker, metrics: tuple[Metric, ...], run: str) -> None:
        self.made = {metric: _make(maker, metric, run) for metric in metrics}

    def add(self, metric: Metric, amount: float = 1.0, **tags: str) -> None:
        """Counts."""
        if amount > 0:
            self.made[metric].inc(amount, tags)

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        """Says how much there is now."""
        self.made[metric].set(value, tags)

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        """Adds to a histogram."""
        self.made[metric].observe(value, tags)


class WorkerMeters(Meters):
    """What a worker counts after each unit."""

    def __init__(self, maker: Maker, run: str) -> None:
        super().__init__(maker, OF_WORKERS, run)
        self.process = psutil.Process()
        self.moved = self._moved()

    def unit_done(self, unit: Unit, outcome: Any) -> None:
        """`outcome` is the `Outcome` of the unit."""
        kind = unit_kind(unit)
        self.add(UNITS, kind=kind)
        self.add(ERRORS, float(outcome.error is not None), kind=kind)
        self.observe(SECONDS, outcome.seconds, kind=kind)
        self.add(COMPUTE, outcome.compute_seconds, kind=kind)
        if isinstance(outcome.result, ShardDone):
            self.add(TOKENS, outcome.result.tokens, kind=kind)
        before, self.moved = self.moved, self._moved()
        self.add(READ, self.moved[0] - before[0])
        self.add(WRITTEN, self.moved[1] - before[1])
        self.set(PEAK, outcome.peak_bytes)

    def _moved(self) -> tuple[int, int]:
        """Bytes read and written so far; only Linux counts them."""
        if not psutil.LINUX:
            return 0, 0
        counters = self.process.io_counters()
        return counters.read_chars, counters.write_chars


class PoolMeters(Meters):
    """What the pool counts."""

    def __init__(self, maker: Maker, run: str) -> None:
        super().__init__(maker, OF_THE_POOL, run)
        self.told_at = time.monotonic()

    def worker_died(self, units_in_hand: int) -> None:
        """With so many units, which are done again."""
        self.add(DEATHS)
        self.add(RETRIES, units_in_hand)

    def state(self, ready: int, wanted: int, waiting: int, longest_s: float) -> None:
        """How many workers and units there are; how long the oldest of those in hand has been so."""
        self.set(WORKERS, ready, state="ready")
        self.set(WORKERS, wanted, state="wanted")
        self.set(WAITING, waiting)
        self.set(LONGEST, longest_s)

    def progress(self, phase: str, done: int, units: int) -> None:
        """How far a phase is; the time since the last word counts as spent in it."""
        before, self.told_at = self.told_at, time.monotonic()
        self.add(PHASE_SECONDS, self.told_at - before, phase=phase)
        self.set(PHASE_DONE, done / units if units else 0.0, phase=phase)


def _make(maker: Maker, metric: Metric, run: str) -> Any:
    tags = ("run", *metric.tags)
    if metric.kind == "Histogram":
        made = maker.Histogram(metric.name, metric.description, UNIT_SECONDS, tags)
    else:
        made = getattr(maker, metric.kind)(metric.name, metric.description, tags)
    return made.set_default_tags({"run": run})


def run_name(setup: WorkerConfig) -> str:
    """What the metrics and Ray's dashboard call a job: its run directory's name, as Ray takes it, which is in ASCII."""
    name = Path(setup.manifest.run_dir).name if setup.manifest else "evaluation"
    return "".join(letter if letter.isascii() else quote(letter) for letter in name)
