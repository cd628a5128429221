"""Computes curves of predicted loss, split among workers that would otherwise be idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manifests.records import ArrayRecord, Curve
from pipeline.driver.scheduler import Coroutine
from pipeline.driver.session import Session
from pipeline.methods.method import Moment, Task
from pipeline.units.curves import BeginCurve, CurvePieces, Predict


def compute_curves(
    session: Session, tasks: Mapping[Task, Mapping[Moment, ArrayRecord]]
) -> Coroutine[dict[Task, Curve]]:
    """Compute the curve of each task from its statistics.

    Groups whose curves have pieces take longest and come first. Their pieces are split among workers if some would
    otherwise be idle. Each worker reads the statistics again; the split does not change the result.
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
    """Distribute piece numbers, which come in descending order of work, over `parts` workers."""
    return [tuple(range(first, pieces, parts)) for first in range(min(parts, pieces))]
