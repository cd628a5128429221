"""Computes the curve of a group, or some pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from manifests.records import ArrayRecord, CountedRecord, Curve
from pipeline.methods.capabilities import Dividing, Predicting
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
    method, statistics = problem.method, read(unit.statistics)
    assert isinstance(method, Dividing)
    if isinstance(unit, BeginCurve):
        return method.begin_curve(problem.group, problem.geometry, problem.weights, statistics)
    assert isinstance(unit, CurvePieces)
    return method.curve_pieces(problem.group, problem.geometry, problem.weights, statistics, unit.shared, unit.numbers)


def _curve(unit: Predict, problem: GroupProblem, read: Read) -> Curve:
    method, group, geometry, weights = problem.method, problem.group, problem.geometry, problem.weights
    assert isinstance(method, Predicting)
    quantize = problem.quantize if problem.quantize is not None and problem.quantize.bits == "auto" else None
    statistics = read(unit.statistics) if quantize is not None or not unit.pieces else Statistics()
    if unit.pieces:
        assert isinstance(method, Dividing)
        curve = method.join_curve(group, geometry, unit.shared, unit.pieces)
    else:
        curve = method.curve(group, geometry, weights, statistics)
    counts = {moment: record.tokens for moment, record in unit.statistics.items() if isinstance(record, CountedRecord)}
    if few := experts_with_few(group, geometry, counts, [*unit.statistics]):
        curve = curve.model_copy(update={"few": min(few.values()) < SHARE_TOKENS})
    elif Statistics(passed=counts).unseen:
        curve = to_columns(from_columns(curve)[-1:])  # the group stays dense
    if quantize is None:
        return curve
    solve = partial(method.compress, group, geometry, weights, replace(statistics, hint=curve.hint))
    return with_bits(curve, group, quantize, weights, statistics, solve, geometry)
