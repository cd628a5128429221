"""Which waiting unit a worker is given: what it holds decides, so that little has to be read or made again."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from functools import partial
from typing import Protocol

from pipeline.sum_units import Collect
from pipeline.units import ShardUnit, Solve, Unit


class Holder(Protocol):
    """A worker as far as it is known what it holds.

    Attributes:
        shards: whose hidden states are with it.
        kept: paths of the moments that it has summed up and still holds.
        running: units in hand.
    """

    shards: set[int]
    kept: set[str]

    @property
    def running(self) -> Sized:
        """Units in hand."""
        ...


def choose(waiting: Sequence[Unit], member: Holder, live: Collection[Holder]) -> int | None:
    """The place in `waiting` of the unit that a worker should do; None: of all that waits, nothing is for it.

    What it keeps a moment for comes first. Then one of its own shards or of no shard; else one of a shard that nobody
    holds; else, so that those who join late have something to do, one of a worker that holds at least two shards more.
    A solve whose moment is kept by a worker without work is left to that one.
    """
    if member.kept:
        for index, unit in enumerate(waiting):
            if isinstance(unit, Solve) and _keeps(member, unit):
                return index
    holders = {shard: other for other in live for shard in other.shards}
    new = taken_over = None
    for index, unit in enumerate(waiting):
        if isinstance(unit, Collect) or (isinstance(unit, Solve) and any(map(partial(_awaits, unit), live))):
            continue
        holder = holders.get(unit.shard) if isinstance(unit, ShardUnit) else member
        if holder is member:
            return index
        if holder is None:
            new = index if new is None else new
        elif taken_over is None and len(holder.shards) > len(member.shards) + 1:
            taken_over = index
    return taken_over if new is None else new


def _keeps(member: Holder, unit: Solve) -> bool:
    return any(record.path in member.kept for record in unit.statistics.values())


def _awaits(unit: Solve, member: Holder) -> bool:
    """Whether a worker has nothing to do but what it keeps a moment for."""
    return not member.running and _keeps(member, unit)
