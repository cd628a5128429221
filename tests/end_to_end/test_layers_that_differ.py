"""A model whose layers differ in width and heads: planned, compressed, counted and verified, each layer by its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from pipeline.families.registry import geometry_of, standard_config
from tests import factories
from tests.end_to_end.jobs import FLAT_LLM, Job, command, load, logits_of, read_tensors, relative_error, some_tokens

LAYERS = 3  # of the fixture `llama`
pytestmark = pytest.mark.usefixtures("inline")
MakeJob = Callable[..., Job]

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
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
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


def test_each_layer_has_a_geometry_of_its_own(model: tuple[Path, Any]) -> None:
    directory, dense = model
    standard = standard_config(json.loads((directory / "config.json").read_text()))
    geometry = geometry_of(standard)
    assert [layer.mlps[0].width for layer in geometry.layers] == WIDTHS
    assert [layer.attention.kv_heads for layer in geometry.layers] == KV_HEADS
    assert {(layer.attention.heads, layer.attention.head_dim) for layer in geometry.layers} == {(4, 16)}
    assert geometry.expected_tensors() == {name: tuple(tensor.shape) for name, tensor in dense.state_dict().items()}
    assert geometry.model_numbers() == dense.num_parameters()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["flat_llm", "lorc", "lestd", pytest.param("loss_aware", marks=pytest.mark.slow)])
def test_a_job(name: str, job: MakeJob, model: tuple[Path, Any]) -> None:
    """What is stored meets the budget, counted from the files, and verifies against the source."""
    directory, _ = model
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
    name: str, job: MakeJob, model: tuple[Path, Any], tmp_path: Path
) -> None:
    """Also with a cache. What knows one size for all layers is not written, and the reason is named."""
    directory, dense = model
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
