"""Stored weights: fields of their configs, and a stored head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from manifests.errors import InputError
from pipeline.inputs.sources import open_dense
from stores.source import open_source
from tests import factories
from tests.encoders import INT4, INT8, encode_model
from tests.end_to_end.jobs import MakeJob, command, edit_json, load, logits_of, read_tensors, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_evaluate import WINDOW, perplexity
from tests.end_to_end.test_stored_formats import check_pair

LAYER = "model.layers.1."
IGNORED = ("lm_head", f"{LAYER}mlp.down_proj", "re:.*layers\\.0\\.self_attn")


def is_ignored(name: str) -> bool:
    return name.startswith((f"{LAYER}mlp.down_proj", "model.layers.0.self_attn"))


def mixed(name: str) -> str:
    """Eight bits in feed-forward modules, but for `down`, which stays as it is."""
    return "" if "down_proj" in name else "gptq8" if "mlp" in name else "gptq"


def two_groups(name: str) -> str:
    return "int8" if name.startswith(f"{LAYER}self_attn.q_proj") or "down_proj" in name else "int4"


GROUPS = {  # without the order of compressed-tensors' matcher, `q_proj` of layer 1 and all `down_proj` have four bits
    "first": {**INT4["config_groups"]["group_0"], "targets": ["re:.*proj$", "Linear"]},
    "second": {**INT8["config_groups"]["group_0"], "targets": [f"{LAYER}self_attn.q_proj", "re:.*down"]},
}
KINDS: dict[str, tuple[str, Callable[[str], str], dict[str, Any]]] = {
    "float, ignored": ("float", lambda name: "" if is_ignored(name) else "float", {"ignore": [*IGNORED]}),
    "fp8, ignored": (
        "fp8 plain",
        lambda name: "" if is_ignored(name) else "fp8 plain",
        {"ignored_layers": ["lm_head", "model.layers.1.mlp.down_proj"], "activation_scheme": "static"},
    ),
    "fp8 blocks, ignored": (
        "fp8 blocks",
        lambda name: "" if is_ignored(name) else "fp8 blocks",
        {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn"]},
    ),
    "dynamic": (
        "gptq",
        mixed,
        {"dynamic": {r"-:.*down_proj": {}, r"+:.*\.mlp\..*": {"bits": 8}}, "checkpoint_format": "gptq"},
    ),
    "groups": ("int4", two_groups, {"config_groups": GROUPS}),
}
LOADED = ("float, ignored", "fp8 blocks, ignored", "groups")  # transformers reads them on a CPU


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_encoder(kind: str, tmp_path: Path) -> None:
    """And the logits those of transformers, where it reads the format on a CPU."""
    base, kind_of, fields = KINDS[kind]
    source = factories.make_model(tmp_path / "source", "llama")
    encoded, decoded = encode_model(source, tmp_path, base, kind_of=kind_of, **fields)
    opened, config = open_dense(str(encoded))
    expected = read_tensors(decoded)
    assert opened.tensors.keys() == expected.keys()
    for name, tensor in opened.read(expected).items():
        assert torch.equal(tensor, expected[name]), name
    if kind in LOADED:
        ids = some_tokens(config["vocab_size"])
        theirs, plain = (logits_of(load(folder, dtype=torch.bfloat16), ids) for folder in (encoded, decoded))
        assert torch.equal(theirs, plain)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("kind", ["dynamic", "fp8, ignored"])
def test_a_job_keeps_formats_that_differ_by_module(kind: str, tmp_path: Path, job: MakeJob) -> None:
    """What it leaves has the source's bytes, the rest those of a job on the decoded model; OUTPUT has its logits."""
    base, kind_of, fields = KINDS[kind]
    source = factories.make_model(tmp_path / "source", "llama")
    pair = encode_model(source, tmp_path, base, kind_of=kind_of, **fields)
    ran = check_pair(*pair, job, methods=[{"method": "flat_llm", "layers": [1], "mlp": False}], **{"budget.keep": 0.95})
    config = json.loads((ran.output / "config.json").read_text())
    assert len(config["stored_formats"]) == (2 if kind == "dynamic" else 1)
    ids = some_tokens(config["vocab_size"])
    plain = load(ran.output.parents[1] / "job-1" / "output")
    assert torch.equal(logits_of(load(ran.output), ids), logits_of(plain, ids))


@pytest.mark.usefixtures("inline")
def test_patterns_name_modules_as_the_files_do(tmp_path: Path) -> None:
    """Also after several renamings of tensors."""
    base, kind_of, fields = KINDS["dynamic"]
    source = factories.make_model(tmp_path / "source", "llama")
    encoded, decoded = encode_model(source, tmp_path, base, kind_of=kind_of, **fields)
    opened = open_source(str(encoded))
    for of, to in ((".mlp.", ".moe."), (".moe.", ".ff.")):
        opened = opened.renamed({name: name.replace(of, to) for name in opened.tensors})
    expected = read_tensors(decoded)
    for name, tensor in (read := opened.with_weights()).read(read.tensors).items():
        assert torch.equal(tensor, expected[name.replace(".ff.", ".mlp.")]), name


