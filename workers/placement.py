"""Chooses the waiting unit that a worker runs next, so that it can use the hidden states that it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Protocol

from pipeline.units.reads import ReadLayer
from pipeline.units.scores import Score, WindowForward, shards_per_worker
from pipeline.units.sums import Add, Collect
from pipeline.units.units import Backward, ConcurrentUnit, ShardUnit, Unit

GRADIENTS = "gradients"
Shard = tuple[str, int]  # the model being scored, "" for calibration samples or `GRADIENTS`; the number of the shard


def shard_of(unit: ShardUnit) -> Shard:
    """Return the shard whose hidden states or gradients the worker of this unit holds afterwards.

    A backward pass reads stored inputs, so that its few shards are spread over all workers, whoever held their hidden
    states.
    """
    model = unit.model if isinstance(unit, WindowForward | Score) else GRADIENTS if isinstance(unit, Backward) else ""
    return model, unit.shard


class Holder(Protocol):
    """A worker, and the shards whose hidden states it holds."""

    shards: set[Shard]

    @property
    def name(self) -> str:
        """The worker's name in `near` of units."""
        ...

    @property
    def idle(self) -> bool:
        """True if the worker runs no unit, or only `ConcurrentUnit`s."""
        ...


def hold(unit: Unit, member: Holder, live: Iterable[Holder]) -> None:
    """Note that a worker gets a unit: it will hold the unit's shard, and no other worker does."""
    if isinstance(unit, ShardUnit):
        for other in live:
            other.shards.discard(shard_of(unit))
        member.shards.add(shard_of(unit))


def release(unit: Unit, member: Holder) -> None:
    """Note that a worker has done a unit: with its score, it has dropped the hidden states of a shard."""
    if isinstance(unit, Score):
        member.shards.discard(shard_of(unit))


def choose_unit(waiting: Sequence[Unit], member: Holder, live: Collection[Holder], beside: bool = False) -> int | None:
    """Return the index in `waiting` of the unit that the worker `member` should run, or None.

    With `beside`, this is the first `ConcurrentUnit` other than `Collect` that is not bound to another node. Otherwise
    it is, in this order, a unit of one of the worker's shards or without a shard; of a shard that no worker holds; or,
    so that new workers get work, of a worker with at least two shards more.

    Units without a shard, such as solves, are long. Only idle workers take them, so that none waits for another unit.

    A worker that scores one model should not build layers of another. It takes a new shard of another model's windows
    only if it is idle, and takes one over from another worker only if it is idle and the layer's inputs are stored.
    """
    if beside:
        nearby = (
            index
            for index, unit in enumerate(waiting)
            if isinstance(unit, ConcurrentUnit) and not isinstance(unit, Collect) and _near(unit, member, live)
        )
        return next(nearby, None)
    holders = {shard: other for other in live for shard in other.shards}
    counts = {id(other): Counter(map(itemgetter(0), other.shards)) for other in (*live, member)}

    takeover: int | None = None
    unheld: tuple[tuple[int, int], int] | None = None  # the lowest cost, and the index
    for index, unit in enumerate(waiting):
        if isinstance(unit, ConcurrentUnit):
            continue
        if not isinstance(unit, ShardUnit):
            if member.idle:
                return index
            continue
        shard = shard_of(unit)
        holder = holders.get(shard)
        if holder is member:
            return index
        if holder is None:
            cost = _cost(unit, member, live)
            if cost is not None and (unheld is None or cost < unheld[0]):
                unheld = cost, index
        elif takeover is None and _movable(unit, member):
            model, _ = shard
            if counts[id(holder)][model] > counts[id(member)][model] + 1:
                takeover = index
    return takeover if unheld is None else unheld[1]


def _movable(unit: ShardUnit, member: Holder) -> bool:
    """Return True if the worker may take over a shard from a worker that holds more."""
    return not isinstance(unit, WindowForward | Score) or (member.idle and unit.base == unit.layer)


def _cost(unit: ShardUnit, member: Holder, live: Collection[Holder]) -> tuple[int, int] | None:
    """Return the cost of giving a worker a shard that no worker holds, or None if it should not take the shard now.

    The order for windows: a worker with windows of the model, up to its share (`shards_per_worker`); a worker without
    windows, for the model on the fewest workers; an idle worker with windows of other models. A worker with as many
    windows, of any models, leaves it to workers with fewer: it may have been idle while they were not.
    """
    if not isinstance(unit, WindowForward | Score):
        return 0, 0
    mine, share = _windows(member), shards_per_worker(unit.windows.shards, len(live), unit.windows.models)
    if mine.total() >= share and any(_windows(other).total() < share for other in live):
        return None
    if mine[unit.model]:
        return (0, 0) if mine[unit.model] < share else None
    holders = sum(any(model == unit.model for model, _ in other.shards) for other in live)
    if not mine:
        return 1, holders
    return (2, holders) if member.idle else None


def _windows(holder: Holder) -> Counter[str]:
    """Count the windows that a worker holds, by model."""
    return Counter(model for model, _ in holder.shards if model not in ("", GRADIENTS))


def _near(unit: Unit, member: Holder, live: Collection[Holder]) -> bool:
    """Return True if the worker is near the unit's data, or if no worker there is alive."""
    if not isinstance(unit, Add | ReadLayer) or not unit.near or member.name in unit.near:
        return True
    return not any(other.name in unit.near for other in live)
