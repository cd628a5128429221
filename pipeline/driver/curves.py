"""Takes the curves of some groups, cut into pieces where workers would be left idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manifests.records import ArrayRecord, Curve
from pipeline.driver.scheduler import TaskStream
from pipeline.driver.session import Session
from pipeline.methods.method import Moment, Task
from pipeline.units.curves import BeginCurve, CurvePieces, Predict

Found = Mapping[Moment, ArrayRecord]


def take_curves(session: Session, tasks: Mapping[Task, Found]) -> TaskStream[dict[Task, Curve]]:
    """Take one curve of each task, from its statistics.

    Curves of groups with pieces take longest and come first. They are cut among workers where workers would be left
    idle; each part reads the statistics again, and the cut changes no byte.
    """
    long = [task for task in tasks if task.pieces > 1]
    share = session.pool.size // len(long) if long else 1
    cut = long if share > 1 else []
    ordered = sorted(tasks, key=lambda task: -task.pieces)
    units = [BeginCurve(task, tasks[task]) if task in cut else Predict(task, tasks[task]) for task in ordered]
    curves: dict[Task, Any] = dict(zip(ordered, (yield units), strict=True))
    parts = [
        CurvePieces(task, tasks[task], curves[task], numbers) for task in cut for numbers in _dealt(task.pieces, share)
    ]
    pieces: dict[Task, dict[int, Any]] = {task: {} for task in cut}
    for part, computed in zip(parts, (yield parts), strict=True):
        pieces[part.task] |= dict(zip(part.numbers, computed, strict=True))
    joined = [
        Predict(task, tasks[task], curves[task], tuple(pieces[task][number] for number in range(task.pieces)))
        for task in cut
    ]
    curves |= dict(zip(cut, (yield joined), strict=True))
    return {task: curves[task] for task in tasks}


def _dealt(pieces: int, parts: int) -> Sequence[tuple[int, ...]]:
    """Deal the numbers of pieces, which come in descending order of work, to so many parts."""
    return [tuple(range(first, pieces, parts)) for first in range(min(parts, pieces))]
