"""Rows of weights in stored formats: a cut record decodes to the same rows of the whole weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from manifests.parts import FusedPart, stacked
from stores.formats import decode
from stores.headers import TensorRecord
from stores.weight_parts import cut
from tests.encoders import ENCODERS
from tests.stores.test_formats import Stored

ROWS, COLUMNS = 32, 64
KINDS = [kind for kind in ENCODERS if kind != "mxfp4"]


def stored_part(record: TensorRecord, file: bytes) -> Tensor:
    """The numbers of a record from the bytes of its file."""
    return torch.frombuffer(bytearray(file[record.begin : record.end]), dtype=record.torch_dtype).view(record.shape)


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_weight(kind: str, first: int, tmp_path: Path) -> None:
    """Formats by rows read those rows alone; others read the whole weight, and give its rows."""
    stored = Stored(tmp_path, kind)
    file = (tmp_path / "model.safetensors").read_bytes()
    shapes = {"a.weight": (16, COLUMNS), "b.weight": (16, COLUMNS)}
    part = next(part for part in stacked(shapes) if part.begin == first * COLUMNS)
    record = cut(stored.weight, part)
    assert (record.name, record.shape) == (part.name, (16, COLUMNS))
    found = decode(record, {name: stored_part(at, file) for name, at in record.parts})
    assert torch.equal(found, stored.decoded[first : first + 16])
    by_rows = not kind.startswith(("gptq", "awq"))
    codes = sum(at.num_bytes for name, at in record.parts if name in ("weight", "weight_packed"))
    whole = sum(at.num_bytes for name, at in stored.weight.parts if name in ("weight", "weight_packed"))
    assert (record.part is None) == by_rows
    assert codes == (whole // 2 if by_rows else whole)


def test_rows_in_turns_keep_their_format_as_a_block(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "int8")
    file = (tmp_path / "model.safetensors").read_bytes()
    shapes = {"a.weight": (16, COLUMNS), "b.weight": (16, COLUMNS)}
    for place, part in enumerate(stacked(shapes, interleaved=True)):
        assert isinstance(part, FusedPart)
        record = cut(stored.weight, part)
        found = decode(record, {name: stored_part(at, file) for name, at in record.parts})
        assert torch.equal(found, stored.decoded[place::2])
