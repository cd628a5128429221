"""Integer ranks near real-valued targets, whose stored numbers approach a budget and never exceed it.

docs/methods.md#budget.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

RankKey = tuple[int, str, str]  # layer, group, name of a rank variable
# Variables share a level if their steps cost at most this many times the finest one's step.
_LEVEL_SPREAD = 2.0
_BISECTIONS = 200
_NOTHING = 1e-9


@dataclass(frozen=True)
class RankVariable:
    """An integer to choose: the rank or width of a part of a layer.

    Allowed are `cap`, the full rank, and the multiples of `multiple` from `floor`, itself a multiple, up to `cap`.
    `cost` returns the numbers stored at a rank. It is non-decreasing, also defined between integers, and at the cap at
    most the dense cost.
    """

    layer: int
    group: str
    name: str
    cap: int
    multiple: int
    cost: Callable[[float], float] = field(compare=False)
    floor: int = 0

    def __post_init__(self) -> None:
        if self.cap < 1 or self.multiple < 1:
            raise ValueError(f"{self.key}: cap {self.cap} and multiple {self.multiple} must be at least 1")

    @property
    def key(self) -> RankKey:
        """Return the name of the variable among those of a method."""
        return (self.layer, self.group, self.name)

    @property
    def least(self) -> int:
        """Return the smallest allowed rank."""
        return min(max(self.multiple, self.floor), self.cap)

    def nearest(self, target: float) -> int:
        """Return the allowed rank nearest to `target`, the lower of two equally near."""
        below = min(max(int(target // self.multiple) * self.multiple, self.least), self.cap)
        above = self.above(below)
        return below if above is None or target - below <= above - target else above

    def above(self, rank: int) -> int | None:
        """Return the next higher allowed rank, or None."""
        return min(rank // self.multiple * self.multiple + self.multiple, self.cap) if rank < self.cap else None

    def below(self, rank: int) -> int | None:
        """Return the next lower allowed rank, or None."""
        return (rank - 1) // self.multiple * self.multiple if rank > self.least else None


def solve_ratio(cost_at: Callable[[float], float], limit: float) -> float:
    """Bisect for the largest ratio in (0, 1] with `cost_at(ratio)` <= limit, for a non-decreasing cost.

    Raises ValueError if the limit is below the cost of the smallest ratio, naming both.
    """
    if math.isnan(limit):
        raise ValueError("the limit is NaN")
    if cost_at(1.0) <= limit:
        return 1.0
    low, high = math.ulp(0.0), 1.0
    if cost_at(low) > limit:
        raise ValueError(f"limit {limit:,.0f} is out of reach: least {cost_at(low):,.0f}, most {cost_at(1.0):,.0f}")
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if cost_at(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def fit_ranks(variables: Sequence[RankVariable], targets: Mapping[RankKey, float], limit: float) -> dict[RankKey, int]:
    """Return allowed ranks near `targets` (by key) with a total cost at most `limit`, as near to it as steps allow.

    The targets are scaled by one factor so that they cost `limit`, and rounded to the nearest allowed ranks. The
    difference is then compensated by the variables with the finest steps (usually MLP widths), step by step: each time
    by the variable furthest above (or below) its target, relative to its cap. Coarser variables move only when finer
    ones are at their limits. In the end, no further step fits. The result is deterministic. Raises ValueError if the
    limit is below the least possible total, on missing targets, and on two variables with the same key.
    """
    _check(variables, targets)
    least = math.fsum(variable.cost(variable.least) for variable in variables)
    most = math.fsum(variable.cost(variable.cap) for variable in variables)
    if limit >= most:
        return {variable.key: variable.cap for variable in variables}
    if not limit >= least:
        raise ValueError(f"limit {limit:,.0f} is out of reach: least {least:,.0f}, most {most:,.0f} stored numbers")
    scaled = _scaled(variables, targets, limit)
    ranks = {variable.key: variable.nearest(scaled[variable.key]) for variable in variables}
    slack = limit - math.fsum(variable.cost(ranks[variable.key]) for variable in variables)
    levels = _levels(variables)
    for level in levels:
        slack = _lower_(level, scaled, ranks, slack)
    for level in levels:
        slack = _raise_(level, scaled, ranks, slack)
    return ranks


def _check(variables: Sequence[RankVariable], targets: Mapping[RankKey, float]) -> None:
    keys: set[RankKey] = set()
    for variable in variables:
        if variable.key in keys:
            raise ValueError(f"two variables are called {variable.key}")
        keys.add(variable.key)
        wanted = targets.get(variable.key, math.nan)
        if not 0.0 <= wanted < math.inf:
            raise ValueError(f"{variable.key}: the target rank must be finite and not negative, not {wanted}")


def _scaled(variables: Sequence[RankVariable], targets: Mapping[RankKey, float], limit: float) -> dict[RankKey, float]:
    """Scale the targets by one factor, within [least, cap], so that their real-valued cost is the limit."""

    def at(factor: float) -> dict[RankKey, float]:
        return {
            variable.key: min(max(targets[variable.key] * factor, variable.least), variable.cap)
            for variable in variables
        }

    def cost(factor: float) -> float:
        ranks = at(factor)
        return math.fsum(variable.cost(ranks[variable.key]) for variable in variables)

    # Beyond this factor every variable is at its cap, except for tiny targets.
    widest = max(variable.cap / max(targets[variable.key], _NOTHING * variable.cap) for variable in variables)
    return at(widest * solve_ratio(lambda share: cost(share * widest), limit))


def _levels(variables: Sequence[RankVariable]) -> list[list[RankVariable]]:
    """Group the variables by the mean cost of a step, finest first."""
    movable = [variable for variable in variables if variable.cap > variable.least]
    ordered = sorted(movable, key=lambda variable: (_step_cost(variable), variable.key))
    levels: list[list[RankVariable]] = []
    for variable in ordered:
        if levels and _step_cost(variable) <= _LEVEL_SPREAD * _step_cost(levels[-1][0]):
            levels[-1].append(variable)
        else:
            levels.append([variable])
    return levels


def _step_cost(variable: RankVariable) -> float:
    steps = math.ceil((variable.cap - variable.least) / variable.multiple)
    return (variable.cost(variable.cap) - variable.cost(variable.least)) / steps


def _lower_(
    level: Sequence[RankVariable], targets: Mapping[RankKey, float], ranks: dict[RankKey, int], slack: float
) -> float:
    """Lower ranks of one level until the slack is not negative; return the slack."""
    heap = [
        ((targets[variable.key] - ranks[variable.key]) / variable.cap, variable.key, variable) for variable in level
    ]
    heapq.heapify(heap)
    while slack < 0.0 and heap:
        _, key, variable = heapq.heappop(heap)
        rank = variable.below(ranks[key])
        if rank is not None:
            slack += variable.cost(ranks[key]) - variable.cost(rank)
            ranks[key] = rank
            heapq.heappush(heap, ((targets[key] - rank) / variable.cap, key, variable))
    return slack


def _raise_(
    level: Sequence[RankVariable], targets: Mapping[RankKey, float], ranks: dict[RankKey, int], slack: float
) -> float:
    """Raise ranks of one level as long as a step fits into the slack; return the slack."""
    heap = [
        ((ranks[variable.key] - targets[variable.key]) / variable.cap, variable.key, variable) for variable in level
    ]
    heapq.heapify(heap)
    while heap:
        _, key, variable = heapq.heappop(heap)
        rank = variable.above(ranks[key])
        # A step that does not fit now will never fit, because the slack only shrinks.
        if rank is not None and variable.cost(rank) - variable.cost(ranks[key]) <= slack:
            slack -= variable.cost(rank) - variable.cost(ranks[key])
            ranks[key] = rank
            heapq.heappush(heap, ((rank - targets[key]) / variable.cap, key, variable))
    return slack
