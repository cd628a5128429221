"""The curve of an MLP, whole and cut among workers: the same numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

import workers.curves
from manifests.methods import LossAware
from manifests.quantize import Quantize
from manifests.records import CountedRecord, Curve
from pipeline.methods.base import Group
from pipeline.methods.loss_aware.method import LossAwareMethod
from pipeline.methods.method import Moment, Statistics
from pipeline.ranks.curves import from_columns
from pipeline.units.curves import BeginCurve, CurvePieces, CurveUnit, Predict
from tests.families.geometries import llama, other
from tests.methods.loss_aware_weights import make_statistics, make_weights
from workers.curves import curve_result
from workers.solving import GroupProblem


class _Making:
    """One worker after another, each with the statistics anew; `read` counts how often that was."""

    def __init__(self, geometry: str, quantize: Quantize | None) -> None:
        self.where = other(geometry) if geometry in ("opt", "gptj") else llama(geometry)
        self.method, self.quantize, self.read = LossAwareMethod(LossAware(method="loss_aware")), quantize, 0
        self.group = next(group for group in self.method.claims(self.where) if group.name == "mlp")
        self.task = self.group.task(0)
        self.found = make_statistics(self.where, self.group)

    def do(self, unit: CurveUnit) -> object:
        weights = make_weights(self.where, self.task.roles)
        problem = GroupProblem(self.group.with_data(weights), self.quantize)
        made = curve_result(unit, problem, lambda _: self._statistics())
        return made if isinstance(made, Curve) else json.loads(json.dumps(made))

    def _statistics(self) -> Statistics:
        self.read += 1
        return Statistics({moment: value.clone() for moment, value in self.found.moments.items()}, self.found.tokens)

    def cut(self, parts: list[tuple[int, ...]]) -> object:
        shared = self.do(BeginCurve(self.task, {}))
        pieces = {}
        for numbers in parts:
            found = self.do(CurvePieces(self.task, {}, shared, numbers))
            assert isinstance(found, list)
            pieces |= dict(zip(numbers, found, strict=True))
        return self.do(Predict(self.task, {}, shared, tuple(pieces[number] for number in range(self.task.pieces))))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("geometry", ["gqa", "biased", "opt", "gptj"])
def test_the_same_curve_for_any_cut(geometry: str) -> None:
    making = _Making(geometry, None)
    whole = making.do(Predict(making.task, {}))
    numbers = tuple(range(making.task.pieces))
    assert len(numbers) == 8
    for parts in ([numbers], [(number,) for number in reversed(numbers)], [numbers[::2], numbers[1::2]]):
        making.read = 0
        assert making.cut(parts) == whole
        assert making.read == 1 + len(parts), "what joins pieces reads no statistics"


def test_bits_are_chosen_on_the_joined_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are chosen by the same statistics as for the whole curve."""
    given: list[tuple[Curve, Statistics]] = []

    def with_bits(curve: Curve, group: Group[Any], quantize: Quantize) -> Curve:
        given.append((curve, group.statistics))
        return curve

    monkeypatch.setattr(workers.curves, "with_bits", with_bits)
    making = _Making("gqa", Quantize(bits="auto", group=32))
    assert making.cut([(0, 2, 4, 6), (1, 3, 5, 7)]) == making.do(Predict(making.task, {}))
    (cut, some), (whole, same) = given
    assert cut == whole
    assert some.moments.keys() == same.moments.keys() == making.found.moments.keys()


def test_the_curve_of_a_group_that_no_token_reached_is_its_dense_point() -> None:
    """Zeros would promise that every size loses nothing."""
    making = _Making("gqa", None)
    whole = making.do(Predict(making.task, {}))
    moment = Moment("down.in")
    path, digest = f"statistics/0/{'0' * 32}", "0" * 64
    record = CountedRecord(
        version=1, path=path, shape=(1, 8, 8), dtype="float64", chunks=(1, 8, 8), symmetric=True,
        metadata_sha256=digest, checksums=("",), tokens=0,
    )  # fmt: skip
    unseen = making.do(Predict(making.task, {moment: record}))
    assert isinstance(whole, Curve)
    assert isinstance(unseen, Curve)
    assert from_columns(unseen) == from_columns(whole)[-1:]
    assert from_columns(unseen)[0].loss == 0.0
