"""Weights read an expert at a time: the same as all at once, few in memory, and factors handed over in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.methods.experts.mixture import ROUTER
from pipeline.units.units import Write
from tests import factories
from tests.workers import bench
from workers.layers import LayerReader
from workers.streamed_weights import HELD, StreamedWeights
from workers.tensor_transfer import LocalTransfer
from workers.written_tensors import WrittenTensors

EXPERTS = [[f"experts.{number}.{role}" for role in ("gate", "down")] for number in range(6)]


class Disk:
    """Counts what is read, and how many of the experts that it gave are alive."""

    def __init__(self) -> None:
        self.reads: list[Sequence[str]] = []

    def begin(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        self.reads.append(names)
        return {name: torch.full((2,), float(self._number(name))) for name in names}

    def _number(self, name: str) -> int:
        return int(name.split(".")[1]) if name.startswith("experts.") else -1


@pytest.fixture
def streamed() -> tuple[StreamedWeights, Disk]:
    disk = Disk()
    dtypes = {name: torch.float32 for own in EXPERTS for name in own} | {"router.weight": torch.float32}
    with ThreadPoolExecutor(1) as thread:
        yield StreamedWeights(dtypes, EXPERTS, disk.begin, dict, thread), disk


def test_each_expert_is_read_once_in_a_pass_and_the_next_ahead(streamed: tuple[StreamedWeights, Disk]) -> None:
    weights, disk = streamed
    assert disk.reads == [["router.weight"]]
    for number, own in enumerate(EXPERTS):
        for _ in range(2):
            assert [float(weights[name][0]) for name in own] == [number, number]
        assert len(weights._held) <= HELD
        weights._thread.submit(lambda: None).result()
        assert disk.reads[-1] == EXPERTS[min(number + 1, 5)]
    assert disk.reads[1:] == EXPERTS
    assert float(weights["router.weight"][0]) == -1.0


def test_two_experts_stay_while_they_are_compared(streamed: tuple[StreamedWeights, Disk]) -> None:
    weights, disk = streamed
    for _ in range(3):
        assert float(weights["experts.4.gate"][0]) == 4.0
        assert float(weights["experts.1.gate"][0]) == 1.0
    assert [names[0] for names in disk.reads].count("experts.4.gate") == 1
    assert [*weights] == [*weights.described] == [name for own in EXPERTS for name in own] + ["router.weight"]
    assert "experts.9.gate" not in weights
    with pytest.raises(KeyError):
        weights["experts.9.gate"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_group_has_the_weights_of_the_source(family: str, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", family)
    setup = bench.make_setup(source, tmp_path / "run", experts=2)
    geometry = setup.geometry.layers[1]
    roles = (*(role for block in geometry.experts for role in block.roles), ROUTER)
    if family == "gpt_oss":
        from pipeline.families.fused import fused_tensors

        setup = replace(setup, source=setup.source.with_parts(fused_tensors(setup.geometry)))
    streaming, whole = (
        LayerReader(replace(setup, experts=held), torch.device("cpu")).group_weights(1, roles) for held in (2, 100)
    )
    assert isinstance(streaming, StreamedWeights)
    assert isinstance(whole, dict)
    assert [*streaming] == [*whole]
    for key, tensor in whole.items():
        assert torch.equal(streaming[key], tensor)
        assert streaming.described[key].dtype == tensor.dtype


def test_written_tensors_are_factors_and_copies_each_fetched_alone(tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", "qwen3_moe")
    setup, transfer = bench.make_setup(source, tmp_path / "run"), LocalTransfer()
    geometry = setup.geometry.layers[0]
    roles = geometry.experts[0].roles
    names = [geometry.tensors([role])[f"{role}.weight"][0] for role in roles]
    handles = tuple(transfer.put({name: torch.full((1,), float(place))}) for place, name in enumerate(names))
    tensors = WrittenTensors(Write(0, handles, roles, {}), setup, transfer)
    assert set(tensors) == {name for name in setup.source.tensors if name.startswith(geometry.prefix)}
    assert len(tensors) == len(set(tensors))
    assert [float(tensors[name]) for name in names] == [0.0, 1.0, 2.0]
    other = next(name for name in tensors if name not in names)
    assert torch.equal(tensors[other], setup.source.read([other])[other])
    some = WrittenTensors(Write(0, handles, roles, {}), setup, transfer, lambda name: name in (names[1], other))
    assert set(some) == {names[1], other}
