"""The view that a point of a sweep has of the workers."""

from __future__ import annotations

from collections import deque
from typing import Any

from manifests.records import StagedLayer
from pipeline.methods.method import Task
from pipeline.sweeping.point_pool import PointPool
from pipeline.units.scores import Compare
from pipeline.units.units import Refine, Solve, SolvedGroup, Unit


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


def test_every_group_of_a_refinement_is_counted_so() -> None:
    whole = Recording()
    pool = PointPool(whole, first=4)
    staged = StagedLayer(
        path=f"staged/layer-00002.{'0' * 32}.safetensors", size=1, sha256="0" * 64, tensors={}, forms={}
    )
    groups = tuple(SolvedGroup(Task(2, name, ("down",), method=1), {}, {}, {}) for name in ("mlp", "attention"))
    unit = Refine(2, staged, (), groups)
    pool.submit(unit)
    (sent,) = whole.waiting
    assert isinstance(sent, Refine)
    assert [group.task.method for group in sent.groups] == [5, 5]
    assert pool.wait() == (unit, "refine/2")
