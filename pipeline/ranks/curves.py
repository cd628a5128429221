"""Ranks by predicted loss: curves of (numbers, loss), their lower hulls, and the choice within a budget.

docs/methods.md#allocation. A `Curve` is stored as columns; here it is a sequence of points.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from manifests.records import Curve

GUARD = 20.0  # of the squared share that is lost: at 0.99 a guarded curve keeps 0.988, at 0.9 0.7, at 0.8 any share
Cost = Callable[["Point"], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A choice: ranks by name, stored numbers, cached numbers per token, and the loss in nats per token."""

    ranks: Mapping[str, int]
    numbers: float
    loss: float
    cache: float = 0


def stored_numbers(point: Point) -> float:
    """Return the cost of a point in a budget of stored numbers."""
    return point.numbers


def cache_numbers(point: Point) -> float:
    """Return the cost of a point in a budget of cached numbers."""
    return point.cache


def to_columns(points: Sequence[Point], hint: str = "", few: bool = False) -> Curve:
    """Return the curve as the ledger stores it, with a hint for solves. `few`: as in `Curve`.

    Raises ValueError on a loss that is negative, NaN or infinite, or if there are no points.
    """
    if not points:
        raise ValueError("a curve needs a point")
    for point in points:
        if not 0.0 <= point.loss < math.inf:
            raise ValueError(f"the predicted loss at {dict(point.ranks)} is {point.loss}")
    return Curve(
        ranks={name: tuple(point.ranks[name] for point in points) for name in points[0].ranks},
        numbers=tuple(point.numbers for point in points),
        cache=tuple(point.cache for point in points),
        loss=tuple(point.loss for point in points),
        hint=hint,
        few=few,
    )


def from_columns(curve: Curve) -> list[Point]:
    """Return the points of a curve."""
    rows = zip(*curve.ranks.values(), strict=True)
    return [
        Point(dict(zip(curve.ranks, row, strict=True)), numbers, loss, cache)
        for row, numbers, cache, loss in zip(rows, curve.numbers, curve.cache, curve.loss, strict=True)
    ]


def frontier(points: Sequence[Point], cost: Cost = stored_numbers) -> list[Point]:
    """Return the Pareto-optimal points, by ascending cost and falling loss."""
    optimal: list[Point] = []
    for point in sorted(points, key=lambda point: (cost(point), point.loss)):
        if not optimal or point.loss < optimal[-1].loss:
            optimal.append(point)
    return optimal


def up_to_whole(points: Sequence[Point]) -> list[Point]:
    """Return the frontier and, if a smaller choice loses no more than the dense one, the dense one as well.

    Few tokens may predict no loss at all for a cut, which is no reason to cut where there is room.
    """
    optimal = frontier(points)
    whole = _dearest(points, optimal[-1].loss, stored_numbers)
    return optimal if whole.numbers <= optimal[-1].numbers else [*optimal, whole]


def _dearest(points: Sequence[Point], loss: float, cost: Cost) -> Point:
    """Return the point of the largest cost that loses at most `loss`."""
    return max((point for point in points if point.loss <= loss), key=cost)


def lower_hull(points: Sequence[Point], cost: Cost = stored_numbers) -> list[Point]:
    """Return the corners of the lower convex hull of (cost, loss), by ascending cost, down to the least loss."""
    hull: list[Point] = []
    for point in frontier(points, cost):
        while len(hull) >= 2 and _slope(hull[-2], hull[-1], cost) <= _slope(hull[-2], point, cost):
            hull.pop()
        hull.append(point)
    return hull


def merged(first: Sequence[Point], second: Sequence[Point], cost: Cost = stored_numbers) -> list[Point]:
    """Return the lower hull of all sums of a point of each curve, by ascending cost. Costs and losses are added.

    Ranks are joined, so that they must have different names.
    """
    hull, other = lower_hull(first, cost), lower_hull(second, cost)
    sums, i, j = [_sum(hull[0], other[0])], 0, 0
    while i + 1 < len(hull) or j + 1 < len(other):
        gain = _slope(hull[i], hull[i + 1], cost) if i + 1 < len(hull) else -1.0
        other_gain = _slope(other[j], other[j + 1], cost) if j + 1 < len(other) else -1.0
        i, j = (i + 1, j) if gain >= other_gain else (i, j + 1)
        sums.append(_sum(hull[i], other[j]))
    return sums


