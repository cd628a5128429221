"""Units that compute the curve of a group of matrices: the predicted loss at each size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.records import ArrayRecord
from pipeline.methods.method import Moment, Task
from pipeline.units.base import WorkUnit


@dataclass(frozen=True)
class BeginCurve(WorkUnit):
    """Computes the data that all pieces of a group's curve share. The result is JSON."""

    task: Task
    statistics: Mapping[Moment, ArrayRecord]

    @property
    def key(self) -> str:
        return f"begincurve/{self.task.key}"


@dataclass(frozen=True)
class CurvePieces(WorkUnit):
    """Computes some pieces of a group's curve, by their numbers. The result is a list of JSON."""

    task: Task
    statistics: Mapping[Moment, ArrayRecord]
    shared: Any
    numbers: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"curvepieces/{self.task.key}/{self.numbers[0]}"


@dataclass(frozen=True)
class Predict(WorkUnit):
    """Computes the curve of one group: the predicted loss at each size. The result is a `Curve`.

    `shared`, `pieces`: the results of `BeginCurve` and of all `CurvePieces`, in order, if workers share the curve.
    """

    task: Task
    statistics: Mapping[Moment, ArrayRecord]
    shared: Any = None
    pieces: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        return f"predict/{self.task.key}"


CurveUnit = BeginCurve | CurvePieces | Predict
