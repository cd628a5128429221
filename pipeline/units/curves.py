"""The units that take the curve of a group of matrices: what each size is predicted to cost the loss.

See `pipeline.units.units`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.records import ArrayRecord
from pipeline.methods.method import Moment, Task


@dataclass(frozen=True)
class BeginCurve:
    """What all pieces of a group's curve follow from; the result is JSON."""

    task: Task
    statistics: Mapping[Moment, ArrayRecord]

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"begincurve/{self.task.key}"


@dataclass(frozen=True)
class CurvePieces:
    """Some pieces of a group's curve, by their numbers; the result is a list of JSON."""

    task: Task
    statistics: Mapping[Moment, ArrayRecord]
    begun: Any
    numbers: tuple[int, ...]

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"curvepieces/{self.task.key}/{self.numbers[0]}"


@dataclass(frozen=True)
class Predict:
    """The curve of one group: what each of its sizes is predicted to cost the loss; the result is a `Curve`.

    `begun`, `pieces`: what workers have made of it, where they shared it; all pieces, in order.
    """

    task: Task
    statistics: Mapping[Moment, ArrayRecord]
    begun: Any = None
    pieces: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        """Names the unit in logs and results."""
        return f"predict/{self.task.key}"


CurveUnit = BeginCurve | CurvePieces | Predict
