"""Layers that are built in the memory of the one before: the same numbers, and never more than one layer of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import processor_lamina
from pipeline.units.scores import Compare
from tests.workers.bench import SAMPLES, SEQUENCE, layer_names, make_setup, make_worker, save_source, solve_layer
from workers.layer_memory import LayerMemory
from workers.layers import LayerReader

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def slow_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_lamina, "multiplies_fast", lambda dtype: False)


def inside(tensor: Tensor, memory: LayerMemory) -> bool:
    start = tensor.data_ptr() - memory.room.data_ptr()
    return start >= 0 and start + tensor.nbytes <= len(memory.room)


def test_each_layer_is_where_the_one_before_was() -> None:
    memory = LayerMemory()
    layers = [[(3, 5), (40,), (2, 2, 2)], [(41,), (3,)], [(0, 3), (20, 9), (1,)], [(200,)], []]
    taken = [64 + 192 + 64, 192 + 64, 0 + 768 + 64, 832, 0]
    for number, shapes in enumerate(layers):
        memory.begin()
        made = [torch.full(shape, number + at + 0.5, dtype=torch.bfloat16) for at, shape in enumerate(shapes)]
        found = [memory.converted(tensor, torch.float32) for tensor in made]
        assert [inside(tensor, memory) for tensor in found if tensor.numel()] == {
            0: [False, False, False], 1: [True, True], 2: [False, False], 3: [True], 4: [],
        }[number]  # fmt: skip
        for tensor, expected in zip(found, made, strict=True):
            assert torch.equal(tensor, expected.float())
        assert len(memory.room) == max([0, *taken[:number]])
    memory.release()
    assert len(memory.room) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_the_dtype_stays_itself(dtype: torch.dtype) -> None:
    memory, tensor = LayerMemory(), torch.ones(3, dtype=dtype)
    assert memory.converted(tensor, dtype) is tensor
    assert memory.wanted == 0


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_in_turn(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    """Dense and compressed, forwards and back, in the dtype of the checkpoint and in float32."""
    setup = make_setup(save_source(tmp_path / "model", dtype=stored), tmp_path / "run", {"method": "lestd"})
    staged, _ = solve_layer(make_worker(setup), 1, {"size": 6000})
    setup = replace(setup, dtype=stored if dtype == torch.bfloat16 else dtype)
    generator = torch.Generator().manual_seed(1)
    hidden_BSD = torch.randn(SAMPLES, SEQUENCE, setup.geometry.hidden, generator=generator).to(setup.dtype)

    def output(reader: LayerReader, layer: int, record: Any) -> Tensor:
        found = reader.block(layer, record).run(hidden_BSD)
        assert found is not None
        return found

    reader = LayerReader(setup, CPU)
    dense = sum(setup.source.tensors[name].num_bytes for name in layer_names(setup, 0)) // stored.itemsize
    for layer, record in [(0, None), (1, None), (1, staged), (0, None), (1, staged), (1, None), (1, None)]:
        assert torch.equal(output(reader, layer, record), output(LayerReader(setup, CPU), layer, record))
        assert len(reader.memory.room) <= 4.4 * dense
    weight = reader.block(1, None).module.role("q").weight
    assert inside(weight, reader.memory) == (weight.dtype != stored)
    for layer in (1, 0):
        alone = LayerReader(setup, CPU).differentiable_block(layer)
        block = reader.differentiable_block(layer)
        assert torch.equal(block.run(hidden_BSD[0]), alone.run(hidden_BSD[0]))
        assert len(reader.memory.room) <= 4.4 * dense
    reader.release()
    assert len(reader.memory.room) == 0


def test_both_models_side_by_side_take_the_memory_of_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(save_source(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "run", {"method": "lestd"})
    staged, _ = solve_layer(make_worker(setup), 1, {"size": 6000})
    memories: list[tuple[LayerMemory, int]] = []
    begin = LayerMemory.begin

    def beginning(memory: LayerMemory) -> None:
        begin(memory)
        memories.append((memory, len(memory.room)))

    with monkeypatch.context() as patched:
        patched.setattr(LayerMemory, "begin", beginning)
        shared = make_worker(setup).execute(Compare(((1, 2, 3, 4),), (None, staged), head=False)).figures
    assert len({id(memory) for memory, _ in memories}) == 1
    sizes = [size for _, size in memories]
    assert sizes[0] == 0 < sizes[1] <= sizes[2] <= sizes[3] <= 1.1 * sizes[1]
    monkeypatch.setattr(LayerMemory, "converted", lambda _, tensor, dtype: tensor.to(dtype))
    assert make_worker(setup).execute(Compare(((1, 2, 3, 4),), (None, staged), head=False)).figures == shared
