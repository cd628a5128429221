"""Which waiting unit a worker is given: what it holds decides, so that little has to be read or made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from pipeline.units.scores import Score, WindowForward, shards_each
from pipeline.units.sums import Add, Collect
from pipeline.units.units import BesideUnit, ReadLayer, ShardUnit, Unit

Held = tuple[str, int]  # a shard, and of which windows


def held(unit: ShardUnit) -> Held:
    """What a unit leaves with its worker: a shard of the samples, or of the windows that a model is scored on."""
    return (unit.model if isinstance(unit, WindowForward | Score) else "", unit.shard)


class Holder(Protocol):
    """A worker as far as it is known what it holds.

    Attributes:
        shards: whose hidden states are with it, as `held` names them.
        name: by which it is known where sums are.
    """

    shards: set[Held]

    @property
    def name(self) -> str:
        """The worker's own."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do but what goes beside others."""
        ...


def choose(waiting: Sequence[Unit], member: Holder, live: Collection[Holder], beside: bool = False) -> int | None:
    """The place in `waiting` of the unit that a worker should do; None: of all that waits, nothing is for it.

    With `beside`, the first of those that go beside others, but for what is to be read or added on another node, and
    what only one worker has. Else one of its own shards or of no shard; else one of a shard that nobody holds; else, so
    that those who join late have something to do, one of a worker that holds at least two shards more.

    A unit of no shard, such as a solve, is long: nobody has it in hand while another worker may be done first.

    Of windows, who goes through one model builds no layer of another while others do: a worker that has windows of
    another model takes a new one, and any takes one over, when it has nothing else to do; the latter where what enters
    the layer is stored.
    """
    if beside:
        here = (
            index
            for index, unit in enumerate(waiting)
            if isinstance(unit, BesideUnit) and not isinstance(unit, Collect) and _near(unit, member, live)
        )
        return next(here, None)
    holders = {shard: other for other in live for shard in other.shards}
    counts: dict[tuple[int, str], int] = {}

    def count(other: Holder, windows: str) -> int:
        if (id(other), windows) not in counts:
            counts[id(other), windows] = sum(of == windows for of, _ in other.shards)
        return counts[id(other), windows]

    taken_over: int | None = None
    new: tuple[tuple[int, int], int] | None = None  # how well the best of them fits, and its place
    for index, unit in enumerate(waiting):
        if isinstance(unit, BesideUnit):
            continue
        if not isinstance(unit, ShardUnit):
            if member.idle:
                return index
            continue
        shard = held(unit)
        holder = holders.get(shard)
        if holder is member:
            return index
        if holder is None:
            fit = _fit(unit, member, live)
            if fit is not None and (new is None or fit < new[0]):
                new = fit, index
        elif taken_over is None and _movable(unit, member) and count(holder, shard[0]) > count(member, shard[0]) + 1:
            taken_over = index
    return taken_over if new is None else new[1]


def _movable(unit: ShardUnit, member: Holder) -> bool:
    """Whether a worker should take over a shard that another holds, if that has many more."""
    return not isinstance(unit, WindowForward | Score) or (member.idle and unit.base == unit.layer)


def _fit(unit: ShardUnit, member: Holder, live: Collection[Holder]) -> tuple[int, int] | None:
    """How little speaks against a worker's taking a shard that nobody holds; None: too much just now.

    Of windows it has some, though not so many yet that half the workers would do with no more each; or it has none at
    all, and best takes those that the fewest have; or it has others alone.
    """
    if not isinstance(unit, WindowForward | Score):
        return 0, 0
    mine = Counter(of for of, _ in member.shards)
    if mine[unit.model]:
        return (0, 0) if mine[unit.model] < shards_each(unit.windows.shards, len(live)) else None
    holders = sum(any(of == unit.model for of, _ in other.shards) for other in live)
    if not any(mine):
        return 1, holders
    return (2, holders) if member.idle else None


def _near(unit: Unit, member: Holder, live: Collection[Holder]) -> bool:
    """Whether a unit may be done by this worker: it is near, or nobody who is lives."""
    if not isinstance(unit, Add | ReadLayer) or not unit.near or member.name in unit.near:
        return True
    return not any(other.name in unit.near for other in live)
