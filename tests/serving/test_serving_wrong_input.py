"""Checkpoints that are not whole or not of one piece: an error that says what is wrong, never random weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, Cache, StaticCache
from transformers.cache_utils import QuantizedLayer

from lamina import LaminaConfig, checking_lamina, modeling_lamina
from lamina.vllm_lamina import vllm_lacks
from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factored
from tests.serving.serving_sources import describe, make_source
from tests.serving.test_serving_loading import write_mixed

AUTO: Any = AutoModelForCausalLM


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    write_mixed(folder, "llama-gqa")
    (folder / "expected.safetensors").unlink()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy in two shards, with the index and the record that the compress side writes."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / shard, {"format": "pt"})
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    record = {
        "version": 1,
        "shards": {shard: {"size": (folder / shard).stat().st_size} for shard in shards},
        "tensors": {name: {"shard": shard} for name, shard in weight_map.items()},
    }
    write(folder / "compression.json", record)
    return folder


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    write(path, content)


def without(folder: Path, name: str) -> None:
    """A tensor is gone from shard, index and record alike."""
    shard = json.loads((folder / "compression.json").read_text())["tensors"][name]["shard"]
    tensors = load_file(folder / shard)
    del tensors[name]
    save_file(tensors, folder / shard, {"format": "pt"})
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))
    size = (folder / shard).stat().st_size
    edit(folder / "compression.json", lambda r: (r["tensors"].pop(name), r["shards"][shard].update(size=size)))


def test_a_whole_checkpoint_loads(folder: Path) -> None:
    model, report = AUTO.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    (folder / "compression.json").unlink()  # as after save_pretrained
    again = AUTO.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_missing_tensor(folder: Path) -> None:
    without(folder, "model.layers.1.self_attn.q_proj.second")
    with pytest.raises(ValueError, match=r"it lacks 1 tensors: model.layers.1.self_attn.q_proj.second\. A shard"):
        AUTO.from_pretrained(folder)


def test_tensors_that_the_model_does_not_have(folder: Path) -> None:
    """Those of another layer, say, of a config.json with fewer: a model would speak without them."""
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=2, forms=c["forms"][:2], layer_types=None))
    for cls in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=r"it has 9 tensors too many: model\.layers\.2\.input_layernorm\.weight, "):
            cls.from_pretrained(folder)


def test_the_base_model_leaves_the_head(folder: Path) -> None:
    _, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert report["unexpected_keys"] == {"lm_head.weight"}


def rewrite(shard: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, {"format": "pt"})


def test_a_shard_that_is_damaged_or_lacks_what_the_index_says(folder: Path) -> None:
    """Without a record, as after save_pretrained."""
    (folder / "compression.json").unlink()
    shard, name = folder / "model-00002-of-00002.safetensors", "model.layers.0.mlp.down_proj.weight"
    content = shard.read_bytes()
    damaged = r"are not whole: model-00002\S*: damaged, \d+ bytes without a header"
    for text, bad in (
        (r"are not whole: model-00002\S*: \d+ bytes, its header describes \d+\. Copy", content[:-100]),
        (damaged, b""),
        (damaged, content[:7]),
        (damaged, content[:8] + bytes(40) + content[48:]),
    ):
        shard.write_bytes(bad)
        with pytest.raises(ValueError, match=text):
            AUTO.from_pretrained(folder)
    shard.write_bytes(content)
    mine = next(name for name in load_file(shard))
    rewrite(shard, lambda tensors: tensors.pop(mine))
    with pytest.raises(ValueError, match=rf"model-00002\S*: {mine} missing"):
        AUTO.from_pretrained(folder)
    shard.write_bytes(content)
    save_file({name: torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.safetensors: not in model.safetensors.index.json, but loaded"):
        AUTO.from_pretrained(folder)


def test_a_shard_of_the_same_size_with_other_tensors(folder: Path) -> None:
    """The record names dtype and shape, as the compress side writes them."""
    shard = folder / "model-00001-of-00002.safetensors"
    header = {name: (list(t.shape), "F32") for name, t in load_file(shard).items()}
    for name, (shape, dtype) in header.items():
        edit(folder / "compression.json", lambda r, n=name, s=shape, d=dtype: r["tensors"][n].update(shape=s, dtype=d))
    AUTO.from_pretrained(folder)
    name = next(name for name, (shape, _) in header.items() if len(shape) == 2)
    rewrite(shard, lambda tensors: tensors.update({name: tensors[name].mT.contiguous()}))
    with pytest.raises(ValueError, match=rf"model-00001\S*: {name} \[\d+, \d+\], not \["):
        AUTO.from_pretrained(folder)


def test_shards_of_another_checkpoint(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not those that compression.json describes: model-00002\S*: \d+ bytes, not"):
        AUTO.from_pretrained(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: missing"):
        AUTO.from_pretrained(folder)


def test_an_index_that_names_no_file(folder: Path) -> None:
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.weight": 3}))
    with pytest.raises(ValueError, match=r"index.json: damaged: TypeError: weight_map names files, not int"):
        AUTO.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../model/x.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_that_leads_out_of_the_folder(folder: Path, name: str) -> None:
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.weight": name}))
    with pytest.raises(ValueError, match="leads out of the checkpoint's folder"):
        checking_lamina.check_checkpoint(folder)


@pytest.mark.parametrize("content", [b"\xff" * 64, (10**9).to_bytes(8, "little") + b"{}", b"[" * 100_000])
def test_a_header_that_claims_too_much_is_not_read(folder: Path, content: bytes) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    length = b"" if content[:1] != b"[" else len(content).to_bytes(8, "little")
    shard.write_bytes(length + content)
    (folder / "compression.json").unlink()
    with pytest.raises(ValueError, match="without a header that can be read"):
        checking_lamina.check_checkpoint(folder)


def test_an_index_of_another_checkpoint(folder: Path) -> None:
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head.weight in None, compression.json says model-00001"):
        AUTO.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(version=2), "version 2, this lamina knows 1"),
        (lambda record: record.pop("shards"), "compression.json: damaged: KeyError: 'shards'"),
        (lambda record: record.update(shards=["a"]), "compression.json: damaged: AttributeError"),
        (lambda record: record["shards"].update(a={}), "compression.json: damaged: KeyError: 'size'"),
    ],
)
def test_a_record_that_cannot_be_used(folder: Path, change: Any, message: str) -> None:
    edit(folder / "compression.json", change)
    with pytest.raises(ValueError, match=message):
        AUTO.from_pretrained(folder)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"form": "low_rank", "rank": 5},
            r"lacks 1 tensors: \S+q_proj.second.weight; it has 1 .* too many: \S+q_proj.\S*second",
        ),
        (
            {"form": "head_low_rank", "rank": 5},
            r"2 tensors are .*: \S+q_proj.first.weight \(36, 48\), not \(30, 48\), ",
        ),
        (
            {"form": "head_low_rank", "rank": 5},
            r"model.layers.1.self_attn.q_proj.second \(6, 12, 6\), not \(6, 12, 5\)",
        ),
        ({"form": "head_low_rank", "rank": "6"}, "layer 1, q: head_low_rank rank '6', allowed is 1 to head_dim 12"),
        ({"form": "of tomorrow", "rank": 5}, "layer 1, q: unknown form 'of tomorrow', this version knows dense, "),
        ({"form": ["dense"]}, r"layer 1, q: unknown form \['dense'\]"),
        ({"form": "head_low_rank", "rank": 6, "of": 1}, "layer 1, q: head_low_rank has no of"),
        ("dense", "layer 1, q: the form must be an object, not 'dense'"),
    ],
)
def test_forms_that_do_not_fit_the_tensors(folder: Path, spec: Any, message: str) -> None:
    edit(folder / "config.json", lambda config: config["forms"][1].update(q=spec))
    with pytest.raises(ValueError, match=message):
        AUTO.from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "ending", "message"),
    [
        (kinds.pivoted, ".indices", r"the indices of pivoted down are not 24 ascending positions below 48"),
        (kinds.tucker_sparse, ".mask", r"the core's bitmap has \d+ bits, config.json says \d+"),
    ],
)
def test_damaged_positions(kind: Any, ending: str, message: str, tmp_path: Path) -> None:
    """Of rows, and of a sparse core's numbers: seen at loading, as a compiled graph would not look."""
    model, _ = factored("llama-gqa", kind, 0.5)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda t: next(v for k, v in t.items() if k.endswith(ending)).zero_())
    with pytest.raises(ValueError, match=message):
        AUTO.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "48", "hidden_size: '48' is not a positive integer"),
        ("num_hidden_layers", 10**12, "num_hidden_layers: 1000000000000 is not .* below 10001"),
        ("head_dim", True, "head_dim: True is not a positive integer"),
        ("intermediate_size", None, "intermediate_size: None is not a positive integer"),
        ("block", "x", "block is 'x', not a dict"),
        ("block", {"parallel": "x"}, "block.parallel is 'x', which is not allowed"),
        ("block", {"head": None}, "block.head is None, which is not allowed"),
        ("sliding_window", 0, "sliding_window: 0 is not a positive integer"),
        ("forms", 1.5, "forms is 1.5, not a list"),
        ("norm_eps", -1, "norm epsilon: -1 is not a number from 0 to 1"),
        ("norm_eps", "x", "norm epsilon: 'x' is not a number"),
        ("hidden_act", "x", "activation: 'x' is not an activation of transformers"),
    ],
)
def test_fields_of_another_kind(whole: Path, field: str, value: Any, message: str) -> None:
    """Errors that would come late and far from their cause, or none at all."""
    config = json.loads((whole / "config.json").read_text())
    changed = {**config["block"], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message):
        LaminaConfig(**{**config, field: changed})


