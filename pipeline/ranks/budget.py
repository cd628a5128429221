"""Exact budgets: integers near the wanted ranks whose stored numbers meet a target and never pass it (METHODS §1)."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Key = tuple[int, str, str]
# Knobs whose steps cost at most this many times the finest knob's step share its level.
_LEVEL_SPREAD = 2.0
_BISECTIONS = 200
_NOTHING = 1e-9


@dataclass(frozen=True)
class Knob:
    """One integer to choose: the rank or width of one part of one layer.

    Allowed are the multiples of `multiple` up to `cap`, and `cap` itself (the full rank). `cost` gives the numbers
    stored at a rank: non-decreasing, defined between integers too, and at the cap at most the dense cost.
    """

    layer: int
    group: str
    name: str
    cap: int
    multiple: int
    cost: Callable[[float], float] = field(compare=False)

    def __post_init__(self) -> None:
        if self.cap < 1 or self.multiple < 1:
            raise ValueError(f"{self.key}: cap {self.cap} and multiple {self.multiple} must be at least 1")

    @property
    def key(self) -> Key:
        return (self.layer, self.group, self.name)

    @property
    def least(self) -> int:
        return min(self.multiple, self.cap)

    def nearest(self, want: float) -> int:
        """The allowed rank nearest to `want`; the lower one of two equally near."""
        below = min(max(int(want // self.multiple) * self.multiple, self.least), self.cap)
        above = self.above(below)
        return below if above is None or want - below <= above - want else above

    def above(self, rank: int) -> int | None:
        """The next higher allowed rank."""
        return min(rank // self.multiple * self.multiple + self.multiple, self.cap) if rank < self.cap else None

    def below(self, rank: int) -> int | None:
        """The next lower allowed rank."""
        return (rank - 1) // self.multiple * self.multiple if rank > self.least else None


def solve_ratio(cost_at: Callable[[float], float], target: float) -> float:
    """The largest ratio in (0, 1] with `cost_at(ratio)` <= target, for a non-decreasing cost; by bisection.

    Raises ValueError if the target is below the cost of the smallest ratio, naming both.
    """
    if math.isnan(target):
        raise ValueError("the target is NaN")
    if cost_at(1.0) <= target:
        return 1.0
    low, high = math.ulp(0.0), 1.0
    if cost_at(low) > target:
        raise ValueError(f"target {target:,.0f} is out of reach: least {cost_at(low):,.0f}, most {cost_at(1.0):,.0f}")
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if cost_at(middle) <= target:
            low = middle
        else:
            high = middle
    return low


def fit_ranks(knobs: Sequence[Knob], wants: Mapping[Key, float], target: float) -> dict[Key, int]:
    """Allowed ranks near `wants` (by key) whose total cost is never above `target`, and as near to it as steps allow.

    The wants are first scaled by one factor to cost the target, and rounded to the nearest allowed ranks. What rounding
    leaves over or short is taken up by the knobs with the finest steps (MLP widths, as a rule): by the one furthest
    above (or below) its want relative to its cap, step by step; coarser knobs move only when finer ones are at their
    ends. No single step up fits below the target any more. Deterministic. Raises ValueError if the target is below the
    least possible total, naming the least and most, on missing wants, and on two knobs of one key.
    """
    _check(knobs, wants)
    least, most = (math.fsum(knob.cost(end(knob)) for knob in knobs) for end in (_least, _cap))
    if target >= most:
        return {knob.key: knob.cap for knob in knobs}
    if not target >= least:
        raise ValueError(f"target {target:,.0f} is out of reach: least {least:,.0f}, most {most:,.0f} stored numbers")
    scaled = _scaled(knobs, wants, target)
    ranks = {knob.key: knob.nearest(scaled[knob.key]) for knob in knobs}
    slack = target - math.fsum(knob.cost(ranks[knob.key]) for knob in knobs)
    levels = _levels(knobs)
    for level in levels:
        slack = _lower_(level, scaled, ranks, slack)
    for level in levels:
        slack = _raise_(level, scaled, ranks, slack)
    return ranks


def _least(knob: Knob) -> int:
    return knob.least


def _cap(knob: Knob) -> int:
    return knob.cap


def _check(knobs: Sequence[Knob], wants: Mapping[Key, float]) -> None:
    seen: set[Key] = set()
    for knob in knobs:
        if knob.key in seen:
            raise ValueError(f"two knobs are called {knob.key}")
        seen.add(knob.key)
        want = wants.get(knob.key, math.nan)
        if not 0.0 <= want < math.inf:
            raise ValueError(f"{knob.key}: a rank that is finite and not negative must be wanted, not {want}")


def _scaled(knobs: Sequence[Knob], wants: Mapping[Key, float], target: float) -> dict[Key, float]:
    """The wants times one factor, within [least, cap], so that their real-valued cost is the target."""

    def at(factor: float) -> dict[Key, float]:
        return {knob.key: min(max(wants[knob.key] * factor, knob.least), knob.cap) for knob in knobs}

    def cost(factor: float) -> float:
        ranks = at(factor)
        return math.fsum(knob.cost(ranks[knob.key]) for knob in knobs)

    # Beyond this factor every knob is at its cap, but for wants of next to nothing.
    limit = max(knob.cap / max(wants[knob.key], _NOTHING * knob.cap) for knob in knobs)
    return at(limit * solve_ratio(lambda share: cost(share * limit), target))


def _levels(knobs: Sequence[Knob]) -> list[list[Knob]]:
    """The knobs by the mean cost of a step, finest first, alike ones together."""
    movable = [knob for knob in knobs if knob.cap > knob.least]
    ordered = sorted(movable, key=lambda knob: (_step_cost(knob), knob.key))
    levels: list[list[Knob]] = []
    for knob in ordered:
        if levels and _step_cost(knob) <= _LEVEL_SPREAD * _step_cost(levels[-1][0]):
            levels[-1].append(knob)
        else:
            levels.append([knob])
    return levels


def _step_cost(knob: Knob) -> float:
    steps = math.ceil((knob.cap - knob.least) / knob.multiple)
    return (knob.cost(knob.cap) - knob.cost(knob.least)) / steps


def _lower_(level: Sequence[Knob], wants: Mapping[Key, float], ranks: dict[Key, int], slack: float) -> float:
    """Lowers ranks of one level until the slack is not negative; returns the slack."""
    heap = [((wants[knob.key] - ranks[knob.key]) / knob.cap, knob.key, knob) for knob in level]
    heapq.heapify(heap)
    while slack < 0.0 and heap:
        _, key, knob = heapq.heappop(heap)
        rank = knob.below(ranks[key])
        if rank is not None:
            slack += knob.cost(ranks[key]) - knob.cost(rank)
            ranks[key] = rank
            heapq.heappush(heap, ((wants[key] - rank) / knob.cap, key, knob))
    return slack


def _raise_(level: Sequence[Knob], wants: Mapping[Key, float], ranks: dict[Key, int], slack: float) -> float:
    """Raises ranks of one level as long as a step fits into the slack; returns the slack."""
    heap = [((ranks[knob.key] - wants[knob.key]) / knob.cap, knob.key, knob) for knob in level]
    heapq.heapify(heap)
    while heap:
        _, key, knob = heapq.heappop(heap)
        rank = knob.above(ranks[key])
        # A knob whose step no longer fits is done: slack only shrinks.
        if rank is not None and knob.cost(rank) - knob.cost(ranks[key]) <= slack:
            slack -= knob.cost(rank) - knob.cost(ranks[key])
            ranks[key] = rank
            heapq.heappush(heap, ((rank - wants[key]) / knob.cap, key, knob))
    return slack
