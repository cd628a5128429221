"""Tied by the config, and a head in the shards: scored, verified and counted as transformers loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import factories
from tests.end_to_end.jobs import Job, command, read_tensors
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_evaluate import WINDOW, perplexity

MakeJob = Callable[..., Job]
NAMES = {"llama": ("model.embed_tokens", "lm_head"), "opt": ("model.decoder.embed_tokens", "lm_head")}


def tied_source(directory: Path, family: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A model whose config ties head and embedding, and whose shards hold `change(embedding)` as head."""
    source = make_source(directory, family)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    embed, head = (f"{name}.weight" for name in NAMES[family])
    tensors = read_tensors(source)
    for path in source.glob("model*.safetensors*"):
        path.unlink()
    tensors[head] = change(tensors[embed]).contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source


def as_transformers(directory: Path, text: str) -> tuple[Any, float]:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    return model, perplexity(model, AutoTokenizer.from_pretrained(directory), text, WINDOW)[0]


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_scores_counts_and_verifies_what_transformers_loads(
    family: str, equal: bool, tmp_path: Path, job: MakeJob
) -> None:
    source = tied_source(tmp_path / "source", family, lambda embed: embed.clone() if equal else embed.flip(0))
    scored = factories.write_text(tmp_path / "scored.txt", 6_000, seed=9)
    evaluation = {"perplexity": {"text": {"files": [str(scored)]}, "window": WINDOW}}
    made = job(source, evaluation=evaluation, budget={"keep": 0.8, "scope": "model"})
    summary = made.run().json
    for directory in (source, made.output):
        model, expected = as_transformers(directory, scored.read_text())
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == equal
        found = command("evaluate", str(directory), "--text", str(scored), "--window", str(WINDOW), "--json").json
        assert found["perplexity"] == pytest.approx(expected, rel=1e-5), directory
    assert summary["evaluation"]["perplexity"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    counts = summary["counts"]["parameters"]
    assert counts["compressed"] == sum(parameter.numel() for parameter in model.parameters())
    assert 0.79 < counts["compressed"] / counts["dense"] <= 0.8
    assert (f"{NAMES[family][1]}.weight" in read_tensors(made.output)) != equal
    verified = command("verify", str(made.output), "--source", str(source), "--json").json
    assert verified["passed"], verified


@pytest.mark.usefixtures("inline")
def test_a_swapped_stored_head_is_found(tmp_path: Path, job: MakeJob) -> None:
    """The head that a loader takes is the one that is compared."""
    source = tied_source(tmp_path / "source", "llama", lambda embed: embed.flip(0))
    made = job(source)
    made.run().json  # noqa: B018 - asserts the exit code
    shard = next(path for path in made.output.glob("*.safetensors") if "lm_head.weight" in load_file(path))
    tensors = load_file(shard)
    shard.unlink()  # it may be a link to the source
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].flip(1).contiguous()}, shard, {"format": "pt"})
    ended = command("verify", str(made.output), "--source", str(source))
    assert ended.code == 1
    assert "FAULT  logits" in ended.out, ended.out
