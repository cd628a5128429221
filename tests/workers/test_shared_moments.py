"""Moments that experts share are read once for a layer; those of layers with one MLP are not held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from manifests.records import ArrayRecord
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.methods.method import Moment, Statistics
from pipeline.methods.moments import factored_mean
from tests.families.geometries import llama
from workers.shared_moments import SharedMoments

INPUT, METRIC, OWN = Moment("mlp.in"), Moment("out", kind="gradient"), Moment("experts.0.down.in")
RECORD = ArrayRecord.model_construct(path="statistics/1")  # only compared
OTHER = ArrayRecord.model_construct(path="statistics/2")


def mixture(index: int = 0) -> LayerGeometry:
    layer = llama("gqa").layers[index]
    second = replace(layer.mlps[0], name="second")
    return replace(layer, blocks=(*layer.blocks, second))


class Reads:
    """Counts the moments that are read."""

    def __init__(self) -> None:
        self.points: list[str] = []

    def of(self, moment: Moment) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            self.points.append(moment.point)
            return torch.eye(3, dtype=torch.float64)[None] * len(self.points)

        return read


def test_shared_moments_are_read_and_factored_once() -> None:
    shared, reads = SharedMoments(), Reads()
    for _ in range(3):
        held = shared.of(mixture())
        moments = {moment: held.get(moment, RECORD, reads.of(moment)) for moment in (INPUT, METRIC, OWN)}
        statistics = Statistics(moments, 4, factors=held.factors)
        factor = factored_mean(statistics, INPUT)
    assert reads.points == ["mlp.in", "out", *3 * ["experts.0.down.in"]]
    assert factored_mean(Statistics(moments, 4, factors=shared.factors), INPUT) is factor


def test_another_layer_record_or_release_reads_again() -> None:
    shared, reads = SharedMoments(), Reads()
    first = shared.of(mixture()).get(INPUT, RECORD, reads.of(INPUT))
    assert shared.of(mixture()).get(INPUT, RECORD, reads.of(INPUT)) is first
    assert shared.of(mixture()).get(INPUT, OTHER, reads.of(INPUT)) is not first
    assert shared.of(mixture(1)).get(INPUT, OTHER, reads.of(INPUT)) is not first
    shared.release()
    shared.of(mixture(1)).get(INPUT, OTHER, reads.of(INPUT))
    assert len(reads.points) == 4


def test_a_layer_with_one_mlp_holds_nothing() -> None:
    shared, reads = SharedMoments(), Reads()
    for _ in range(2):
        held = shared.of(llama("gqa").layers[0])
        held.get(INPUT, RECORD, reads.of(INPUT))
        held.factors[INPUT] = torch.eye(3), None  # type: ignore[assignment]  # nothing is factored
    assert reads.points == ["mlp.in", "mlp.in"]
    assert held.factors == {}
