"""Predicts the curve of a group: whole, or begun, in pieces, and joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from manifests.quantize import Quantize
from manifests.records import ArrayRecord, CountedRecord, Curve
from pipeline.families.family import LayerGeometry
from pipeline.methods.method import Dividing, Method, Moment, Predicting, Statistics
from pipeline.ranks.curves import from_columns, to_columns
from pipeline.rounding.choices import with_bits
from pipeline.units.curves import BeginCurve, CurvePieces, CurveUnit, Predict

Read = Callable[[Mapping[Moment, ArrayRecord]], Statistics]


def curve_result(
    unit: CurveUnit,
    method: Method,
    quantize: Quantize | None,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    read: Read,
) -> Any:
    """Return the unit's result. `weights`: the group's, dense. `read`: returns statistics as methods receive them."""
    if isinstance(unit, Predict):
        return _curve(unit, method, quantize, geometry, weights, read)
    assert isinstance(method, Dividing)
    statistics = read(unit.statistics)
    if isinstance(unit, BeginCurve):
        return method.begin_curve(unit.task, geometry, weights, statistics)
    assert isinstance(unit, CurvePieces)
    return method.curve_pieces(unit.task, geometry, weights, statistics, unit.begun, unit.numbers)


def _curve(
    unit: Predict,
    method: Method,
    quantize: Quantize | None,
    geometry: LayerGeometry,
    weights: Mapping[str, Tensor],
    read: Read,
) -> Curve:
    assert isinstance(method, Predicting)
    choosing = quantize is not None and quantize.bits == "auto"
    statistics = read(unit.statistics) if choosing or not unit.pieces else Statistics()
    if unit.pieces:
        assert isinstance(method, Dividing)
        curve = method.join_curve(unit.task, geometry, unit.begun, unit.pieces)
    else:
        curve = method.curve(unit.task, geometry, weights, statistics)
    if any(isinstance(record, CountedRecord) and not record.tokens for record in unit.statistics.values()):
        curve = to_columns(from_columns(curve)[-1:])  # no token passed a point: the group stays dense
    if quantize is None or not choosing:
        return curve
    solve = partial(method.compress, unit.task, geometry, weights, replace(statistics, hint=curve.told))
    return with_bits(curve, unit.task, quantize, weights, statistics, solve, geometry)
