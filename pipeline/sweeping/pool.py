"""The workers of a sweep as one of its points sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.job.aside import BusyPool
from pipeline.sweeping.points import shifted
from pipeline.units import BeginCurve, CurvePieces, Measure, Predict, Solve, Unit


@dataclass
class PointPool:
    """See `pipeline.ports.Pool`. The workers count methods through all points; `first` is where the point's begin."""

    whole: BusyPool
    first: int
    given: dict[str, Unit] = field(default_factory=dict)  # by the key that the workers know

    @property
    def size(self) -> int:
        """How many workers there are to keep busy."""
        return self.whole.size

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """Names of the workers that are ready, node by node."""
        return self.whole.nodes

    @property
    def seconds(self) -> dict[str, list[float]]:
        """As the whole pool's."""
        return self.whole.seconds

    @property
    def peak_bytes(self) -> dict[str, int]:
        """As the whole pool's."""
        return self.whole.peak_bytes

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

    def forget(self) -> None:
        """As the whole pool's."""
        self.whole.forget()


OF_TASKS = (Measure, BeginCurve, CurvePieces, Predict, Solve)
