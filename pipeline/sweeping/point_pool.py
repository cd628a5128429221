"""The workers of a sweep as one of its points sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.driver.pool_proxy import BusyPool, PoolProxy
from pipeline.sweeping.points import shifted
from pipeline.units.curves import BeginCurve, CurvePieces, Predict
from pipeline.units.units import Measure, Solve, SolveSizes, Unit


class PointPool(PoolProxy):
    """The workers count methods through all points; `first` is where the point's begin."""

    def __init__(self, whole: BusyPool, first: int) -> None:
        super().__init__(whole)
        self.first = first
        self.given: dict[str, Unit] = {}  # by the key that the workers know

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""
        there = replace(unit, task=shifted(unit.task, self.first)) if isinstance(unit, OF_TASKS) else unit
        self.given[there.key] = unit
        self.whole.submit(there)

    def wait(self) -> tuple[Unit, Any]:
        """The next finished unit, as it was submitted, and its result."""
        unit, result = self.whole.wait()
        return self.given.pop(unit.key), result

    def cancel_pending(self) -> None:
        """Waits for everything submitted and forgets the results."""
        self.whole.cancel_pending()
        self.given.clear()


OF_TASKS = (Measure, BeginCurve, CurvePieces, Predict, Solve, SolveSizes)