def test_codes_that_an_old_package_reads_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def field(*bits: int) -> dict[str, Any]:
        return {"config_groups": {str(b): {"weights": {"num_bits": b}} for b in bits}}

    monkeypatch.setattr(checking_lamina, "version", lambda name: {"compressed-tensors": "0.17.0"}[name])
    checking_lamina.check_reader(field(4, 8))
    checking_lamina.check_reader({"quant_method": "quanto"})
    with pytest.raises(ImportError, match=r"weights of 3 bits need compressed-tensors 0.20 or newer, and 0.17.0 is"):
        checking_lamina.check_reader(field(4, 3))
    monkeypatch.setattr(checking_lamina, "version", lambda name: "0.20.0")
    checking_lamina.check_reader(field(4, 3))


def test_heads_that_vllms_transformers_backend_does_not_have(whole: Path) -> None:
    """It says so where it builds the model (tests/vllm), and would fail at a shape in the first forward pass."""
    config = LaminaConfig(**json.loads((whole / "config.json").read_text()))
    modeling_lamina._check_backend(config)
    config.layer_sizes = [{}, {"intermediate_size": 24}, {"num_key_value_heads": 1}]
    with pytest.raises(ValueError, match=r"layer 2: num_key_value_heads 1: vLLM's .* does not support such heads"):
        modeling_lamina._check_backend(config)
    wide, _ = factored("llama-gqa", kinds.absorbed, 0.8)
    with pytest.raises(ValueError, match=r"layer 0: values of \d+ numbers beside keys of 12: vLLM's Transformers"):
        modeling_lamina._check_backend(wide.config)


