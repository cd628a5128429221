"""Points of a sweep that are solved together. After a failure, each is solved alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manifests.errors import Interrupted, LaminaError, WorkerError
from pipeline.sweeping.joint_solving import stage_together
from pipeline.sweeping.points import MOST_TOGETHER, series_of


def point(methods: str, walks: bool = False) -> Any:
    return SimpleNamespace(curves_digest=methods, point=SimpleNamespace(series=methods), walks=walks)


def test_neighbours_of_the_same_methods_and_not_too_many() -> None:
    points = [point("a"), point("a"), point("b"), *(point("c") for _ in range(MOST_TOGETHER + 1)), point("a")]
    series = series_of(points)
    assert [len(alike) for alike in series] == [2, 1, MOST_TOGETHER, 1, 1]
    assert [found for alike in series for found in alike] == points
    assert [len(alike) for alike in series_of([point("d", walks=True), point("d", walks=True), point("a")])] == [1] * 3


class Failing:
    """Workers, and the sweep that they are of: what they begin fails."""

    def __init__(self, error: LaminaError) -> None:
        self.error = error
        self.said: list[str] = []
        self.cancelled = 0
        self.pool = self.observer = self.job = self

    def of(self, point: Any) -> Any:
        return point

    def driver(self, point: Any) -> Any:
        return self

    def run(self, *, until_ranks: bool) -> None:
        raise self.error

    def cancel_pending(self) -> None:
        self.cancelled += 1

    def say(self, line: str, level: int) -> None:
        self.said.append(line)


def test_what_goes_wrong_together_is_left_to_each_point() -> None:
    made: Any = Failing(WorkerError("solvesizes/0/0/mlp: out of memory"))
    stage_together(made, [point("best"), point("best")], made)
    assert made.said == ["best: solved size by size, as solvesizes/0/0/mlp: out of memory"]
    assert made.cancelled == 1
    stopped: Any = Failing(Interrupted("stopped"))
    with pytest.raises(Interrupted):
        stage_together(stopped, [point("best"), point("best")], stopped)
