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
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.end_to_end.jobs import Job, command, load, read_tensors

LAYERS = 3  # of the fixture `llama`
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
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, ["quantization_config", "GPTQ with bits 3"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["no weight is stored in format fp8"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["'bitsandbytes'", "known are fp8", "gptq, awq"]),
        ({"quantization_config": {"load_in_4bit": True}}, ["quantization_config", "'unnamed'"]),
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
    assert "give the source of this one" in ended.err


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
    """transformers, too, takes the single file; OUTPUT's own index is not a copy of that one."""
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


SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = ["MLP as starcoder2's: up mlp.c_fc.weight [48, 192] (transposed)", "like no family's: attn.c_attn.bias [144]"]
LFM: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 80,
    "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention", "conv"],
}  # fmt: skip
LFM_LINES = [  # two kinds of layers
    "\n  3 of 4 layers, as layer 0:\n    like no family's: conv.conv.weight [48, 1, 3], conv.in_proj.weight [144, 48]",
    "\n  1 of 4 layers, as layer 2:\n    attention as opt's: q self_attn.q_proj.weight [48, 48], k",
    "feed_forward.w1.weight [80, 48]",
]
UNKNOWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gpt2": ({"n_embd": 48, "n_layer": 2, "n_head": 4}, [*GPT2, "layers: 2, at transformer.h"]),
    "bloom": (SIZES, ["attention as falcon's: o self_attention.dense.weight [48, 48], q, k, v self_attention"]),
    "phi": ({**SIZES, "intermediate_size": 80}, ["v self_attn.v_proj.weight [48, 48]; without o"]),
    "mamba": (SIZES, ["at backbone.layers", "attention as nemotron_h's: ", "like no family's: mixer.A_log [96, 16]"]),
    "lfm2": (LFM, ["layers: 4, at model.layers", *LFM_LINES]),
    "olmoe": (
        {**SIZES, "intermediate_size": 80, "num_experts": 4},
        ["experts as qwen3_moe's: router mlp.gate.weight [4, 48], gate mlp.experts.E.gate_proj.weight [80, 48]"],
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_model_is_described(kind: str, tmp_path: Path) -> None:
    sizes, said = UNKNOWN[kind]
    tokens = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **tokens, **sizes)).save_pretrained(tmp_path / "model")
    ended = command("plan", str(tmp_path / "model"))
    assert ended.code == 2
    assert f"model_type '{kind}' is not supported" in ended.err
    assert [line for line in said if line not in ended.err] == []
    assert "docs/tutorials/adding-a-family.md adds one" in ended.err


def test_a_known_model_is_named_by_plan(llama: Path) -> None:
    ended = command("plan", str(llama))
    assert (ended.code, ended.out.splitlines()[0]) == (0, "llama: 3 layers, 93,264 numbers")