@pytest.mark.parametrize(
    ("source", "backend", "own"),
    [
        ("llama-gqa", None, None),
        ("granite", "logit_divisor", "logit_divisor, residual_scale"),
        ("olmo3", None, "head_norms, attention_out_norm, mlp_out_norm, a rotation for each layer type"),
    ],
)
def test_parts_of_a_block_that_vllm_does_not_compute(source: str, backend: str | None, own: str | None) -> None:
    config = LaminaConfig(**describe(make_source(source).config))
    assert (vllm_lacks(config, own_class=False), vllm_lacks(config, own_class=True)) == (backend, own)
    if backend is not None:
        with pytest.raises(ValueError, match=f"vLLM's Transformers backend does not compute {backend}"):
            modeling_lamina._check_backend(config)


def test_forms_that_are_no_objects(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config["forms"].__setitem__(1, ["dense"]))
    with pytest.raises(ValueError, match=r"layer 1: forms are an object with an entry for a role, not \['dense'\]"):
        AUTO.from_pretrained(folder)


@pytest.mark.usefixtures("modules_cache")
def test_a_missing_file_of_the_modelling_code(folder: Path) -> None:
    (folder / "layers_lamina.py").unlink()
    edit(folder / "config.json", lambda config: config.update(model_type="not-installed"))
    with pytest.raises(OSError, match=r"layers_lamina\.py"):
        AUTO.from_pretrained(folder, trust_remote_code=True)


