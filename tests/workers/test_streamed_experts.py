"""A layer whose experts stream past in slices: the same bits as the whole layer, forwards and backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.families.fused import fused_tensors
from pipeline.units.sharding import expert_ranges
from pipeline.units.units import Backward, Forward
from stores.activations import ActivationStore
from tests import factories
from tests.workers import bench
from workers.config import WorkerConfig
from workers.differentiable import DifferentiableLayer, LayerGradients
from workers.gradient_samples import GradientSamples, SamplesState
from workers.hidden import HiddenStates
from workers.layers import LayerReader
from workers.tapped_layer import TappedLayer
from workers.worker import Worker

LAYER, WHOLE = 1, 100
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "granitemoe",
    *factories.FOREIGN,
    *factories.CHUNKED,
    "qwen3_5_moe_text",
    "nemotron_h",
)


@pytest.fixture(scope="module", params=FAMILIES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    source = factories.make_model(tmp_path_factory.mktemp("mixture"), request.param)
    setup = bench.make_setup(source, tmp_path_factory.mktemp("run"), experts=WHOLE)
    return replace(setup, source=setup.source.with_parts(fused_tensors(setup.geometry)))


def block_of(setup: WorkerConfig, experts: int, dtype: torch.dtype = torch.float32) -> TappedLayer:
    return LayerReader(replace(setup, experts=experts, dtype=dtype), torch.device("cpu")).block(LAYER, None)


def hidden_of(setup: WorkerConfig, samples: int = 2) -> Tensor:
    shape = samples, bench.SEQUENCE, setup.geometry.hidden
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2, 3])
def test_slices_give_the_output_of_the_whole_layer(setup: WorkerConfig, experts: int) -> None:
    hidden_BSD = hidden_of(setup)
    whole, sliced = (block_of(setup, size) for size in (WHOLE, experts))
    assert (whole.parts, sliced.parts > 1) == (1, True)
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


def test_weighed_inputs_are_those_of_the_tokens_that_pass_times_their_weights(tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", "llama4_text")
    setup = bench.make_setup(source, tmp_path / "run", experts=WHOLE)
    setup = replace(setup, source=setup.source.with_parts(fused_tensors(setup.geometry)))
    block, seen = block_of(setup, WHOLE), dict[str, Tensor]()
    expert = next(each for each in setup.geometry.layers[LAYER].mlps if each.weighed)
    points = (expert.weighed, expert.routing, expert.input)
    block.run(hidden_of(setup), [(point, lambda values, point=point: seen.update({point: values})) for point in points])
    inputs_TD, weights_T1, read_tD = (seen[point] for point in points)
    passing_t = weights_T1[:, 0].nonzero()[:, 0]
    assert 0 < len(passing_t) < len(inputs_TD)
    assert torch.equal(read_tD, (inputs_TD * weights_T1)[passing_t])


@pytest.mark.slow
@pytest.mark.parametrize("every_expert", [False, True])
@pytest.mark.parametrize("experts", [1, 3])
def test_slices_give_the_gradients_of_the_whole_layer(setup: WorkerConfig, experts: int, every_expert: bool) -> None:
    hidden_BSD = hidden_of(setup)
    mlps = setup.geometry.layers[LAYER].mlps
    points = ["mid", "out", *(f"{matrix.role}.out" for block in mlps for matrix in block.matrices)]
    points += [f"pull:{'+'.join(matrix.role for matrix in block.readers)}" for block in mlps]
    gradient_BSD = torch.randn(hidden_BSD.shape, generator=torch.Generator().manual_seed(4))
    layer = DifferentiableLayer(block_of(setup, WHOLE))
    with layer.block.every_expert() if every_expert else contextlib.nullcontext():
        expected = [
            layer.pull_back(hidden_SD, lambda output_SD, number=number: gradient_BSD[number] * output_SD, points)
            for number, hidden_SD in enumerate(hidden_BSD)
        ]
    seen: dict[str, list[Tensor]] = {point: [] for point in points}

    def take(gradients: Mapping[str, Tensor]) -> None:
        for point, gradient in gradients.items():
            seen[point].append(gradient)

    parted = LayerGradients(DifferentiableLayer(block_of(setup, experts)), points, every_expert)
    state = SamplesState(HiddenStates(ActivationStore(setup.run_dir / "parts.zarr"), 2**24), ("gradient", 2, 0), "all")
    samples = GradientSamples(parted, state, range(len(hidden_BSD)), lambda number: hidden_BSD[number])
    inputs = samples.back(None, lambda number, output_SD: gradient_BSD[number] * output_SD, take, reads_output=True)
    for number, (input_SD, (whole_SD, at)) in enumerate(zip(inputs, expected, strict=True)):
        assert torch.equal(input_SD, whole_SD)
        for point in points:
            assert torch.equal(seen[point][number], at[point]), point


@pytest.mark.slow
@pytest.mark.sample(4)
def test_parts_that_a_worker_did_not_do_are_passed_again(setup: WorkerConfig) -> None:
    expected = outputs_of(bench.make_worker(setup), Forward("dense", LAYER, 0, replay=(None,)))
    parts = range(len(expert_ranges(setup.geometry.layers[LAYER].num_experts, 2)))
    for numbers in (parts, parts[-1:], [0, *parts], [parts[-1], parts[0], parts[-1]]):
        worker = bench.make_worker(replace(setup, experts=2))
        for part in numbers:
            found = outputs_of(worker, Forward("dense", LAYER, 0, part=part, replay=(None,)))
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
        assert [key[:3] for key in worker.hidden.held] == [("dense", LAYER + 1, 0)], "nothing is left between slices"


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("forth", [False, True])
def test_parts_of_the_backward_pass_read_an_expert_once_for_all_shards(
    forth: bool, setup: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the whole layer. With `forth`, the outputs that they follow from are computed in parts, too."""
    setup = replace(setup, gradient_samples=bench.SAMPLES)
    whole, worker = (bench.make_worker(replace(setup, experts=size)) for size in (WHOLE, 2))
    inputs = [
        whole.execute(Forward("dense", LAYER, shard, keep_inputs=True, replay=(None,))).inputs for shard in range(2)
    ]
    units = [Backward(LAYER, shard, (record,), probe=True) for shard, record in enumerate(inputs)]
    for unit in units:
        whole.execute(unit)
    parts = [*range(len(expert_ranges(setup.geometry.layers[LAYER].num_experts, 2)))]
    read: list[int] = []
    reading = LayerReader._read_layer
    monkeypatch.setattr(LayerReader, "_read_layer", lambda *of: read.append(of[4]) or reading(*of))
    for part in parts if forth else ():
        for unit in units:
            worker.execute(replace(unit, part=part, forth=True))
    assert read == (parts if forth else [])
    for part in reversed(parts):
        for unit in units:
            worker.execute(replace(unit, part=part))
    for unit in units:
        key = ("gradient", LAYER, unit.shard)
        found, expected = worker.hidden.get(key), whole.hidden.get(key)
        assert found is not None
        assert expected is not None
        assert torch.equal(found.read(0, 2), expected.read(0, 2))
    if forth:
        assert sorted(read) == sorted([*parts, *parts[:-1]]), "the last slice is held when the way back begins"
        assert len(worker.hidden.held) == 2, "nothing is left between slices"


def outputs_of(worker: Worker, unit: Forward) -> Tensor | None:
    worker.execute(unit)
    held = worker.hidden.get(("dense", LAYER + 1, 0))
    return None if held is None else held.read(0, 3)


def test_every_token_may_go_to_one_expert(tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", "qwen3_moe")
    setup = bench.make_setup(source, tmp_path, experts=WHOLE)
    blocks = [block_of(setup, size) for size in (WHOLE, 2)]
    for block in blocks:
        with torch.inference_mode(False), torch.no_grad():
            block.module.role("router").weight.zero_()
    hidden_BSD = hidden_of(setup)
    counts: dict[str, int] = {}
    taps = [
        (each.writer.reads, lambda values, name=each.name: counts.update({name: len(values)}))
        for each in setup.geometry.layers[LAYER].mlps
    ]
    whole_BSD, sliced_BSD = (block.run(hidden_BSD, taps) for block in blocks)
    assert whole_BSD is not None
    assert sliced_BSD is not None
    assert torch.equal(whole_BSD, sliced_BSD)
    assert len(counts) == 2  # as many as a token passes
    assert {*counts.values()} == {hidden_BSD.shape[0] * hidden_BSD.shape[1]}
