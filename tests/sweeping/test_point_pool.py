"""The view that a point of a sweep has of the workers."""

from __future__ import annotations

from collections import deque
from typing import Any

from pipeline.methods.method import Task
from pipeline.sweeping.point_pool import PointPool
from pipeline.units.scores import Compare
from pipeline.units.units import Solve, Unit


class Recording:
    """Answers each unit with its key, as the workers know it."""

    def __init__(self) -> None:
        self.waiting: deque[Unit] = deque()
        self.seconds: dict[str, list[float]] = {"solve": [1, 2.0, 1.0]}
        self.peak_bytes = {"here": 7}
        self.size = 3
        self.forgotten = 0

    def submit(self, unit: Unit) -> None:
        self.waiting.append(unit)

    def wait(self) -> tuple[Unit, Any]:
        unit = self.waiting.popleft()
        return unit, unit.key

    def cancel_pending(self) -> None:
        self.waiting.clear()

    def forget(self) -> None:
        self.forgotten += 1


def test_methods_are_counted_from_the_first_of_the_point() -> None:
    whole = Recording()
    pool = PointPool(whole, first=4)
    solve, compare = Solve(Task(2, "mlp", ("down",), method=1), {"mlp": 3}, {}), Compare(((1, 2),), ())
    pool.submit(solve)
    pool.submit(compare)
    assert pool.wait() == (solve, "solve/2/5/mlp")
    assert pool.wait() == (compare, "compare/0")
    assert pool.submitted == {}
    pool.submit(solve)
    pool.cancel_pending()
    assert (pool.submitted, list(whole.waiting)) == ({}, [])
    pool.forget()
    assert (pool.size, pool.seconds, pool.peak_bytes, whole.forgotten) == (3, whole.seconds, {"here": 7}, 1)
