"""Runs one unit on a worker and reports its outcome: a result or an error for the user, the time and the memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from manifests.errors import LaminaError, WorkerError
from pipeline.units.units import ConcurrentUnit, ShardDone, ShardUnit, Unit
from workers.memory import peak_bytes

if TYPE_CHECKING:
    from workers.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result or error of a unit, with its cost.

    `compute_seconds`: time inside products and decompositions. `peak_bytes`: the worker's largest memory so far.
    """

    result: Any
    error: LaminaError | None
    seconds: float
    compute_seconds: float
    peak_bytes: int


def do_unit(worker: Worker, unit: Unit) -> Outcome:
    """Run one unit. Errors for users become part of the outcome; all others are raised."""
    started = time.perf_counter()
    compute_before = worker.compute_seconds
    result, error = _attempt(unit, lambda: worker.execute(unit))
    seconds = time.perf_counter() - started
    compute_seconds = 0.0 if isinstance(unit, ConcurrentUnit) else worker.compute_seconds - compute_before
    return Outcome(result, error, seconds, compute_seconds, peak_bytes())


def finish_deferred(unit: Unit, outcome: Outcome, compute: Callable[[], T]) -> tuple[Outcome, T | None]:
    """Compute a deferred part of a unit's result. Return the outcome, with its time or its error, and the part."""
    started = time.perf_counter()
    with torch.inference_mode():
        part, error = _attempt(unit, compute)
    seconds = outcome.seconds + time.perf_counter() - started
    result = outcome.result if error is None else None
    return replace(outcome, result=result, error=error, seconds=seconds, peak_bytes=peak_bytes()), part


def _attempt(unit: Unit, run: Callable[[], T]) -> tuple[T | None, LaminaError | None]:
    """Return a result, or an error for the user."""
    try:
        return run(), None
    except LaminaError as raised:
        return None, raised
    except torch.OutOfMemoryError as raised:
        return None, WorkerError(f"{unit.key}: out of GPU memory; {memory_advice(unit)} ({raised})")


def memory_advice(unit: Unit) -> str:
    """Return advice for a unit that does not fit on the GPU."""
    if isinstance(unit, ShardUnit):
        return "lower calibration.micro_batch"
    return (
        "a solve holds one layer's moments and their factors whatever the micro-batch: give workers a whole GPU "
        "(workers.gpus: 1) or one with more memory; `python -m pipeline.plan` shows the need (worker_device_bytes)"
    )


def result_of(unit: Unit, outcome: Outcome) -> Any:
    """Return the result of a unit, or raise its error with the unit's name."""
    if outcome.error is not None:
        outcome.error.unit = unit.key
        raise outcome.error
    return outcome.result


def unit_kind(unit: Unit) -> str:
    """Return the kind of a unit as logs, metrics and the summary name it: forward, reduce, solve, …"""
    return type(unit).__name__.lower()


class UnitAccounts:
    """Adds up the cost of a pool's units.

    Attributes:
        seconds: kind of unit -> [units, seconds, seconds inside products and decompositions].
        peak_bytes: worker -> its peak memory.
        trace: called with the log line of each finished unit.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peak_bytes: dict[str, int] = {}
        self.trace: Callable[[dict[str, Any]], None] = lambda _: None

    def account(self, worker: str, unit: Unit, outcome: Outcome) -> None:
        """Add a finished unit."""
        totals = self.seconds.setdefault(unit_kind(unit), [0, 0.0, 0.0])
        for position, amount in enumerate((1, outcome.seconds, outcome.compute_seconds)):
            totals[position] += amount
        self.peak_bytes[worker] = outcome.peak_bytes
        self.trace(_log_line(worker, unit, outcome))


def _log_line(worker: str, unit: Unit, outcome: Outcome) -> dict[str, Any]:
    """Return the line of the log of units for a unit that has just finished."""
    return {
        "unit": unit.key,
        "kind": unit_kind(unit),
        "layer": getattr(getattr(unit, "task", unit), "layer", None),
        "shard": getattr(unit, "shard", None),
        "worker": worker,
        "ended": time.time(),
        "seconds": outcome.seconds,
        "compute_seconds": outcome.compute_seconds,
        "peak_bytes": outcome.peak_bytes,
        "tokens": outcome.result.tokens if isinstance(outcome.result, ShardDone) else 0,
        "error": str(outcome.error) if outcome.error is not None else None,
    }
