"""Takes the curves of some groups, cut into pieces where workers would be left without any."""

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
    """Takes one curve of each task, from its statistics. A cut costs reading these again for each part, and changes no
    byte.

    Groups that may be cut are the long ones, and come first. While there are as many of them as workers, each stays
    whole.
    """
    long = [task for task in tasks if task.pieces > 1]
    share = session.pool.size // len(long) if long else 1
    cut = long if share > 1 else []
    ordered = sorted(tasks, key=lambda task: -task.pieces)
    units = [BeginCurve(task, tasks[task]) if task in cut else Predict(task, tasks[task]) for task in ordered]
    done: dict[Task, Any] = dict(zip(ordered, (yield units), strict=True))
    parts = [
        CurvePieces(task, tasks[task], done[task], numbers) for task in cut for numbers in _dealt(task.pieces, share)
    ]
    pieces: dict[Task, dict[int, Any]] = {task: {} for task in cut}
    for part, found in zip(parts, (yield parts), strict=True):
        pieces[part.task] |= dict(zip(part.numbers, found, strict=True))
    joined = [
        Predict(task, tasks[task], done[task], tuple(pieces[task][number] for number in range(task.pieces)))
        for task in cut
    ]
    done |= dict(zip(cut, (yield joined), strict=True))
    return {task: done[task] for task in tasks}


def _dealt(pieces: int, parts: int) -> Sequence[tuple[int, ...]]:
    """Numbers of pieces as cards are dealt: they come by the work that they are."""
    return [tuple(range(first, pieces, parts)) for first in range(min(parts, pieces))]
