"""Layers of different sizes, and tensors that several modules share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pipeline.families.registry import geometry_of, standard_config
from tests import factories
from tests.end_to_end.jobs import (
    FLAT_LLM,
    MakeJob,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.sources import make_source

LAYERS = 3  # of the fixture `llama`

pytestmark = pytest.mark.usefixtures("inline")

BY_LAYER: dict[int, dict[str, int]] = {
    1: {"intermediate_size": 56, "num_key_value_heads": 4},
    2: {"num_key_value_heads": 1},
}
WIDTHS, KV_HEADS = [80, 56, 80], [2, 4, 1]
METHODS: dict[str, list[dict[str, Any]]] = {
    "flat_llm": [FLAT_LLM, {"method": "joint_rank_k", "mlp": False}],
    "lorc": [{"method": "lorc", "cache_keep": 0.5}],
    "lestd": [{"method": "lestd", "target": "both"}],
    "loss_aware": [{"method": "loss_aware", "widths": 3}],
}


@pytest.fixture(scope="module")
def unequal_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(the checkpoint, what it holds): transformers' layers, each made by a config of its own."""
    config = LlamaConfig(**factories.GEOMETRY)
    made = LlamaForCausalLM(config).eval()
    for layer, sizes in BY_LAYER.items():
        own = LlamaConfig(**{**factories.GEOMETRY, **sizes}, attn_implementation=config._attn_implementation)
        made.model.layers[layer] = LlamaDecoderLayer(own, layer)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(made.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else 0.15 * noise
    directory = tmp_path_factory.mktemp("differing") / "source"
    made.save_pretrained(directory, max_shard_size="40KB")
    factories.make_tokenizer().save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, "per_layer_config": BY_LAYER}))
    return directory, made.eval()


def test_each_layer_has_a_geometry_of_its_own(unequal_model: tuple[Path, Any]) -> None:
    directory, dense = unequal_model
    standard = standard_config(json.loads((directory / "config.json").read_text()))
    geometry = geometry_of(standard)
    assert [layer.mlps[0].width for layer in geometry.layers] == WIDTHS
    assert [layer.attention.kv_heads for layer in geometry.layers] == KV_HEADS
    assert {(layer.attention.heads, layer.attention.head_dim) for layer in geometry.layers} == {(4, 16)}
    assert geometry.expected_tensors() == {name: tuple(tensor.shape) for name, tensor in dense.state_dict().items()}
    assert geometry.model_numbers() == dense.num_parameters()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["flat_llm", "lorc", "lestd", pytest.param("loss_aware", marks=pytest.mark.slow)])
