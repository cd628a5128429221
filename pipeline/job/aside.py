"""A unit that is done while others are waited for."""

from __future__ import annotations

from typing import Any

from pipeline.job.pool_around import BusyPool, PoolAround
from pipeline.units import Unit


class Aside(PoolAround):
    """A pool in which one unit is under way besides: its result is set aside."""

    def __init__(self, whole: BusyPool, unit: Unit) -> None:
        super().__init__(whole)
        self.unit = unit
        self.found: list[Any] = []
        whole.submit(unit)

    def result(self) -> Any:
        """The unit's result, when nothing else is waited for. Raises what it raised."""
        while not self.found:
            self.found.append(self.whole.wait()[1])
        return self.found[0]

    def wait(self) -> tuple[Unit, Any]:
        """The next finished unit but the one aside, and its result. Raises what either raised."""
        while True:
            unit, result = self.whole.wait()
            if unit.key != self.unit.key:
                return unit, result
            self.found.append(result)

    def cancel_pending(self) -> None:
        """Waits for everything submitted and forgets the results; the unit aside is begun again, unless it is done."""
        self.whole.cancel_pending()
        if not self.found:
            self.whole.submit(self.unit)
