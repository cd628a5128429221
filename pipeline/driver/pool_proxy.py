"""Proxies of a job's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.driver.interfaces import Pool
from pipeline.units.units import Unit


class BusyPool(Pool, Protocol):
    """A pool that counts the time and memory of its workers."""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """As `Effort.units`."""
        ...

    @property
    def peak_bytes(self) -> dict[str, int]:
        """By worker."""
        ...


class PoolProxy:
    """Forwards every call to another pool, `whole`; subclasses change some of them."""

    def __init__(self, whole: BusyPool) -> None:
        self.whole = whole

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
        """Forwards to the whole pool."""
        return self.whole.seconds

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Forwards to the whole pool."""
        return self.whole.peak_bytes

    def submit(self, unit: Unit) -> None:
        """Queues a unit."""
        self.whole.submit(unit)

    def wait(self) -> tuple[Unit, Any]:
        """The next finished unit, and its result."""
        return self.whole.wait()

    def cancel_pending(self) -> None:
        """Waits for everything submitted and forgets the results."""
        self.whole.cancel_pending()

    def forget(self) -> None:
        """Forwards to the whole pool."""
        self.whole.forget()
