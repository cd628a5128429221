"""A unit that has been done, as the log of units and the metrics name it."""

from __future__ import annotations

import time
from typing import Any

from pipeline.units.units import ShardDone, Unit


def unit_kind(unit: Unit) -> str:
    """forward, reduce, solve, …: as the summary names them."""
    return type(unit).__name__.lower()


def unit_line(unit: Unit, outcome: Any, worker: str) -> dict[str, Any]:
    """A unit that has just been done, as the log of units has it."""
    return {
        "unit": unit.key,
        "kind": unit_kind(unit),
        "layer": _layer(unit),
        "shard": getattr(unit, "shard", None),
        "worker": worker,
        "ended": time.time(),
        "seconds": outcome.seconds,
        "compute_seconds": outcome.compute_seconds,
        "peak_bytes": outcome.peak_bytes,
        "tokens": outcome.result.tokens if isinstance(outcome.result, ShardDone) else 0,
        "error": str(outcome.error) if outcome.error is not None else None,
    }


def _layer(unit: Unit) -> int | None:
    """The layer that a unit is of, if it is of one."""
    task = getattr(unit, "task", None)
    found: int | None = getattr(unit, "layer", None) if task is None else task.layer
    return found
