"""Staged layers: read back against their digests, and swept when no entry names them."""

from pathlib import Path

import pytest
import torch

from manifests.errors import CorruptError
from stores.durable import partial_path
from stores.run_directory import STAGED, RunDirectory
from stores.staging import read_staged, write_staged


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    (tmp_path / STAGED).mkdir()
    tensors = {"a": torch.randn(3, 4).bfloat16(), "mask": torch.arange(5, dtype=torch.uint8)}
    found = read_staged(tmp_path, write_staged(tmp_path, 2, tensors))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    (tmp_path / STAGED).mkdir()
    record = write_staged(tmp_path, 0, {"a": torch.randn(3, 4)})
    path = tmp_path / record.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="tensor a") as raised:
        read_staged(tmp_path, record)
    assert raised.value.path == record.path


def test_strays_are_swept(tmp_path: Path) -> None:
    (tmp_path / STAGED).mkdir()
    kept, stray = (write_staged(tmp_path, layer, {"a": torch.ones(2)}) for layer in (0, 1))
    partial_path(tmp_path / STAGED / "layer-00002.x.safetensors").write_bytes(b"x")
    theirs = tmp_path / STAGED / "notes.txt"  # such as where `staged` is a link to another folder
    theirs.write_text("x")
    assert RunDirectory(tmp_path).sweep_staged([kept]) == 2
    assert theirs.exists()
    assert (tmp_path / kept.path).exists()
    assert not (tmp_path / stray.path).exists()
