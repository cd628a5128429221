"""The pool of a job, and a unit that is done while others are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.ports import Pool
from pipeline.units import Unit


class BusyPool(Pool, Protocol):
    """A pool that knows what its workers took."""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """As `Effort.units`."""
        ...

    @property
    def peak_bytes(self) -> dict[str, int]:
        """By worker."""
        ...


class Aside:
    """A pool as `pipeline.ports.Pool` has it, in which one unit is under way besides: its result is set aside."""

    def __init__(self, whole: BusyPool, unit: Unit) -> None:
        self.whole = whole
        self.unit = unit
        self.found: list[Any] = []
        whole.submit(unit)

    def result(self) -> Any:
        """The unit's result, when nothing else is waited for. Raises what it raised."""
        while not self.found:
            self.found.append(self.whole.wait()[1])
        return self.found[0]

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
        self.whole.submit(unit)

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

    def forget(self) -> None:
        """As the whole pool's."""
        self.whole.forget()
