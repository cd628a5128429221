"""Layers as a worker reads them: from the source, or from a reading for all nodes."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import processor_lamina
from manifests.errors import LostInputError, NumericsError
from pipeline.units.reads import ReadLayer
from pipeline.units.units import Forward
from stores.source import SourceCheckpoint
from tests.workers.bench import SAMPLES, SEQUENCE, held, layer_names, make_setup, make_worker, save_source, solve_layer
from workers.layers import LayerReader
from workers.tensor_transfer import LocalTransfer
from workers.worker import Worker

PARTS = 3


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all tensors that are read from the source."""
    names: list[str] = []
    real = SourceCheckpoint.read

    def reading(source: SourceCheckpoint, wanted: Any, *bring: Any) -> dict[str, Tensor]:
        wanted = list(wanted)
        names.extend(wanted)
        return real(source, wanted, *bring)

    monkeypatch.setattr(SourceCheckpoint, "read", reading)
    return names


def parts_of(worker: Worker, layer: int) -> tuple[Any, ...]:
    return tuple(worker.execute(ReadLayer(layer, part, PARTS)).tensors for part in range(PARTS))


def test_parts_of_a_layer_are_all_of_it_once(llama: Path, tmp_path: Path, read: list[str]) -> None:
    setup = make_setup(llama, tmp_path / "run")
    parts = parts_of(make_worker(setup), 1)
    assert sorted(read) == sorted(layer_names(setup, 1))
    assert sorted(name for part in parts for name in part) == sorted(read)
    sizes = sorted(sum(tensor.nbytes for tensor in part.values()) for part in parts)
    largest = max(tensor.nbytes for part in parts for tensor in part.values())
    assert sizes[-1] - sizes[0] <= largest


def test_what_was_read_for_all_is_not_read_again(llama: Path, tmp_path: Path, read: list[str]) -> None:
    setup = make_setup(llama, tmp_path / "run")
    reader, alone, worker = (make_worker(setup) for _ in range(3))
    first, second = parts_of(reader, 0), parts_of(reader, 1)
    alone.execute(Forward("dense", 0, 0))
    alone.execute(Forward("dense", 1, 0, replay=(None,)))
    read.clear()
    worker.execute(Forward("dense", 0, 0, weights=first, ahead=1, ahead_weights=second))
    worker.execute(Forward("dense", 1, 0, replay=(None,), weights=second))
    assert not set(read) & {*layer_names(setup, 0), *layer_names(setup, 1)}
    assert torch.equal(held(worker, "dense", 2, 0), held(alone, "dense", 2, 0))


def test_what_was_lost_is_read_from_the_source(
    llama: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_setup(llama, tmp_path / "run")
    reader, alone, worker = (make_worker(setup) for _ in range(3))
    parts = parts_of(reader, 0)
    alone.execute(Forward("dense", 0, 0))
    real = LocalTransfer.get

    def get(transfer: LocalTransfer, handle: dict[str, Tensor]) -> dict[str, Tensor]:
        if handle is parts[1]:
            raise LostInputError("gone with its node", ("readlayer/0/1",))
        return real(transfer, handle)

    monkeypatch.setattr(LocalTransfer, "get", get)
    read.clear()
    worker.execute(Forward("dense", 0, 0, weights=parts))
    assert set(read) & set(layer_names(setup, 0)) == set(parts[1])
    assert torch.equal(held(worker, "dense", 1, 0), held(alone, "dense", 1, 0))


@pytest.mark.parametrize(("dtype", "again"), [(torch.float32, False), (torch.float64, True)])
def test_weights_of_the_block_at_hand_are_not_read_again(
    llama: Path, tmp_path: Path, read: list[str], dtype: torch.dtype, again: bool
) -> None:
    """A solve's, while the block that its statistics came from is there; in another dtype they would be others, and the
    block goes."""
    setup = replace(make_setup(llama, tmp_path / "run"), dtype=dtype)
    names = {name: name for name in layer_names(setup, 1)}
    expected = setup.source.read(names)
    reader = LayerReader(setup, torch.device("cpu"))
    reader.block(1, None)
    read.clear()
    found = reader.dense_weights(1, names)
    assert sorted(read) == (sorted(names) if again else [])
    assert (reader.current is None) == again
    reader.block(0, None)
    read.clear()
    anew = reader.dense_weights(1, names)
    assert reader.current is not None
    assert sorted(read) == sorted(names)
    for weights in (found, anew):
        assert weights.keys() == names.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in names)
        assert all(weights[name].dtype == expected[name].dtype for name in names)


@pytest.mark.parametrize("threads", [1, 2, 3, 40])
def test_a_layer_is_read_once_by_all_threads_of_a_worker(
    llama: Path, tmp_path: Path, read: list[str], threads: int
) -> None:
    setup = make_setup(llama, tmp_path / "run", {"method": "lestd"})
    staged, _ = solve_layer(make_worker(setup), 1, {"size": 6000})
    expected = [
        LayerReader(setup, torch.device("cpu")).block(1, record).module.state_dict() for record in (None, staged)
    ]
    reader = LayerReader(replace(setup, threads=threads), torch.device("cpu"))
    there = {name: tensor for name, tensor in setup.source.read(layer_names(setup, 1)).items() if "mlp" in name}
    for record, wanted in zip((None, staged), expected, strict=True):
        read.clear()
        shared = (lambda: there) if record is None else dict
        reader.read_ahead(1, record, shared)
        found = reader.block(1, record).module.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert sorted(read) == ([] if record else sorted(set(layer_names(setup, 1)) - there.keys()))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, threads: int) -> None:
    model = save_source(tmp_path / "model")
    setup = replace(make_setup(model, tmp_path / "run"), threads=threads)
    name = layer_names(setup, 1)[3]
    record = setup.source.tensors[name]
    with open(model / record.file, "r+b") as file:
        file.seek(record.begin)
        file.write(struct.pack("<f", float("nan")))
    reader = LayerReader(setup, torch.device("cpu"))
    for _ in range(2):
        reader.read_ahead(1)
        with pytest.raises(NumericsError, match=f"source: tensor {name} holds NaN"):
            reader.block(1, None)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_in_turn(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and compressed, forwards and back, in the dtype of the checkpoint and in float32."""
    monkeypatch.setattr(processor_lamina, "multiplies_fast", lambda dtype: False)
    setup = make_setup(save_source(tmp_path / "model", dtype=stored), tmp_path / "run", {"method": "lestd"})
    staged, _ = solve_layer(make_worker(setup), 1, {"size": 6000})
    setup = replace(setup, dtype=stored if dtype == torch.bfloat16 else dtype)
    generator = torch.Generator().manual_seed(1)
    hidden_BSD = torch.randn(SAMPLES, SEQUENCE, setup.geometry.hidden, generator=generator).to(setup.dtype)

    def output(reader: LayerReader, layer: int, record: Any) -> Tensor:
        found = reader.block(layer, record).run(hidden_BSD)
        assert found is not None
        return found

    reader = LayerReader(setup, torch.device("cpu"))
    for layer, record in [(0, None), (1, None), (1, staged), (0, None), (1, staged), (1, None), (1, None)]:
        assert torch.equal(
            output(reader, layer, record), output(LayerReader(setup, torch.device("cpu")), layer, record)
        )
    for layer in (1, 0):
        alone = LayerReader(setup, torch.device("cpu")).differentiable_block(layer)
        block = reader.differentiable_block(layer)
        assert torch.equal(block.run(hidden_BSD[0]), alone.run(hidden_BSD[0]))
