"""Checkpoints of a training: read back whole, swept, and errors of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manifests.errors import CorruptError, StorageError
from pipeline.healing.checkpoints import load_state, save_state, sweep_states
from pipeline.healing.processes import Processes


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight/a.b": torch.randn(3, 4, generator=generator), "best/a.b": torch.ones(2, dtype=torch.bfloat16)}


def test_a_checkpoint_is_read_back_and_older_ones_are_swept(tmp_path: Path) -> None:
    old, new = save_state(tmp_path, 3, state(), Processes()), save_state(tmp_path, 4, state(seed=1), Processes())
    read = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    load_state(tmp_path, new, read)
    assert all(torch.equal(tensor, read[name]) for name, tensor in state(seed=1).items())
    sweep_states(tmp_path, new)
    assert not (tmp_path / old).exists()
    assert (tmp_path / new).exists()
    sweep_states(tmp_path, None)
    assert not [*tmp_path.iterdir()]


def test_a_damaged_or_missing_checkpoint(tmp_path: Path) -> None:
    folder = save_state(tmp_path, 3, state(), Processes())
    for file in (tmp_path / folder).glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CorruptError, match="the checkpoint of a healing is damaged"):
        load_state(tmp_path, folder, state())
    sweep_states(tmp_path, None)
    with pytest.raises(CorruptError, match="the checkpoint of a healing is damaged"):
        load_state(tmp_path, folder, state())


def test_a_disk_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "healing").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        save_state(tmp_path, 3, state(), Processes())
