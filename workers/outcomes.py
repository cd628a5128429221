"""Does one unit on a worker: its result or the error for the user, the time and the memory that it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from manifests.errors import LaminaError, WorkerError
from pipeline.units.units import BesideUnit, ShardUnit, Unit
from workers.memory import peak_bytes
from workers.trace import unit_kind, unit_line

if TYPE_CHECKING:
    from workers.worker import Worker


@dataclass(frozen=True)
class Outcome:
    """What came of a unit: a result, or the error that a user should see; and what it took."""

    result: Any
    error: LaminaError | None
    seconds: float
    compute_seconds: float
    peak_bytes: int


def do_unit(worker: Worker, unit: Unit) -> Outcome:
    """Does one unit. Errors for users are part of the outcome; all others are raised."""
    started = time.perf_counter()
    computed = worker.compute_seconds
    result, error = None, None
    try:
        result = worker.execute(unit)
    except LaminaError as raised:
        error = raised
    except torch.OutOfMemoryError as raised:
        error = WorkerError(f"{unit.key}: out of GPU memory; {memory_advice(unit)} ({raised})")
    seconds = time.perf_counter() - started
    computing = 0.0 if isinstance(unit, BesideUnit) else worker.compute_seconds - computed
    return Outcome(result, error, seconds, computing, peak_bytes())


def memory_advice(unit: Unit) -> str:
    """What a unit that does not fit on the GPU is helped by."""
    if isinstance(unit, ShardUnit):
        return "lower calibration.micro_batch"
    return (
        "a solve holds one layer's moments and their factors whatever the micro-batch: give workers a whole GPU "
        "(workers.gpus: 1) or one with more memory; `python -m pipeline.plan` says how much (worker_device_bytes)"
    )


class UnitAccounts:
    """A pool's account of its units.

    Attributes:
        seconds: kind of unit -> [units, seconds, of these in products and decompositions].
        peak_bytes: worker -> its largest memory.
        trace: takes a line for each unit that is done.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peak_bytes: dict[str, int] = {}
        self.trace: Callable[[dict[str, Any]], None] = lambda _: None

    def account(self, worker: str, unit: Unit, outcome: Outcome) -> None:
        """Enters a unit that is done."""
        spent = self.seconds.setdefault(unit_kind(unit), [0, 0.0, 0.0])
        for position, amount in enumerate((1, outcome.seconds, outcome.compute_seconds)):
            spent[position] += amount
        self.peak_bytes[worker] = outcome.peak_bytes
        self.trace(unit_line(unit, outcome, worker))


def result_of(unit: Unit, outcome: Outcome) -> Any:
    """The result of a unit. Raises its error, which then names the unit."""
    if outcome.error is not None:
        outcome.error.unit = unit.key
        raise outcome.error
    return outcome.result