def test_a_job(name: str, job: MakeJob, unequal_model: tuple[Path, Any]) -> None:
    """What is stored meets the budget, counted from the files, and verifies against the source."""
    directory, _ = unequal_model
    changes = {"lorc": {"budget": None}, "loss_aware": {"calibration.propagate": "dense", "budget.keep": 0.5}}.get(
        name, {}
    )
    run = job(directory, methods=METHODS[name], **changes)
    planned = command("plan", str(run.manifest), "--json").json
    assert planned["dense_numbers"] == sum(tensor.numel() for tensor in read_tensors(directory).values())
    ended = run.run()
    assert ended.code == 0, ended.err
    counts = run.compression()["counts"]
    if name == "lorc":
        dense = 4 * 2 * 16 * sum(KV_HEADS)
        assert counts["cache_bytes_per_token"]["dense"] == dense
        assert 0.45 * dense < counts["cache_bytes_per_token"]["compressed"] <= 0.5 * dense
    else:
        kept = counts["decoder_parameters"]["compressed"] / counts["decoder_parameters"]["dense"]
        assert run.document()["budget"]["keep"] - 0.04 < kept <= run.document()["budget"]["keep"]
    verified = command("verify", str(run.output), "--source", str(directory))
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.parametrize("name", ["flat_llm", "lorc"])
def test_at_full_rank_the_logits_are_the_source_s(
    name: str, job: MakeJob, unequal_model: tuple[Path, Any], tmp_path: Path
) -> None:
    """Also with a cache. Targets with one size for all layers are refused, with the reason."""
    directory, dense = unequal_model
    methods = [{**entry, "cache_keep" if name == "lorc" else "keep": 1.0} for entry in METHODS[name]]
    run = job(directory, methods=methods, budget=None)
    ended = run.run()
    assert ended.code == 0, ended.err
    ids = some_tokens(320)
    found = load(run.output, trust_remote_code=True)
    expected = logits_of(dense, ids)
    assert relative_error(logits_of(found, ids), expected) < 1e-4
    cache = found(ids[:, :12], use_cache=True).past_key_values
    assert relative_error(logits_of(found, ids[:, 12:], past_key_values=cache), expected[:, 12:]) < 1e-4
    for target in ("stock", "dense", "gguf"):
        ended = command("export", str(run.output), "--to", target, str(tmp_path / "exported"))
        assert (ended.code, "layers" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(
    ("by_layer", "expected"),
    [
        ({"1": {"skip": ["mlp"]}}, "layer 1 has skip of its own, which is not supported"),
        ({"3": {"intermediate_size": 56}}, "'3' is not one of the 3 layers"),
        ({"1": {"intermediate_size": 0}}, "layer 1: intermediate_size: 0"),
        ({"1": {"num_key_value_heads": 3}}, "layer 1: num_attention_heads: 4 is not a multiple"),
        ({"1": {"head_dim": 8}}, "layer 1 has head_dim 8, the model 16; rotary angles"),
        ({"1": 5}, "not a mapping of layers"),
    ],
)
def test_what_layers_may_not_have(
    by_layer: dict[str, Any], expected: str, job: MakeJob, llama: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in llama.iterdir():
        (source / file.name).symlink_to(file)
    (source / "config.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "per_layer_config": by_layer}))
    ended = job(source).run()
    assert (ended.code, expected in ended.err) == (2, True), ended.err


BOTH = {"method": "lestd", "target": "both", "keep": 0.5}
DATA_FREE: dict[str, Any] = {"budget": None, "calibration": None}
PARENTS = {"llama": ("self_attn", "mlp"), "opt": ("self_attn", "mlp_factors")}


@pytest.mark.parametrize("family", PARENTS)
def test_named_and_owned(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family)
    made = job(source, **DATA_FREE, methods=[{**BOTH, "layers": [1], "core": "csr"}])
    assert made.run().code == 0
    compression, config = made.compression(), json.loads((made.output / "config.json").read_text())
    assert config["core_format"] == "csr"
    block = config["block"]
    prefix = f"{block['layers']}.1."
    shared = {name: entry for name, entry in compression["tensors"].items() if ".tucker." in name}
    assert {name.removeprefix(prefix).split(".tucker.")[0] for name in shared} == set(PARENTS[family])
    for name, entry in shared.items():
        role = "q" if "self_attn" in name else "up"
        assert (entry["origin"], entry["form"]) == ("lestd", "tucker")
        assert entry["ranks"] == config["forms"][1][role]["ranks"]
        assert entry["dtype"] == ("U8" if name.endswith(".mask") else "F32")
    roles = [role for role in ("q", "k", "v", "o", "gate", "up", "down") if role in block["modules"]]
    assert set(config["forms"][1]) == set(roles)
    weights = {f"{prefix}{block['modules'][role]}.weight" for role in roles}
    assert not weights & set(read_tensors(made.output))
    assert {name for name, method in compression["claimed"].items() if method == "lestd"} >= weights
    untouched = [entry for name, entry in compression["tensors"].items() if not name.startswith(prefix)]
    assert {entry["origin"] for entry in untouched} == {"copied"}
    assert command("verify", str(made.output), "--source", str(source), "--bound", "10").code == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_index_counts_by_its_bits(dtype: torch.dtype, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", dtype=dtype)
    made = job(source, **DATA_FREE, methods=[{"method": "lestd", "keep": 0.5, "refine_sweeps": 0}])
    assert made.run().code == 0
    compression, tensors = made.compression(), read_tensors(made.output)
    numbers = {
        name: tensor.numel() if tensor.is_floating_point() else math.ceil(tensor.nbytes / dtype.itemsize)
        for name, tensor in tensors.items()
    }
    assert compression["counts"]["parameters"]["compressed"] == sum(numbers.values())
    assert compression["counts"]["bytes"]["compressed"] == sum(tensor.nbytes for tensor in tensors.values())
    dense = sum(t.numel() for n, t in read_tensors(source).items() if any(f".{r}_proj." in n for r in "qkvo"))
    kept = sum(number for name, number in numbers.items() if ".tucker." in name)
    assert 0.97 * dense < 2 * kept <= dense
    plain = sum(t.numel() for n, t in tensors.items() if ".tucker." in n and t.is_floating_point())
    index = sum(t.nbytes for n, t in tensors.items() if n.endswith(".mask"))
    assert 0 <= kept - plain - index / dtype.itemsize < compression["counts"]["parameters"]["dense"] * 1e-3
    groups = [entry["groups"]["attention"] for entry in compression["layers"]]
    assert sum(group["numbers"] for group in groups) == kept
    assert sum(group["numbers_without_index"] for group in groups) == plain
    model = load(made.output, dtype=torch.float32)
    assert torch.isfinite(logits_of(model, some_tokens(320))).all()


def test_statistics_after_it_are_taken_through_it(job: MakeJob) -> None:
    """With hidden states of the compressed model, the MLP's method sees what the factored attention gives."""
    flat = {"method": "flat_llm", "attention": False, "keep": 0.6}
    attention = {"method": "lestd", "keep": 0.4, "refine_sweeps": 0}
    alone, together = job(methods=[flat], budget=None), job(methods=[flat, attention], budget=None)
    for made in (alone, together):
        assert made.run().code == 0
    first, second = (read_tensors(made.output) for made in (alone, together))
    names = [name for name in first if "mlp" in name]
    assert all(torch.equal(first[name], second[name]) for name in names if ".layers.0." in name)
    assert any(not torch.equal(first[name], second[name]) for name in names if ".layers.1." in name)
    assert command("verify", str(together.output), "--source", str(together.source), "--bound", "10").code == 0


def test_again_gives_the_same_bytes(job: MakeJob) -> None:
    entry = {"method": "lestd", "target": "both", "keep": 0.5, "threshold": "model"}
    outputs = []
    for _ in range(2):
        made = job(**DATA_FREE, methods=[entry])
        assert made.run().code == 0
        outputs.append(file_digests(made.output))
    assert outputs[0] == outputs[1]
    again = logits_of(load(made.output), some_tokens(320))
    csr = logits_of(load(made.output, core_format="csr"), some_tokens(320))
    assert relative_error(csr, again) < 1e-4
