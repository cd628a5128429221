"""The pool's record of a worker: its actor, the shards that it holds, the units that it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.units.sums import Collect
from pipeline.units.units import ConcurrentUnit, Unit
from workers.placement import Shard


@dataclass
class Member:
    """A worker of the pool.

    `ready`: the reference whose value the actor returns when it has started.
    """

    actor: Any
    ready: Any
    live: bool = False
    where: dict[str, Any] = field(default_factory=dict)
    shards: set[Shard] = field(default_factory=set)
    running: dict[Any, Unit] = field(default_factory=dict)
    tensors: dict[Any, list[Any]] = field(default_factory=dict)  # the tensors that a running unit will return
    started_at: dict[Any, float] = field(default_factory=dict)  # by the clock of `time.monotonic`
    leaving: bool = False  # receives no more units, and ends after its last
    sums: set[str] = field(default_factory=set)  # passes whose sums it holds until they are collected

    @property
    def name(self) -> str:
        """The worker's name, once it is ready."""
        return str(self.where.get("worker", ""))

    @property
    def idle(self) -> bool:
        """True if the worker runs no unit, or only `ConcurrentUnit`s."""
        return self.unit_count(beside=False) == 0

    def unit_count(self, beside: bool) -> int:
        """Return how many `ConcurrentUnit`s, or how many other units, the worker has; `Collect` units do not count."""
        running = (unit for unit in self.running.values() if not isinstance(unit, Collect))
        return sum(isinstance(unit, ConcurrentUnit) == beside for unit in running)
