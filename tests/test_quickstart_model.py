"""The model that `make quickstart` trains: really trained, sharded, loadable, the same for the same seed."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.quickstart.__main__ import PROMPT, ModelRow, continue_prompt, table_of
from deploy.quickstart.model import ModelRecipe, make_model
from deploy.quickstart.text import story_text
from manifests.loading import load_manifest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
TINY = ModelRecipe(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, window_tokens=32,
    batch_windows=8, num_steps=30, train_bytes=40_000, calibration_bytes=5_000, evaluation_bytes=5_000,
    shard_size="20KB",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quickstart")
    make_model(directory, TINY, say=lambda line: None)
    return directory


def test_training_teaches(trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    tokens_BS = tokenizer((trained / "evaluation.txt").read_text(), return_tensors="pt")["input_ids"][:, :512]
    with torch.inference_mode():
        loss = model(input_ids=tokens_BS, labels=tokens_BS).loss.item()
    assert loss < 0.9 * math.log(TINY.vocab_size)  # an untrained model guesses among all tokens


def test_model_is_as_from_a_hub(trained: Path) -> None:
    index = json.loads((trained / "model" / "model.safetensors.index.json").read_text())
    shards = {path.name for path in (trained / "model").glob("*.safetensors")}
    assert len(shards) >= 4
    assert set(index["weight_map"].values()) == shards
    config = AutoModelForCausalLM.from_pretrained(trained / "model").config
    assert config.num_key_value_heads < config.num_attention_heads
    assert not (trained / "model.unfinished").exists()


def test_same_seed_same_files_over_a_training_cut_off(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "model-00001-of-00099.safetensors").write_bytes(b"cut off")
    make_model(tmp_path, TINY, say=lambda line: None)
    assert _digests(tmp_path) == _digests(trained)


def test_evaluation_text_is_held_out() -> None:
    recipe = ModelRecipe()
    trained_on, calibration, evaluation = (
        set(story_text(num_bytes, recipe.seed + offset).splitlines())
        for offset, num_bytes in enumerate((recipe.train_bytes, recipe.calibration_bytes, recipe.evaluation_bytes))
    )
    assert len(evaluation & trained_on) < 0.1 * len(evaluation)  # short fixed kinds do come up again
    assert len(evaluation & calibration) < 0.05 * len(evaluation)


def test_manifest_fits_the_model() -> None:
    manifest = load_manifest(ROOT / "manifests" / "quickstart.yaml", ["budget.keep=0.6", "output=elsewhere"])
    assert manifest.calibration is not None
    assert manifest.calibration.sequence_length == ModelRecipe().window_tokens
    assert manifest.budget is not None
    assert manifest.budget.keep == 0.6


def test_table_shows_what_the_model_writes(trained: Path) -> None:
    text = continue_prompt(trained / "model")
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)
    console = Console(width=200, record=True, file=io.StringIO(), markup=False)
    console.print(table_of([ModelRow("dense", 2.0, 4000, text), ModelRow("keep 0.6", 2.5, 2500, "[red] Anna")]))
    shown = console.export_text()
    assert "0.625" in shown
    assert "[red] Anna" in shown


def _digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
