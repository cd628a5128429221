"""The student: how it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.healing.processes import Processes
from pipeline.healing.student import Student
from tests import factories

TRAINED, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


def student_of(folder: Path) -> Student:
    return Student(folder, {TRAINED: torch.bfloat16}, torch.device("cpu"), 0, Processes())


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("mixed", [False, True])
def test_it_has_the_stored_numbers_in_float32(mixed: bool, tmp_path: Path) -> None:
    """Also where a norm is stored in another dtype than the matrices."""
    folder = factories.make_model(tmp_path / "model", dtype=torch.bfloat16, tie_word_embeddings=False)
    if mixed:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = folder / index["weight_map"][NORM]
        tensors = load_file(file)
        save_file({**tensors, NORM: tensors[NORM].float() + 1e-4}, file, {"format": "pt"})
    stored = stored_tensors(folder)
    assert stored[NORM].dtype is (torch.float32 if mixed else torch.bfloat16)
    loaded = student_of(folder).model.state_dict()
    assert loaded.keys() == stored.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, stored[name].float()), name


def test_training_it_changes_no_file(tmp_path: Path) -> None:
    folder = factories.make_model(tmp_path / "model")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with torch.no_grad():
        student_of(folder).trained[TRAINED].zero_()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
