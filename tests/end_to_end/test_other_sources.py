"""Sources with a config that fits and weights that do not: refused by what they are; and tensors beyond the model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.end_to_end.jobs import Job, command, load, read_tensors

MakeJob = Callable[..., Job]


def with_config(llama: Path, directory: Path, **fields: Any) -> Path:
    """A copy of the model with other fields in its config."""
    shutil.copytree(llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return directory


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "quantised (gptq)"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["quantised (awq)", "as it was before"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantised (bitsandbytes)"]),
        ({"quantization_config": {"load_in_4bit": True}}, ["quantization_config", "quantised"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "ForCausalLM"]),
        ({"architectures": ["LlamaForTokenClassification"]}, ["LlamaForTokenClassification"]),
        ({"architectures": ["LlamaModel"]}, ["LlamaModel", "no causal language model"]),
    ],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else None,
)
def test_what_is_no_dense_causal_model_is_refused_by_name(
    fields: dict[str, Any], words: list[str], tmp_path: Path, llama: Path, job: MakeJob
) -> None:
    source = with_config(llama, tmp_path / "source", **fields)
    for command_name in ("run", "plan"):
        ended = command(command_name, str(job(source).manifest))
        assert ended.code == 2, ended
        assert all(word in ended.err for word in words), ended.err
        assert "shape" not in ended.err


@pytest.mark.usefixtures("inline")
def test_an_output_as_source_is_named_as_such(job: MakeJob) -> None:
    made = job()
    made.run().json  # noqa: B018 - asserts the exit code
    ended = command("run", str(job(made.output).manifest))
    assert ended.code == 2
    assert "a checkpoint that Lamina wrote, from a llama model" in ended.err
    assert "give the one it was made from" in ended.err


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("layers", [[0], "all"], ids=["copied layer", "claimed layer"])
@pytest.mark.parametrize("listed", [True, False], ids=["in the index", "in no index"])
def test_tensors_that_no_model_asks_for(listed: bool, layers: Any, tmp_path: Path, llama: Path, job: MakeJob) -> None:
    """Buffers of old checkpoints, bytes among them, and a layer that the config cuts off: those of the index travel on,
    counted alike on both sides, and what loads the model passes over them.
    """
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    layer = source / index["weight_map"]["model.layers.1.self_attn.q_proj.weight"]
    extra = {
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.1.self_attn.masked": torch.ones(1, 1, 64, 64, dtype=torch.uint8),
        "model.layers.3.mlp.up_proj.weight": torch.ones(4, 4),
        "value_head.weight": torch.ones(4),
    }
    save_file({**load_file(layer), **extra}, layer, {"format": "pt"})
    if listed:
        index["weight_map"] |= dict.fromkeys(extra, layer.name)
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    made = job(source, methods=[{"method": "flat_llm", "layers": layers}], budget={"keep": 0.9})
    summary = made.run().json
    assert (extra.keys() <= read_tensors(made.output).keys()) == listed
    verified = command("verify", str(made.output), "--source", str(source), "--json").json
    assert verified["passed"], verified
    pair = summary["counts"]["decoder_parameters"]
    untouched = 8 + 64 * 64 // 4 + 16 if listed else 0
    dense = sum(t.numel() for name, t in read_tensors(llama).items() if ".layers." in name)
    assert pair["dense"] == dense + untouched
    assert pair["compressed"] <= 0.9 * dense + untouched
    stored = summary["counts"]["parameters"]["compressed"]
    assert load(made.output).num_parameters() == stored - (untouched + 4) * listed
    AutoModel.from_pretrained(made.output)


@pytest.mark.usefixtures("inline")
def test_an_index_beside_a_single_file_is_not_read(tmp_path: Path, llama: Path, job: MakeJob) -> None:
    """transformers, too, takes the single file; OUTPUT's own index is no copy of that one."""
    source = with_config(llama, tmp_path / "source")
    shards = {path.name: load_file(path) for path in sorted(source.glob("*.safetensors"))}
    save_file({name: tensor for part in shards.values() for name, tensor in part.items()}, source / "model.safetensors")
    made = job(source)
    assert made.run().code == 0
    ended = command("verify", str(made.output), "--source", str(source))
    assert ended.code == 0, ended.out


@pytest.mark.usefixtures("inline")
def test_a_compressed_checkpoint_with_bitmaps_is_scored_as_stored(job: MakeJob, text: Path) -> None:
    made = job(methods=[{"method": "lestd", "sweeps": 1, "refine_sweeps": 0}], budget={"keep": 0.8}, calibration=None)
    made.run().json  # noqa: B018 - asserts the exit code
    assert any(tensor.dtype == torch.uint8 for tensor in read_tensors(made.output).values())
    options = ["--text", str(text), "--window", "40", "--json"]
    stored = command("evaluate", str(made.output), *options, "--dtype", "stored").json
    assert stored["loss"] == command("evaluate", str(made.output), *options).json["loss"]
