"""The view that a point of a sweep has of the workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.driver.pool_proxy import BusyPool, PoolProxy
from pipeline.sweeping.points import shifted
from pipeline.units.curves import BeginCurve, CurvePieces, Predict
from pipeline.units.units import Measure, Solve, SolveSizes, Unit

TASK_UNITS = (Measure, BeginCurve, CurvePieces, Predict, Solve, SolveSizes)


class PointPool(PoolProxy):
    """Translates a point's method numbers. The workers number the methods of all points; its own begin at `first`."""

    def __init__(self, whole: BusyPool, first: int) -> None:
        super().__init__(whole)
        self.first = first
        self.submitted: dict[str, Unit] = {}  # by the key that the workers know

    def submit(self, unit: Unit) -> None:
        """Submit a unit with the workers' number of its method."""
        translated = replace(unit, task=shifted(unit.task, self.first)) if isinstance(unit, TASK_UNITS) else unit
        self.submitted[translated.key] = unit
        self.whole.submit(translated)

    def wait(self) -> tuple[Unit, Any]:
        """Return the next finished unit, as it was submitted, and its result."""
        unit, result = self.whole.wait()
        return self.submitted.pop(unit.key), result

    def cancel_pending(self) -> None:
        """Wait for all submitted units and discard their results."""
        self.whole.cancel_pending()
        self.submitted.clear()
