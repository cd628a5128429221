"""Safetensors headers: ours read by the library and the other way round; every lie in one is found."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from manifests.errors import InputError, StorageError
from stores.headers import DTYPES, build_header, read_header


def entry(dtype: str = "F32", shape: Any = None, offsets: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2, 3] if shape is None else shape, "data_offsets": offsets or [0, 24]}


def write(path: Path, header: Any, data_bytes: int = 24, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data_bytes)
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, 3).to(dtype) for name, dtype in DTYPES.items() if name != "F8_E8M0"}
    tensors |= {"scalar": torch.zeros(()), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    records = read_header(tmp_path, "a.safetensors")
    assert {name: (record.torch_dtype, record.shape) for name, record in records.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert all(record.num_bytes == tensors[name].nbytes for name, record in records.items())


def test_build_and_read_agree(tmp_path: Path) -> None:
    specs = [("b", "F64", (2, 2)), ("ü", "BF16", ()), ("a", "U8", (0, 5))]
    header, records = build_header(specs, {"format": "pt"})
    (tmp_path / "a").write_bytes(header + b"\0" * 34)
    assert len(header) % 8 == 0
    found = read_header(tmp_path, "a")
    assert [(r.name, r.dtype, r.shape, r.begin, r.end) for r in records] == sorted(
        ((r.name, r.dtype, r.shape, r.begin, r.end) for r in found.values()), key=lambda item: (item[3], item[4])
    )


HOSTILE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "length beyond the file": ({"a": entry()}, {"length": 10_000}, "truncated: expected a header of 10000 bytes"),
    "absurd length": ({"a": entry()}, {"length": 2**63}, "header of 9223372036854775808 bytes"),
    "length cuts the JSON": ({"a": entry()}, {"length": 10}, "damaged safetensors header"),
    "no JSON": (b"{oops", {}, "damaged safetensors header"),
    "no UTF-8": (b'{"\xff": 1}', {}, "damaged safetensors header"),
    "a list": ([1], {}, "a JSON list"),
    "deep nesting": (b"[" * 100_000, {}, "damaged safetensors header"),
    "same name twice": (b'{"a": 1, "a": 2}', {}, "'a' occurs twice"),
    "entry no object": ({"a": 3}, {}, "expected dtype, shape and data_offsets"),
    "field missing": ({"a": {"dtype": "F32", "shape": [2, 3]}}, {}, "expected dtype, shape and data_offsets"),
    "field too many": ({"a": {**entry(), "x": 1}}, {}, "expected dtype, shape and data_offsets"),
    "unknown dtype": ({"a": entry("F31")}, {}, "unknown dtype 'F31'"),
    "dtype no text": ({"a": {**entry(), "dtype": ["F32"]}}, {}, "unknown dtype"),
    "negative size": ({"a": entry(shape=[-2, -3])}, {}, "not a list of sizes"),
    "size no integer": ({"a": entry(shape=[2.0, 3])}, {}, "not a list of sizes"),
    "size a bool": ({"a": entry(shape=[True, 6])}, {}, "not a list of sizes"),
    "size astronomical": ({"a": entry(shape=[2**63])}, {}, "not a list of sizes"),
    "a million sizes": ({"a": entry(shape=[2**62] * 200_000)}, {}, "not a list of sizes"),
    "same name twice among many": (
        ("{" + "".join(f'"{n}":1,' for n in range(50_000)) + '"7":1}').encode(),
        {},
        "'7' occ",
    ),
    "shape no list": ({"a": entry(shape="6")}, {}, "not a list of sizes"),
    "shape does not fit": ({"a": entry(shape=[2, 4])}, {}, r"F32 \[2, 4\] takes 32 bytes, its data_offsets hold 24"),
    "product overflows": ({"a": entry(shape=[2**62, 2**62, 4])}, {}, "takes .* bytes"),
    "offsets reversed": ({"a": entry(offsets=[24, 0])}, {}, "not \\[begin, end\\]"),
    "offsets three": ({"a": entry(offsets=[0, 12, 24])}, {}, "not \\[begin, end\\]"),
    "offsets negative": ({"a": entry(offsets=[-24, 0])}, {}, "not \\[begin, end\\]"),
    "overlap": ({"a": entry(), "b": entry(offsets=[12, 36])}, {"data_bytes": 36}, "'b' overlaps"),
    "same place twice": ({"a": entry(), "b": entry()}, {}, "overlaps"),
    "gap": ({"a": entry(), "b": entry(offsets=[28, 52])}, {"data_bytes": 52}, "'b' leaves a gap"),
    "gap at the start": ({"a": entry(offsets=[4, 28])}, {"data_bytes": 28}, "leaves a gap"),
    "data cut": ({"a": entry()}, {"data_bytes": 23}, "truncated: expected .* bytes"),
    "data too long": ({"a": entry()}, {"data_bytes": 25}, "bytes that no tensor owns"),
    "offsets beyond the file": ({"a": entry(offsets=[2**40, 2**40 + 24])}, {}, "leaves a gap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    header, options, message = HOSTILE[case]
    path = write(tmp_path / "a.safetensors", header, **options)
    with pytest.raises(InputError, match=message) as caught:
        read_header(path.parent, path.name)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_no_room_for_a_length(tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "a").write_bytes(b"\0" * num_bytes)
    with pytest.raises(InputError, match=f"truncated: {num_bytes} bytes, expected at least 8"):
        read_header(tmp_path, "a")


def test_every_cut_of_a_good_file_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"a": entry()})
    data = path.read_bytes()
    read_header(path.parent, path.name)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(InputError):
            read_header(path.parent, path.name)


def test_every_flip_in_a_header_is_an_input_error_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"a": entry(), "b": entry("BF16", [4], [24, 32])}, data_bytes=32)
    data = path.read_bytes()
    refused = 0
    for position in range(len(data) - 32):
        for bit in (1, 16):
            path.write_bytes(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :])
            try:
                read_header(path.parent, path.name)
            except InputError:
                refused += 1
    assert refused > len(data)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "a").write_bytes(b"a few bytes")
    opened: Callable[..., None] = fail
    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(StorageError, match="Input/output error"):
        read_header(tmp_path, "a")
