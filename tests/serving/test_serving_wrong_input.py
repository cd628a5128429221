"""Checkpoints that are not whole or not of one piece: an error that says what is wrong, never random weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Cache, StaticCache
from transformers.cache_utils import QuantizedLayer

from tests.serving import serving_factors as kinds
from tests.serving.serving_factors import factored
from tests.serving.test_serving_loading import write_checkpoint

AUTO: Any = AutoModelForCausalLM


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    write_checkpoint(folder, "llama-gqa")
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
    with pytest.raises(ValueError, match=r"lacks 1 tensors .*: model.layers.1.self_attn.q_proj.second\. A shard"):
        AUTO.from_pretrained(folder)


def test_stray_tensors_are_reported(folder: Path) -> None:
    (folder / "compression.json").unlink()
    shard = folder / "model-00001-of-00002.safetensors"
    save_file({**load_file(shard), "lm_head.bias": torch.zeros(97)}, shard, {"format": "pt"})
    edit(
        folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.bias": shard.name})
    )
    _, report = AUTO.from_pretrained(folder, output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"lm_head.bias"}


def test_shards_of_another_checkpoint(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not those that compression.json describes: model-00002\S*: \d+ bytes, not"):
        AUTO.from_pretrained(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors: missing"):
        AUTO.from_pretrained(folder)


def test_an_index_of_another_checkpoint(folder: Path) -> None:
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head.weight in None, compression.json says model-00001"):
        AUTO.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(version=2), "version 2, this lamina knows 1"),
        (lambda record: record.pop("shards"), "compression.json: damaged: KeyError: 'shards'"),
    ],
)
def test_a_record_that_cannot_be_used(folder: Path, change: Any, message: str) -> None:
    edit(folder / "compression.json", change)
    with pytest.raises(ValueError, match=message):
        AUTO.from_pretrained(folder)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"form": "low_rank", "rank": 5}, "ignore_mismatched_sizes"),
        ({"form": "head_low_rank", "rank": 5}, "ignore_mismatched_sizes"),
        ({"form": "of tomorrow", "rank": 5}, "layer 1, q: unknown form 'of tomorrow', this version knows dense, "),
    ],
)
def test_forms_that_do_not_fit_the_tensors(folder: Path, spec: dict[str, Any], message: str) -> None:
    edit(folder / "config.json", lambda config: config["forms"][1].update(q=spec))
    with pytest.raises((ValueError, RuntimeError), match=message):
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

    with pytest.raises(ValueError, match=r"layer 0: a quantised cache in groups of 64 .* keys of 36 numbers a token"):
        model.generate(ids_BT, past_key_values=cache(64), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"layer 0: .* groups of 12 cannot hold values of 15 numbers a token"):
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
