"""Metrics of a job for Prometheus, through Ray: their names, and the counters of workers and of the pool.

Ray adds the prefix `ray_` to each name and exports the metrics, with its own, on the metrics port of every node.
Workers count their units. The pool, in the driver's process, counts workers and their failures. The label `run` is the
name of the run directory, because Prometheus itself uses the label `job`.
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
from workers.outcomes import Outcome, unit_kind

UNIT_SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


@dataclass(frozen=True)
class Metric:
    """A metric: its name for Ray, which ends in `_total` for a counter, and its tags besides `run`."""

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
WAITING = Metric("lamina_units_waiting", "Gauge", "Units that wait for a worker.")
LONGEST = Metric("lamina_longest_unit_seconds", "Gauge", "Age of the unit that has run longest.")
DEATHS = Metric("lamina_worker_deaths_total", "Counter", "Workers that died or were lost with their node.")
RETRIES = Metric("lamina_units_retried_total", "Counter", "Units of workers that died, which run again.")
PHASE_SECONDS = Metric("lamina_phase_seconds_total", "Counter", "Time in phases in which workers work.", ("phase",))
PHASE_DONE = Metric("lamina_phase_progress", "Gauge", "Share of a phase's forward units that are done.", ("phase",))
OF_WORKERS = (UNITS, ERRORS, SECONDS, COMPUTE, TOKENS, READ, WRITTEN, PEAK)
OF_THE_POOL = (WORKERS, WAITING, LONGEST, DEATHS, RETRIES, PHASE_SECONDS, PHASE_DONE)


class MetricsModule(Protocol):
    """The module `ray.util.metrics`, passed by files that import Ray."""

    Counter: Any
    Gauge: Any
    Histogram: Any


class Meters:
    """Some metrics of one run in one process."""

    def __init__(self, module: MetricsModule, metrics: tuple[Metric, ...], run: str) -> None:
        self.by_metric = {metric: _create(module, metric, run) for metric in metrics}

    def add(self, metric: Metric, amount: float = 1.0, **tags: str) -> None:
        """Increase a counter."""
        if amount > 0:
            self.by_metric[metric].inc(amount, tags)

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        """Set a gauge."""
        self.by_metric[metric].set(value, tags)

    def observe(self, metric: Metric, value: float, **tags: str) -> None:
        """Add a value to a histogram."""
        self.by_metric[metric].observe(value, tags)


class WorkerMeters(Meters):
    """Metrics that a worker updates after each unit."""

    def __init__(self, module: MetricsModule, run: str) -> None:
        super().__init__(module, OF_WORKERS, run)
        self.process = psutil.Process()
        self.io_bytes = self._io_bytes()

    def unit_done(self, unit: Unit, outcome: Outcome) -> None:
        """Count a unit that has finished."""
        kind = unit_kind(unit)
        self.add(UNITS, kind=kind)
        self.add(ERRORS, float(outcome.error is not None), kind=kind)
        self.observe(SECONDS, outcome.seconds, kind=kind)
        self.add(COMPUTE, outcome.compute_seconds, kind=kind)
        if isinstance(outcome.result, ShardDone):
            self.add(TOKENS, outcome.result.tokens, kind=kind)
        before, self.io_bytes = self.io_bytes, self._io_bytes()
        self.add(READ, self.io_bytes[0] - before[0])
        self.add(WRITTEN, self.io_bytes[1] - before[1])
        self.set(PEAK, outcome.peak_bytes)

    def _io_bytes(self) -> tuple[int, int]:
        """Return the bytes that this process has read and written; only Linux counts them."""
        if not psutil.LINUX:
            return 0, 0
        counters = self.process.io_counters()
        return counters.read_chars, counters.write_chars


class PoolMeters(Meters):
    """Metrics that the pool updates in the driver's process."""

    def __init__(self, module: MetricsModule, run: str) -> None:
        super().__init__(module, OF_THE_POOL, run)
        self.updated_at = time.monotonic()

    def worker_died(self, lost_units: int) -> None:
        """Count a dead worker and the units that run again."""
        self.add(DEATHS)
        self.add(RETRIES, lost_units)

    def state(self, ready: int, target: int, waiting: int, longest_s: float) -> None:
        """Set the numbers of workers and waiting units, and the age of the unit that has run longest."""
        self.set(WORKERS, ready, state="ready")
        self.set(WORKERS, target, state="wanted")
        self.set(WAITING, waiting)
        self.set(LONGEST, longest_s)

    def progress(self, phase: str, finished: int, units: int) -> None:
        """Set a phase's progress, and add the time since the last call to the phase."""
        before, self.updated_at = self.updated_at, time.monotonic()
        self.add(PHASE_SECONDS, self.updated_at - before, phase=phase)
        self.set(PHASE_DONE, finished / units if units else 0.0, phase=phase)


def _create(module: MetricsModule, metric: Metric, run: str) -> Any:
    tags = ("run", *metric.tags)
    if metric.kind == "Histogram":
        metric_object = module.Histogram(metric.name, metric.description, UNIT_SECONDS, tags)
    else:
        metric_object = getattr(module, metric.kind)(metric.name, metric.description, tags)
    return metric_object.set_default_tags({"run": run})


def run_name(setup: WorkerConfig) -> str:
    """Return a job's name in metrics and Ray's dashboard: that of its run directory, in ASCII as Ray requires."""
    name = Path(setup.manifest.run_dir).name if setup.manifest else "evaluation"
    return "".join(letter if letter.isascii() else quote(letter) for letter in name)
