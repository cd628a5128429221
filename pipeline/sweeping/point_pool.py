"""Gives a point of a sweep its view of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.driver.interfaces import BusyPool
from pipeline.sweeping.points import shifted
from pipeline.units.curves import BeginCurve, CurvePieces, Predict
from pipeline.units.units import Measure, Refine, Solve, SolveSizes, Unit

TASK_UNITS = (Measure, BeginCurve, CurvePieces, Predict, Solve, SolveSizes)


class PointPool:
    """A pool that translates method numbers: the workers number the methods of all points, and this point's begin at
    `first`."""

    def __init__(self, whole: BusyPool, first: int) -> None:
        self.whole = whole
        self.first = first
        self.submitted: dict[str, Unit] = {}  # by the key that the workers know

    @property
    def size(self) -> int:
        """The number of workers that are ready."""
        return self.whole.size

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """The names of the workers that are ready, node by node."""
        return self.whole.nodes

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Kind of unit -> [units, seconds, seconds inside products]."""
        return self.whole.seconds

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Worker -> peak bytes."""
        return self.whole.peak_bytes

    def forget(self) -> None:
        """Make workers drop all hidden states."""
        self.whole.forget()

    def submit(self, unit: Unit) -> None:
        """Submit a unit with the workers' number of its method."""
        translated = self._translated(unit)
        self.submitted[translated.key] = unit
        self.whole.submit(translated)

    def _translated(self, unit: Unit) -> Unit:
        if isinstance(unit, Refine):
            groups = (replace(group, task=shifted(group.task, self.first)) for group in unit.groups)
            return replace(unit, groups=tuple(groups))
        return replace(unit, task=shifted(unit.task, self.first)) if isinstance(unit, TASK_UNITS) else unit

    def wait(self) -> tuple[Unit, Any]:
        """Return the next finished unit, as it was submitted, and its result."""
        unit, result = self.whole.wait()
        return self.submitted.pop(unit.key), result

    def cancel_pending(self) -> None:
        """Wait for all submitted units and discard their results."""
        self.whole.cancel_pending()
        self.submitted.clear()
