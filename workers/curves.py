"""Computes the curve of a group, or some pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from manifests.records import ArrayRecord, CountedRecord, Curve
from pipeline.methods.experts.completing import experts_with_few
from pipeline.methods.experts.scores import SHARE_TOKENS
from pipeline.methods.method import Moment, Statistics
from pipeline.ranks.curves import from_columns, to_columns
from pipeline.rounding.choices import with_bits
from pipeline.units.curves import BeginCurve, CurvePieces, CurveUnit, Predict
from workers.solving import GroupProblem

Read = Callable[[Mapping[Moment, ArrayRecord]], Statistics]


def curve_result(unit: CurveUnit, problem: GroupProblem, read: Read) -> Any:
    """Return the result of a unit. `read`: returns statistics as methods receive them."""
    if isinstance(unit, Predict):
        return _curve(unit, problem, read)
    group = problem.with_statistics(read(unit.statistics)).group
    if isinstance(unit, BeginCurve):
        return group.begin_curve()
    assert isinstance(unit, CurvePieces)
    return group.curve_pieces(unit.shared, unit.numbers)


def _curve(unit: Predict, problem: GroupProblem, read: Read) -> Curve:
    quantize = problem.quantize if problem.quantize is not None and problem.quantize.bits == "auto" else None
    statistics = read(unit.statistics) if quantize is not None or not unit.pieces else Statistics()
    group = problem.with_statistics(statistics).group
    curve = group.join_curve(unit.shared, unit.pieces) if unit.pieces else group.curve()
    counts = {moment: record.tokens for moment, record in unit.statistics.items() if isinstance(record, CountedRecord)}
    if few := experts_with_few(unit.task, group.geometry, counts, [*unit.statistics]):
        curve = curve.model_copy(update={"few": min(few.values()) < SHARE_TOKENS})
    elif Statistics(passed=counts).unseen:
        curve = to_columns(from_columns(curve)[-1:])  # the group stays dense
    if quantize is None:
        return curve
    return with_bits(curve, problem.with_statistics(replace(statistics, hint=curve.hint)).group, quantize)
