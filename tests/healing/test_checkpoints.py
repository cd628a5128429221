"""Checkpoints of a training: read back whole, swept, and errors of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manifests.errors import CorruptError, StorageError
from pipeline.healing.checkpoints import load_state, save_state, sweep_states
from pipeline.healing.processes import Processes
from stores.backend import Storage
from stores.disk import Disk
from tests.memory_storage import Memory


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight/a.b": torch.randn(3, 4, generator=generator), "best/a.b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Disk(tmp_path) if request.param == "disk" else Memory()


def test_a_checkpoint_is_read_back_and_older_ones_are_swept(place: Storage) -> None:
    old, new = save_state(place, 3, state(), Processes()), save_state(place, 4, state(seed=1), Processes())
    read = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    load_state(place, new, read)
    assert all(torch.equal(tensor, read[name]) for name, tensor in state(seed=1).items())
    sweep_states(place, new)
    assert not place.names(old)
    assert sorted(place.names(new)) == [f"{new}/.metadata", f"{new}/__0_0.distcp"]
    sweep_states(place, None)
    assert not place.names()
    assert not place.folders()


def test_a_damaged_or_missing_checkpoint(place: Storage) -> None:
    folder = save_state(place, 3, state(), Processes())
    place.replace(f"{folder}/__0_0.distcp", place.read(f"{folder}/__0_0.distcp")[:40])
    with pytest.raises(CorruptError, match="the checkpoint of a healing is damaged"):
        load_state(place, folder, state())
    sweep_states(place, None)
    with pytest.raises(CorruptError, match="the checkpoint of a healing is damaged"):
        load_state(place, folder, state())


def test_a_disk_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "healing").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        save_state(Disk(tmp_path), 3, state(), Processes())