def changed(source: Path, folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """A copy of a model with further tensors, and other fields in its quantization_config."""
    shutil.copytree(source, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file(tensors, folder / "more.safetensors", {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    return encode_model(factories.make_model(folder / "source", "llama"), folder, "float")[0]


UNREAD = {
    "rotation": f"{LAYER}self_attn.q_proj.R1_weight_input",
    "adapter": f"{LAYER}self_attn.q_proj.lora_A.weight",
    "zeros": f"{LAYER}mlp.up_proj.weight_g_idx_order",
    "scale": f"{LAYER}mlp.act.scales",
    "module": "model.layers.1.extra.weight",
}


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("kind", UNREAD)
def test_tensors_that_no_module_reads_are_named(kind: str, encoded: Path, tmp_path: Path, job: MakeJob) -> None:
    source = changed(encoded, tmp_path / "changed", {UNREAD[kind]: torch.ones(2, 2)})
    run = job(source, methods=[{"method": "svd"}], calibration=None)
    ended = command("plan", str(run.manifest), "--gpu", "H100")
    assert ended.code == 2
    assert "tensors beside weights in stored formats that Lamina would ignore:\n" in ended.err
    assert f"{UNREAD[kind]}: no module of the model reads it" in ended.err


ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.usefixtures("inline")
def test_scales_of_activations_change_nothing(encoded: Path, tmp_path: Path, job: MakeJob) -> None:
    """Static ones, and those of a cache: a job gives the same bytes, and OUTPUT the same logits, with and without."""
    names = ("self_attn.q_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale", "mlp.up_proj.input_scale")
    more = {f"model.layers.{layer}.{name}": torch.ones(1) for layer in range(3) for name in names}
    source = changed(encoded, tmp_path / "changed", more, kv_cache_scheme=ACTIVATIONS)
    made = [job(each, methods=[{"method": "svd", "layers": [1]}], calibration=None) for each in (source, encoded)]
    for each in made:
        ended = each.run()
        assert ended.code == 0, ended.err
    mine, plain = (read_tensors(each.output) for each in made)
    assert mine.keys() - plain.keys() <= {*more}
    assert all(torch.equal(mine[name].view(torch.uint8), plain[name].view(torch.uint8)) for name in plain)
    ids = some_tokens(300)
    assert torch.equal(*(logits_of(load(each.output), ids) for each in made))


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_an_added_bias_must_be_zero(value: float, encoded: Path, tmp_path: Path) -> None:
    """Encoders of GPTQ store biases of zeros for linears that have none."""
    name = f"{LAYER}self_attn.q_proj.bias"
    source = changed(encoded, tmp_path / "changed", {name: torch.full((8,), value)})
    if not value:
        open_dense(str(source))
        return
    with pytest.raises(InputError, match="its model or its format has no such tensor, and it is not zero"):
        open_dense(str(source))


@pytest.mark.usefixtures("inline")
def test_transforms_are_refused_by_name(encoded: Path, tmp_path: Path, job: MakeJob) -> None:
    transform = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
    source = changed(encoded, tmp_path / "changed", {}, transform_config=transform)
    ended = job(source, methods=[{"method": "svd"}], calibration=None).run()
    assert ended.code == 2
    assert "transform_config: {'config_groups': {'R4'" in ended.err
    assert "are transformed (rotated) while the model runs; not supported" in ended.err


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("name", [f"{LAYER}self_attn.q_proj.lora_A.weight", f"{LAYER}self_attn.rotary_emb.inv_freq"])
def test_tensors_of_a_dense_model_that_nothing_reads_are_announced(name: str, tmp_path: Path, job: MakeJob) -> None:
    """transformers ignores them, too, with a warning; buffers of old checkpoints are no news."""
    source = factories.make_model(tmp_path / "source", "llama")
    file = source / "more.safetensors"
    save_file({name: torch.ones(2, 2)}, file, {"format": "pt"})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    run = job(source, methods=[{"method": "svd"}], calibration=None)
    ended = command("plan", str(run.manifest), "--gpu", "H100")
    assert ended.code == 0, ended.err
    announced = f"tensors of the source that no module reads (1, {name} first) change nothing"
    assert (announced in " ".join((ended.out + ended.err).split())) == ("lora" in name)


NAMES = {"llama": ("model.embed_tokens", "lm_head"), "opt": ("model.decoder.embed_tokens", "lm_head")}


def tied_source(directory: Path, family: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A model whose config ties head and embedding, and whose shards hold `change(embedding)` as head."""
    source = make_source(directory, family)
    edit_json(source / "config.json", tie_word_embeddings=True)
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
