"""A layer whose experts stream past in slices: the same bits as the whole layer, forwards and backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import factories
from tests.workers import bench
from workers.config import WorkerConfig
from workers.differentiable import DifferentiableLayer
from workers.layers import LayerReader
from workers.streamed_gradients import StreamedGradients
from workers.tapped_layer import TappedLayer

LAYER, WHOLE = 1, 100
FAMILIES = ("mixtral", "qwen2_moe", *factories.FOREIGN)


@pytest.fixture(scope="module", params=FAMILIES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    source = factories.make_model(tmp_path_factory.mktemp("mixture"), request.param)
    return bench.make_setup(source, tmp_path_factory.mktemp("run"), experts=WHOLE)


def block_of(setup: WorkerConfig, experts: int, dtype: torch.dtype = torch.float32) -> TappedLayer:
    return LayerReader(replace(setup, experts=experts, dtype=dtype), torch.device("cpu")).block(LAYER, None)


def hidden_of(setup: WorkerConfig, samples: int = 2) -> Tensor:
    shape = samples, bench.SEQUENCE, setup.geometry.hidden
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_slices_give_the_output_of_the_whole_layer(setup: WorkerConfig, experts: int) -> None:
    hidden_BSD = hidden_of(setup)
    whole, sliced = (block_of(setup, size) for size in (WHOLE, experts))
    assert whole.streamed is None
    assert sliced.streamed is not None
    expected_BSD = whole.run(hidden_BSD)
    for _ in range(2):
        found_BSD = sliced.run(hidden_BSD)
        assert expected_BSD is not None
        assert found_BSD is not None
        assert torch.equal(found_BSD, expected_BSD)
    held = {
        name.split(".")[-3]
        for name, tensor in sliced.module.state_dict().items()
        if ".experts." in name and not tensor.is_meta
    }
    assert len(held) <= experts


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_slices_give_the_gradients_of_the_whole_layer(setup: WorkerConfig, experts: int) -> None:
    hidden_BSD = hidden_of(setup)
    geometry = setup.geometry.layers[LAYER]
    points = ["mid", "out", *(f"{matrix.role}.out" for block in geometry.mlps for matrix in block.matrices)]
    points += [f"pull:{'+'.join(matrix.role for matrix in block.readers)}" for block in geometry.mlps]
    gradient_BSD = torch.randn(hidden_BSD.shape, generator=torch.Generator().manual_seed(4))
    layer = DifferentiableLayer(block_of(setup, WHOLE))
    expected = [
        layer.pull_back(hidden_SD, lambda output_SD, number=number: gradient_BSD[number] * output_SD, points)
        for number, hidden_SD in enumerate(hidden_BSD)
    ]
    found: list[dict[str, Tensor]] = [{}, {}]
    streamed = StreamedGradients(DifferentiableLayer(block_of(setup, experts)), points)
    counts = dict.fromkeys(points, 0)

    def take(gradients: Any) -> None:
        for point, gradient in gradients.items():
            found[counts[point]][point] = gradient
            counts[point] += 1

    inputs = [
        *streamed.pull_back(
            hidden_BSD, lambda number, output_SD: gradient_BSD[number] * output_SD, take, reads_output=True
        )
    ]
    for (input_SD, at), found_SD, by_point in zip(expected, inputs, found, strict=True):
        assert torch.equal(found_SD, input_SD)
        assert {*by_point} == {*at}
        for point in points:
            assert torch.equal(by_point[point], at[point]), point