def summed(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Sum several curves with common ranks, at the points that all of them have."""
    by_ranks = [{tuple(sorted(point.ranks.items())): point for point in curve} for curve in curves]
    common = [ranks for ranks in by_ranks[0] if all(ranks in points for points in by_ranks)]
    rows = [[points[ranks] for points in by_ranks] for ranks in common]
    return [
        Point(
            row[0].ranks,
            sum(point.numbers for point in row),
            math.fsum(point.loss for point in row),
            sum(point.cache for point in row),
        )
        for row in rows
    ]


def choose(
    curves: Mapping[str, Sequence[Point]],
    limit: float,
    cost: Cost = stored_numbers,
    guarded: Collection[str] = (),
) -> dict[str, Point]:
    """Choose one point of each curve, with the least total loss within `limit`.

    If the limit leaves room for the dearest points of least loss, these are chosen: nothing is cut. If all curves
    together lose a share c of their cost, the `guarded` ones lose at most c (1 + GUARD c), or one step more if steps
    are coarse.

    First, take segments of all hulls in the order of saved loss per cost, as long as they fit. Then, as long as a step
    fits, take the step to the point that saves most, on a hull or not. The result is deterministic: among equal steps,
    take that of the first key. Raises ValueError if even the cheapest points cost more than the limit.
    """
    hulls = {key: lower_hull(points, cost) for key, points in curves.items()}
    whole = {key: _dearest(points, hulls[key][-1].loss, cost) for key, points in curves.items()}
    if sum(map(cost, whole.values())) <= limit:
        return whole
    if guarded:
        curves = _limited(curves, whole, limit, cost, guarded)
        hulls |= {key: lower_hull(curves[key], cost) for key in guarded}
    chosen = {key: hull[0] for key, hull in hulls.items()}
    least = sum(cost(point) for point in chosen.values())
    if not least <= limit:
        most = sum(cost(hull[-1]) for hull in hulls.values())
        raise ValueError(f"limit {limit:,.0f} is out of reach: least {least:,.0f}, most {most:,.0f}")
    slack = _take_segments_(hulls, chosen, limit - least, cost)
    _fill_({key: frontier(points, cost) for key, points in curves.items()}, chosen, slack, cost)
    return chosen


def _limited(
    curves: Mapping[str, Sequence[Point]],
    whole: Mapping[str, Point],
    limit: float,
    cost: Cost,
    guarded: Collection[str],
) -> Mapping[str, Sequence[Point]]:
    """Return the curves, the guarded ones without the points that lose too large a share of their cost.

    If these do not fit into the limit, a guarded curve keeps the next smaller point, too, or else all.
    """
    lost = 1.0 - limit / sum(map(cost, whole.values()))
    share = 1.0 - lost * (1.0 + GUARD * lost)
    for steps_below in (0, 1):
        limited = {
            key: _from(points, share * cost(whole[key]), cost, steps_below) if key in guarded else points
            for key, points in curves.items()
        }
        if sum(min(map(cost, points)) for points in limited.values()) <= limit:
            return limited
    return curves


def _from(points: Sequence[Point], least: float, cost: Cost, steps_below: int) -> list[Point]:
    """Return the points that cost `least` or more, and of those on the frontier below, the dearest `steps_below`."""
    below = [point for point in frontier(points, cost) if cost(point) < least]
    return [*below[len(below) - steps_below :], *(point for point in points if cost(point) >= least)]


def most_numbers(lines: Sequence[Sequence[Point]], cache: float) -> float:
    """Bound the numbers stored by one point of each line, if their cached numbers add up to at most `cache`.

    The bound is the optimum over all mixtures of two points of a line; losses do not matter.
    """
    hulls = [lower_hull([replace(point, loss=-point.numbers) for point in line], cache_numbers) for line in lines]
    segments = [segment for hull in hulls for segment in itertools.pairwise(hull)]
    room = cache - sum(hull[0].cache for hull in hulls)
    most = sum(hull[0].numbers for hull in hulls)
    for near, far in sorted(segments, key=lambda ends: _slope(ends[0], ends[1], cache_numbers), reverse=True):
        share = min(1.0, max(0.0, room) / (far.cache - near.cache))
        most += share * (far.numbers - near.numbers)
        room -= far.cache - near.cache
    return most


def predicted_loss(curves: Mapping[str, Curve], ranks: Mapping[str, Mapping[str, int]]) -> float:
    """Return the predicted loss of a choice in nats per token: the sum over curves, each at the point of its ranks.

    Raises ValueError if a curve has no point of these ranks.
    """
    total = 0.0
    for key, curve in curves.items():
        chosen = dict(ranks[key])
        point = next((point for point in from_columns(curve) if dict(point.ranks) == chosen), None)
        if point is None:
            raise ValueError(f"{key}: its curve has no point at {chosen}")
        total += point.loss
    return total


def steps(limit: int, multiple: int = 1, count: int = 256, least: int | None = None) -> list[int]:
    """Return about `count` evenly spaced multiples of `multiple` from `least` on, ascending, and `limit` itself."""
    first = max(multiple, least or 0)
    stride = multiple * max(1, math.ceil((limit - first) / multiple / count))
    return [*range(-(-first // multiple) * multiple, limit, stride), limit]


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the items, evenly spread from the first to the last."""
    count = min(count, len(items))
    return [items[place * (len(items) - 1) // max(1, count - 1)] for place in range(count)]


def _slope(point: Point, dearer: Point, cost: Cost) -> float:
    """Return the loss saved per cost."""
    return (point.loss - dearer.loss) / (cost(dearer) - cost(point))


def _sum(one: Point, other: Point) -> Point:
    ranks = {**one.ranks, **other.ranks}
    return Point(ranks, one.numbers + other.numbers, one.loss + other.loss, one.cache + other.cache)


def _take_segments_(hulls: Mapping[str, Sequence[Point]], chosen: dict[str, Point], slack: float, cost: Cost) -> float:
    """Move along the hulls; return the remaining slack."""
    heap = [(-_slope(hull[0], hull[1], cost), key, 1) for key, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(heap)
    while heap:
        _, key, corner = heapq.heappop(heap)
        hull = hulls[key]
        price = cost(hull[corner]) - cost(chosen[key])
        if price > slack:
            continue  # later corners of this hull cost even more
        chosen[key], slack = hull[corner], slack - price
        if corner + 1 < len(hull):
            heapq.heappush(heap, (-_slope(hull[corner], hull[corner + 1], cost), key, corner + 1))
    return slack


def _fill_(points: Mapping[str, Sequence[Point]], chosen: dict[str, Point], slack: float, cost: Cost) -> None:
    while True:
        best: tuple[float, str, Point] | None = None
        for key, line in points.items():
            current = chosen[key]
            for point in line:
                if point.loss < current.loss and cost(point) - cost(current) <= slack:
                    saved = current.loss - point.loss
                    if best is None or saved > best[0]:
                        best = (saved, key, point)
        if best is None:
            return
        slack -= cost(best[2]) - cost(chosen[best[1]])
        chosen[best[1]] = best[2]
