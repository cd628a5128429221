"""The points of a sweep that no other one beats: its Pareto front, with a tolerance in bytes between curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOLERANCE = 0.01  # of the dense model's bytes: by so much a point of another curve may be larger


class Point(NamedTuple):
    """A size, as a share of the dense model's, what is lost at it, and the curve that the point belongs to."""

    size: float
    loss: float
    curve: str = ""


def front(points: Sequence[Point], tolerance: float = TOLERANCE) -> frozenset[int]:
    """Returns the places of the points that no other one beats.

    One that is no larger and loses no more beats a point, unless it is equal in both; so does one of another curve that
    loses less and is larger by at most `tolerance`.
    """
    return frozenset(
        place for place, point in enumerate(points) if not any(_beats(other, point, tolerance) for other in points)
    )


def _beats(other: Point, point: Point, tolerance: float) -> bool:
    if other.size <= point.size:
        return other.loss <= point.loss and (other.size, other.loss) != (point.size, point.loss)
    return other.curve != point.curve and other.size <= point.size + tolerance and other.loss < point.loss
