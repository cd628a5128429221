"""The small models that other tests rest on: sharded, loadable, the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.factories import FAMILIES, MADE, write_text


@pytest.mark.parametrize("family", FAMILIES)
def test_model_is_sharded_and_loads(tiny_model: Callable[..., Path], family: str) -> None:
    directory = tiny_model(family)
    shards = sorted(path.name for path in directory.glob("model-*.safetensors"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(shards) >= 4
    assert sorted(set(index["weight_map"].values())) == shards
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = AutoTokenizer.from_pretrained(directory)("Anna had two cups.", return_tensors="pt")
    assert tokens["input_ids"][0, 0] == model.config.bos_token_id
    with torch.inference_mode():
        logits_BTV = model(**tokens).logits
    assert logits_BTV.isfinite().all()
    assert logits_BTV.std() > 0.5


def test_same_seed_same_weights(tiny_model: Callable[..., Path]) -> None:
    def weights(directory: Path) -> dict[str, torch.Tensor]:
        return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}

    def made(seed: int) -> dict[str, torch.Tensor]:
        MADE.clear()
        return weights(tiny_model("qwen2", seed=seed))

    first, again, other = (made(seed) for seed in (1, 1, 2))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first)


def test_calibration_text_is_seeded(calibration_text: Path, tmp_path: Path) -> None:
    text = calibration_text.read_bytes()
    assert 100_000 <= len(text) < 101_000
    assert write_text(tmp_path / "again.txt").read_bytes() == text
    assert write_text(tmp_path / "other.txt", seed=1).read_bytes() != text


def test_a_model_asked_for_again_is_the_same_in_files_of_its_own(tiny_model: Callable[..., Path]) -> None:
    first, again, other = tiny_model(), tiny_model(), tiny_model(num_hidden_layers=2)
    assert first != again
    files = [{path.name: path.read_bytes() for path in directory.iterdir()} for directory in (first, again, other)]
    assert files[0] == files[1] != files[2]
    (first / "config.json").write_text("{}")
    assert (again / "config.json").read_bytes() == files[1]["config.json"]
