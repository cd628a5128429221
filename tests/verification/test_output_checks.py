"""Checks of OUTPUT alone: each names the tensor that does not fit."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from pipeline.verification.output_checks import (
    _bitmap_faults,
    _form_faults,
    _is_finite,
    check_output_files,
    check_values,
)
from stores.checkpoint import index_content
from tests.memory_storage import Memory

INDEX, SHARD = "model.safetensors.index.json", "model-00001.safetensors"


def entry(dtype: str, *shape: int, shard: str = SHARD) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [*shape], "shard": shard, "form": "dense"}


def output_of(*names: str) -> tuple[Memory, dict[str, Any]]:
    """Return a checkpoint with tensors of these names, and its record."""
    output = Memory()
    output.write(SHARD, save({name: torch.zeros(2, 3) for name in names}))
    counts = {"bytes": {"compressed": 24 * len(names)}, "parameters": {"compressed": 6 * len(names)}}
    record = {"tensors": {name: entry("F32", 2, 3) for name in names}, "shards": {SHARD: {}}, "counts": counts}
    weight_map = dict.fromkeys(names, SHARD)
    output.write(INDEX, index_content(weight_map, 24 * len(names), 6 * len(names)))
    return output, record


def test_files_that_are_their_record_have_no_fault() -> None:
    finding = check_output_files(*output_of("a", "b"))
    assert finding.faults == ()
    assert finding.detail == "2 tensors in headers, index and record"


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"a": entry("F32", 3, 2)}, ["a: F32 [2, 3], compression.json says F32 [3, 2]"]),
        ({"a": entry("BF16", 2, 3)}, ["a: F32 [2, 3], compression.json says BF16 [2, 3]"]),
        ({"c": entry("F32", 1)}, ["c: in compression.json only", "differs from the index"]),
        ({"a": None}, ["a: not in compression.json", "differs from the index"]),
    ],
    ids=["shape", "dtype", "only in the record", "only in the file"],
)
def test_a_record_that_differs_from_the_files(changes: dict[str, Any], faults: list[str]) -> None:
    output, record = output_of("a", "b")
    tensors = {name: value for name, value in {**record["tensors"], **changes}.items() if value is not None}
    found = check_output_files(output, {**record, "tensors": tensors}).faults
    assert len(found) == len(faults)
    assert all(fault in line for fault, line in zip(faults, found, strict=True))


def test_a_shard_that_the_record_does_not_list() -> None:
    output, record = output_of("a")
    faults = check_output_files(output, {**record, "shards": {}}).faults
    assert len(faults) == 1
    assert "named by tensors, but not among the shards" in faults[0]


def values_of(*pieces: bytes, dtype: torch.dtype, sha256: str | None = None) -> tuple[str, ...]:
    checkpoint: Any = SimpleNamespace(
        stored={"a": SimpleNamespace(torch_dtype=dtype, file=SHARD)}, copy_bytes=lambda name: iter(pieces)
    )
    digest = hashlib.sha256(b"".join(pieces)).hexdigest() if sha256 is None else sha256
    return check_values(checkpoint, {"tensors": {"a": {"sha256": digest}}}).faults


def test_values_are_finite_and_have_their_digest() -> None:
    good, bad = struct.pack("<2f", 1.0, -2.0), struct.pack("<2f", 1.0, float("nan"))
    assert values_of(good, good, dtype=torch.float32) == ()
    assert values_of(dtype=torch.float32) == ()  # a tensor without numbers
    assert values_of(bad, good, dtype=torch.float32) == (f"{SHARD}: a: holds NaN or infinity",)
    (fault,) = values_of(good, dtype=torch.float32, sha256="0" * 64)
    assert "sha256 differs" in fault
    assert len(values_of(bad, dtype=torch.float32, sha256="0" * 64)) == 2


@pytest.mark.parametrize(
    ("dtype", "piece", "finite"),
    [
        (torch.float16, b"\x00\x7c", False),  # infinity
        (torch.bfloat16, b"\x80\x7f", False),
        (torch.bfloat16, b"\x7f\x7f", True),  # the largest number
        (torch.float64, struct.pack("<d", float("-inf")), False),
        (torch.float8_e4m3fn, b"\x7e\x7f", False),
        (torch.float8_e4m3fn, b"\x7e\xfe", True),
        (torch.int32, b"\xff\xff\xff\xff", True),
    ],
)
def test_numbers_of_each_width(dtype: torch.dtype, piece: bytes, finite: bool) -> None:
    assert _is_finite(piece, dtype) is finite


PRUNED = {"form": "pruned", "width": 5}
LAYERS = [{}, {"down": PRUNED}]


@pytest.mark.parametrize(
    ("name", "form", "fits"),
    [
        ("model.layers.1.mlp.down.weight", PRUNED, True),
        ("model.layers.1.mlp.down.weight", {**PRUNED, "width": 6}, False),
        ("model.layers.0.mlp.down.weight", PRUNED, False),
        ("model.layers.2.mlp.down.weight", PRUNED, False),  # there are two layers
        ("model.layers.-1.mlp.down.weight", PRUNED, False),
        ("model.norm.weight", PRUNED, False),
        ("model.norm.weight", {"form": "dense"}, True),
        ("model.layers.7.norm.weight", {"form": "dense"}, True),
    ],
)
def test_the_form_of_a_tensor_is_one_of_its_layer(name: str, form: dict[str, Any], fits: bool) -> None:
    record = {"tensors": {name: {**form, "dtype": "F32", "shape": [1], "sha256": "", "origin": "", "shard": SHARD}}}
    faults = [*_form_faults("model.layers", LAYERS, record)]
    assert len(faults) == (not fits)
    assert all(fault.startswith(f"{name}: ") for fault in faults)


class Core(nn.Module):
    nnz, shape = 3, (2, 5)


@pytest.mark.parametrize(
    ("mask", "fits"),
    [
        (b"\x07\x00", True),
        (b"\x01\x03", True),  # bit 9 is the last of ten
        (b"\x03\x00", False),
        (b"\x0f\x00", False),
        (b"\x03\x04", False),  # three, one of them beyond the end
    ],
)
def test_a_bitmap_marks_as_many_positions_as_there_are_values(mask: bytes, fits: bool) -> None:
    def copy_bytes(name: str) -> Iterator[bytes]:
        assert name == "core.mask"
        yield mask[:1]
        yield mask[1:]

    model = nn.ModuleDict({"core": Core(), "other": nn.Linear(1, 1)})
    checkpoint: Any = SimpleNamespace(tensors={"core.mask": None}, copy_bytes=copy_bytes)
    assert len([*_bitmap_faults(checkpoint, model)]) == (not fits)


def test_a_missing_bitmap_is_no_bitmap_s_fault() -> None:
    checkpoint: Any = SimpleNamespace(tensors={})
    assert [*_bitmap_faults(checkpoint, nn.ModuleDict({"core": Core()}))] == []  # `check_forms` names it
