"""The Pareto front of a sweep's points, with a tolerance in size between curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOLERANCE = 0.01  # share of the dense model's bytes by which a point of another curve may be larger


class PlotPoint(NamedTuple):
    """A size as a share of the dense model's, the loss at it, and the curve of the point."""

    size: float
    loss: float
    curve: str = ""


def front(points: Sequence[PlotPoint], tolerance: float = TOLERANCE) -> frozenset[int]:
    """Return the indices of the points that no other point beats.

    A point beats another if neither its size nor its loss is larger, and one of them is smaller. A point of another
    curve also beats it with less loss if it is larger by at most `tolerance`.
    """
    return frozenset(
        place for place, point in enumerate(points) if not any(_beats(other, point, tolerance) for other in points)
    )


def _beats(other: PlotPoint, point: PlotPoint, tolerance: float) -> bool:
    if other.size <= point.size:
        return other.loss <= point.loss and (other.size, other.loss) != (point.size, point.loss)
    return other.curve != point.curve and other.size <= point.size + tolerance and other.loss < point.loss