class Quantised(QuantizedLayer):  # type: ignore[misc]
    """A quantised cache layer that rounds nothing: no library for it is needed."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_a_quantised_cache_that_cannot_hold_the_widths(whole: Path) -> None:
    """Layer 0 keeps 3 · 12 key and 3 · 5 value numbers a token."""
    model = AUTO.from_pretrained(whole)
    ids_BT = torch.tensor([[5, 6, 7]])

    def cache(group: int) -> Cache:
        return Cache(layers=[Quantised(q_group_size=group) for _ in range(3)])

    with pytest.raises(ValueError, match=r"layer 0: a quantised cache in groups of 64 .* keys of 36 numbers per token"):
        model.generate(ids_BT, past_key_values=cache(64), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"layer 0: .* groups of 12 cannot hold values of 15 numbers per token"):
        model.generate(ids_BT, past_key_values=cache(12), max_new_tokens=3)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids_BT, past_key_values=cache(3), **options), model.generate(ids_BT, **options))


@torch.no_grad()
def test_a_static_cache_that_was_allocated_too_early() -> None:
    """transformers allocates heads of `head_dim`; dense layers fit, narrower values and latents say what to do."""
    ids = torch.arange(4, 12)[None]
    for kind in (kinds.latent_both, kinds.latent_keys_narrow_values, kinds.low_rank_in_bases, kinds.dense):
        model, _ = factored("llama-gqa", kind, 0.5)
        shape, config = model.config.layer_shape(0), model.config
        cache = StaticCache(config=config, max_cache_len=16)
        cache.early_initialization(1, shape.num_key_value_heads, shape.head_dim, torch.float32, torch.device("cpu"))
        if kind is kinds.dense:
            lazy = model(ids, past_key_values=StaticCache(config=config, max_cache_len=16)).logits
            torch.testing.assert_close(model(ids, past_key_values=cache).logits, lazy)
            continue
        with pytest.raises(ValueError, match=r"layer 0: a static cache .* cannot hold .* leave out early_init"):
            model(ids, past_key_values=cache)


def test_weights_in_stored_formats_that_vllm_does_not_decode() -> None:
    """Our class decodes them, the Transformers backend knows no such module, and beside codes both give up."""
    stored = "weights in stored formats of the source"
    config = LaminaConfig(**describe(make_source("llama-gqa").config), stored_formats=[{}])
    assert (vllm_lacks(config, own_class=False), vllm_lacks(config, own_class=True)) == (stored, None)
    config.quantization_config = {"quant_method": "compressed-tensors"}
    assert vllm_lacks(config, own_class=True) == f"{stored} beside rounded ones"
