"""Sources of other kinds: their names, their files, and changes under a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests import factories
from tests.end_to_end.children import Child, Hook, wait_for
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    command,
    edit_json,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
    without_ray,
)
from tests.end_to_end.sources import make_source
from tests.renamed_models import HEAD, IN_MEMORY, INSIDE, NEITHER, NO_PREFIX, rename

LAYERS = 3  # of the fixture `llama`


def with_config(llama: Path, directory: Path, **fields: Any) -> Path:
    """A copy of the model with other fields in its config."""
    shutil.copytree(llama, directory)
    edit_json(directory / "config.json", **fields)
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


FLAT: dict[str, Any] = {"methods": [{"method": "flat_llm"}]}
EXPERTS: dict[str, Any] = {"methods": [{"method": "loss_aware", "attention": False}], "calibration.propagate": "dense"}
CASES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "llama without model": ("llama", NO_PREFIX, False, FLAT),
    "tied llama, head alone": ("llama", HEAD, True, {**FLAT, "quantize": {"bits": 8, "group": None}}),
    "experts in memory": ("qwen3_moe", IN_MEMORY, False, EXPERTS),
    "opt with decoder": ("opt", NO_PREFIX, False, FLAT),
    "gpt_neox with lm_head": ("gpt_neox", NEITHER, False, FLAT),
    "mixtral in memory": ("mixtral", NEITHER, False, EXPERTS),
    "decoder of a whole": ("qwen3_5_text", INSIDE, False, EXPERTS),
    "convolutions in memory": ("kimi_linear", IN_MEMORY, False, EXPERTS),
}


def exported(made: Job, target: str, folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of an export; None if it is refused."""
    return read_tensors(folder) if command("export", str(made.output), "--to", target, str(folder)).code == 0 else None


@pytest.mark.sample(2)
@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_the_usual_files(case: str, tmp_path: Path, job: MakeJob, scored: Path) -> None:
    family, naming, tied, changes = CASES[case]
    plain = make_source(tmp_path / "plain", family, tie_word_embeddings=tied)
    renamed = rename(plain, tmp_path / "renamed", naming, AutoModelForCausalLM.from_pretrained(plain))
    usual, other = job(plain, **changes), job(renamed, **changes)
    first, second = usual.run().json, other.run().json
    assert first["counts"] == second["counts"]
    before, after = read_tensors(usual.output), read_tensors(other.output)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (usual.output / "config.json").read_bytes() == (other.output / "config.json").read_bytes()
    assert command("plan", str(other.manifest)).code == 0
    verified = command("verify", str(other.output), "--source", str(renamed), "--bound", "10")
    assert verified.code == 0, verified.out
    options = ["--text", str(scored), "--window", "40", "--json"]
    losses = [command("evaluate", str(path), *options).json["loss"] for path in (plain, renamed, other.output)]
    assert losses[0] == losses[1] != losses[2]
    model = load(other.output)
    head, embed = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embed.data_ptr()) == tied
    for target in ("dense", "stock"):
        wanted, found = (exported(made, target, made.root / target) for made in (usual, other))
        assert (wanted is None) == (found is None)
        if wanted and found:
            assert all(torch.equal(wanted[name], found[name]) for name in wanted | found)
            ids_BT = some_tokens(300)
            assert relative_error(logits_of(load(other.root / target), ids_BT), logits_of(model, ids_BT)) < 1e-4


Change = Callable[[Path], Path]
POINTS: dict[str, Hook] = {
    "before the first layer": Hook("commit", match="dense/"),
    "between two layers": Hook("commit", match="layer/00001"),
    "before the index": Hook("file", match="compression.json"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as it is before a test."""
    return factories.make_model(tmp_path_factory.mktemp("kept") / "source")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changing") / "source"


@pytest.fixture
def own_source(kept: Path, place: Path) -> Path:
    """A source of its own, which a test may change."""
    return restored(place, kept)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, kept: Path, place: Path, text: Path) -> dict[str, str]:
    """The output of a run whose source stays as it is."""
    made = Job(tmp_path_factory.mktemp("undisturbed"), restored(place, kept), text).write()
    with without_ray():
        assert made.run().code == 0
    return file_digests(made.output)


def restored(place: Path, kept: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(kept, place))


def in_place(own_source: Path) -> Path:
    """Other numbers, in a file of the same name and size."""
    path = sorted(own_source.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) - 64)
        file.write(bytes(byte ^ 1 for byte in content[-64:]))
    return path


def replaced(own_source: Path) -> Path:
    path = sorted(own_source.glob("*.safetensors"))[0]
    other = path.with_suffix(".new")
    content = path.read_bytes()
    other.write_bytes(content[:-4] + bytes(byte ^ 1 for byte in content[-4:]))
    os.replace(other, path)
    return path


def deleted(own_source: Path) -> Path:
    path = sorted(own_source.glob("*.safetensors"))[0]
    path.unlink()
    return path


def config(own_source: Path) -> Path:
    path = own_source / "config.json"
    path.write_text(path.read_text().replace("1e-06", "1e-05"))
    return path


def tokenizer(own_source: Path) -> Path:
    path = own_source / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    return path


def run_changed(made: Job, hook: Hook, change: Change) -> tuple[int, str, Path]:
    """A run whose source changes at the hook: how it ended, and the file that changed."""
    pause = made.root / "pause"
    hook = Hook(hook.what, hook.nth, hook.match, hook.after, pause=str(pause))
    child = Child("run", [str(made.manifest)], made.root / "log", hook)
    wait_for(pause, child)
    path = change(made.source)
    pause.unlink()
    return child.end(), child.said, path


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("point", "change"),
    [
        ("before the first layer", in_place),
        ("between two layers", replaced),
        ("between two layers", config),
        ("between two layers", tokenizer),
        ("before the index", in_place),
        ("before the index", deleted),
    ],
)
def test_a_change_under_a_run_ends_it(
    point: str, change: Change, undisturbed: dict[str, str], own_source: Path, kept: Path, text: Path, tmp_path: Path
) -> None:
    made = Job(tmp_path / "job", own_source, text).write()
    code, said, path = run_changed(made, POINTS[point], change)
    assert (code, path.name in said, "Traceback" in said) == (1, True, False), said
    assert not (made.output / "model.safetensors.index.json").exists()
    restored(own_source, kept)
    assert made.run().code == 0
    assert file_digests(made.output) == undisturbed


@pytest.mark.usefixtures("inline")
def test_another_source_is_refused_on_resuming(own_source: Path, text: Path, tmp_path: Path) -> None:
    made = Job(tmp_path / "job", own_source, text).write()
    _, said, path = run_changed(made, POINTS["between two layers"], in_place)
    ended = made.run()
    assert (ended.code, path.name in ended.err) == (2, True), (said, ended)


@pytest.mark.usefixtures("inline")
def test_times_alone_may_change(own_source: Path, text: Path, tmp_path: Path) -> None:
    """As by a backup, or a hard link that another job makes."""

    def touched(own_source: Path) -> Path:
        path = sorted(own_source.glob("*.safetensors"))[0]
        os.utime(path)
        os.link(path, tmp_path / "link")
        return path

    code, said, _ = run_changed(Job(tmp_path / "job", own_source, text).write(), POINTS["between two layers"], touched)
    assert code == 0, said
