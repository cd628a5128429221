"""Multimodal models: the text decoder is compressed, towers are copied, and the whole loads by two ways."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

import lamina
from lamina.wrapper_lamina import whole_config
from manifests.errors import InputError
from pipeline.families.registry import checkpoint_config
from pipeline.families.wrapper import WRAPPERS, module_names
from pipeline.inputs.sources import describe_dense
from stores.checkpoint import copy_shard
from stores.source import open_source
from tests.encoders import encode_model
from tests.end_to_end.jobs import MakeJob, command, read_tensors, relative_error
from tests.factories import DELTA, EXPERTS, GEOMETRY, OWN_FIELDS, SHARED_EXPERT, make_tokenizer, randomise_

TOWERS, PROJECTORS = re.compile("vision|visual|projector"), re.compile("projector|merger")
IMAGE, SIDE, PATCH = 300, 16, 4  # the token in place of a patch; pixels of an image's and a patch's side
TEXT: dict[str, Any] = {**GEOMETRY, "num_hidden_layers": 2, "tie_word_embeddings": False}
TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **TEXT, **DELTA, "layer_types": [*DELTA["layer_types"]],
    "rope_parameters": {**DELTA["rope_parameters"], "mrope_section": [2, 1, 1]},
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    **TEXT, **EXPERTS["llama4_text"], **OWN_FIELDS["llama4_text"], "moe_layers": [1],
    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 48,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
QWEN_TOKENS: dict[str, Any] = {"image_token_id": IMAGE, "vision_start_token_id": 299, "tie_word_embeddings": False}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral3": (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {
            "text_config": {"model_type": "mistral", "sliding_window": 12, **TEXT},
            "vision_config": {"model_type": "pixtral", "head_dim": 12, **TOWER},
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {
            "text_config": {
                "sliding_window": 12, "query_pre_attn_scalar": 20, **TEXT,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {"model_type": "siglip_vision_model", **TOWER},
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": (
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        {"text_config": {"model_type": "qwen3_5_text", **QWEN}, "vision_config": QWEN_TOWER, **QWEN_TOKENS},
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        {
            "text_config": {"model_type": "qwen3_5_moe_text", **QWEN, **SHARED_EXPERT},
            "vision_config": QWEN_TOWER,
            **QWEN_TOKENS,
        },
    ),
    "llama4": (
        Llama4Config,
        Llama4ForConditionalGeneration,
        {
            "text_config": {"model_type": "llama4_text", **LLAMA4},
            "vision_config": {
                **TOWER, "intermediate_size": 96, "projector_input_dim": 20, "projector_output_dim": 20,
                "vision_output_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "llava": (
        LlavaConfig,
        LlavaForConditionalGeneration,
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **TOWER},
            "image_seq_length": 16,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


LATER = ("llama4", "qwen3_5")  # whose second form is compared each night


def make_whole(folder: Path, kind: str, newer: bool = False, **text: Any) -> Path:
    """Save a random multimodal model in two files. `newer`: tensors have the names of modules, as some files have."""
    config_type, model_type, fields = KINDS[kind]
    fields = {**fields, "text_config": {**fields["text_config"], **text}}
    model = randomise_(model_type(config_type(image_token_index=IMAGE, **fields)), 0)
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    make_tokenizer(320).save_pretrained(folder)
    rename(folder, partial(module_names, kind=kind) if newer else older_names)
    return folder


def older_names(names: Iterable[str]) -> dict[str, str]:
    """Names as in files on the hub, where towers of two kinds have one more module."""
    tower = "vision_tower."
    return {
        name: f"{tower}vision_model.{name.removeprefix(tower)}"
        if name.startswith(tower) and not name.startswith((f"{tower}transformer", f"{tower}ln_pre", f"{tower}patch"))
        else name
        for name in names
    }


def rename(folder: Path, names_of: Callable[[Iterable[str]], dict[str, str]]) -> None:
    """Give the tensors in the files of a checkpoint other names; those that get none are removed."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        names = names_of(tensors)
        save_file({names[name]: tensor for name, tensor in tensors.items() if name in names}, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = names_of(content["weight_map"])
    content["weight_map"] = {names[name]: file for name, file in content["weight_map"].items() if name in names}
    index.write_text(json.dumps(content))


def logits_of(model: Any, kind: str, image: bool = True) -> torch.Tensor:
    """The logits of a text with an image in it, or of the text alone."""
    generator = torch.Generator().manual_seed(7)
    ids_BT = torch.randint(3, 290, (2, 30), generator=generator)
    more: dict[str, Any] = {}
    if image:
        count = 16 if kind == "llava" else 4
        ids_BT[:, 5 : 5 + count] = IMAGE
        more["pixel_values"] = torch.randn(2, 3, SIDE, SIDE, generator=generator)
    if image and kind == "mistral3":
        more["image_sizes"] = torch.tensor([[SIDE, SIDE]] * 2)
    if image and kind == "gemma3":
        more["token_type_ids"] = (ids_BT == IMAGE).long()
    if image and kind in ("qwen3_5", "qwen3_5_moe"):
        more["pixel_values"] = torch.randn(2 * 16, 3 * 2 * PATCH**2, generator=generator)
        more |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids_BT == IMAGE).int()}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids_BT, **more).logits
    return logits


def source_model(folder: Path) -> Any:
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def text_model(folder: Path) -> Any:
    """The text decoder as `AutoModelForCausalLM` loads it from OUTPUT."""
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("kind", "newer"),
    [
        pytest.param(kind, newer, marks=pytest.mark.nightly if (newer and kind in LATER) or "moe" in kind else ())
        for kind in WRAPPERS
        for newer in (False, True)
    ],
)
def test_the_decoder_is_compressed_and_towers_are_copied(kind: str, newer: bool, tmp_path: Path, job: MakeJob) -> None:
    source = make_whole(tmp_path / "source", kind, newer)
    made = job(source, **{"methods": [{"method": "loss_aware"}], "calibration.propagate": "dense"})
    assert made.run().code == 0
    before, after = read_tensors(source), read_tensors(made.output)
    towers = {old: new for old, new in module_names(before, kind).items() if TOWERS.search(new)}
    assert len(towers) > 5
    assert all(torch.equal(before[old], after[new]) for old, new in towers.items())
    assert (made.output / "preprocessor_config.json").read_bytes() == (source / "preprocessor_config.json").read_bytes()
    whole, report = AutoModelForImageTextToText.from_pretrained(made.output, output_loading_info=True)
    assert not any(report.values()), report
    exported = tmp_path / "exported"
    assert command("export", str(made.output), "--to", "dense", str(exported)).code == 0
    dense = source_model(exported)
    for image in (True, False):
        assert relative_error(logits_of(whole, kind, image), logits_of(dense, kind, image)) < 1e-5
    assert relative_error(logits_of(whole, kind), logits_of(source_model(source), kind)) > 1e-3
    alone = text_model(made.output)
    assert relative_error(logits_of(alone, kind, False), logits_of(whole, kind, False)) < 1e-5
    assert command("verify", str(made.output), "--source", str(source)).code == 0


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_at_full_rank_the_whole_is_the_source(kind: str, tmp_path: Path, job: MakeJob) -> None:
    source = make_whole(tmp_path / "source", kind)
    made = job(source, **{"methods": [{"method": "flat_llm", "query_key": "head_pca"}], "budget.keep": 1.0})
    ended = made.run()
    assert ended.code == 0, ended.err
    for image in (True, False):
        ours, theirs = AutoModelForImageTextToText.from_pretrained(made.output), source_model(source)
        assert relative_error(logits_of(ours, kind, image), logits_of(theirs, kind, image)) < 1e-5


def test_it_loads_without_the_package(tmp_path: Path, modules_cache: Path) -> None:
    source, output = make_whole(tmp_path / "source", "gemma3"), tmp_path / "output"
    checkpoint, standard = describe_dense(open_source(str(source)))
    copy_shard(output, "model.safetensors", checkpoint, checkpoint.tensors)
    written = checkpoint_config(standard, standard["forms"], "float32")
    (output / "config.json").write_text(json.dumps(written))
    for name in lamina.MODELLING_FILES:
        (output / name).write_bytes(lamina.modelling_source(name))
    code = f"""
import sys
from transformers import AutoModelForImageTextToText
model = AutoModelForImageTextToText.from_pretrained({str(output)!r}, trust_remote_code=True)
assert "lamina" not in sys.modules
assert type(model.model.language_model).__name__ == "LaminaModel", type(model.model.language_model)
"""
    environment = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(modules_cache)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "gemma3",
            {"text_config.final_logit_softcapping": 9.0},
            "logit_softcap: the text model changes its logits, but the class of gemma3",
        ),
        ("mistral3", {"text_config.model_type": "phi3"}, "'phi3' inside of mistral3 is not supported"),
        ("mistral3", {"model_type": "kosmos"}, "model_type 'kosmos' is not supported.*its text_config is of 'mistral'"),
        ("llava", {"architectures": ["LlavaModel"]}, "LlavaForConditionalGeneration"),
        ("llava", {"vision_config.hidden_size": 36}, r"weights of towers .*shape \[24\], expected \[36\]"),
        ("gemma3", {"text_config.attention_bias": True}, "q_proj.bias: missing"),
        ("llama4", {"text_config.tie_word_embeddings": True}, "tie_word_embeddings: true inside of llama4 is not"),
    ],
)
def test_wrong_configs_are_refused(kind: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = make_whole(tmp_path, kind)
    config = json.loads((source / "config.json").read_text())
    for path, value in fields.items():
        *parents, last = path.split(".")
        (config[parents[0]] if parents else config)[last] = value
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"(?s){message}"):
        describe_dense(open_source(str(source)))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_missing_tensors_of_towers_are_refused(kind: str, tmp_path: Path) -> None:
    source = make_whole(tmp_path, kind)
    lost = next(name for name in read_tensors(source) if PROJECTORS.search(name))
    rename(source, lambda names: {name: name for name in names if name != lost})
    with pytest.raises(InputError, match=rf"{lost.rpartition('.')[0]}\S*: missing"):
        describe_dense(open_source(str(source)))


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("kind", ["mistral3", "gemma3"])
def test_weights_in_stored_formats_are_refused_before_anything_is_written(
    kind: str, tmp_path: Path, job: MakeJob
) -> None:
    encoded, _ = encode_model(make_whole(tmp_path / "source", kind), tmp_path, "fp8 blocks")
    made = job(encoded, methods=[{"method": "flat_llm"}])
    for ended in (command("plan", str(made.write().manifest)), made.run()):
        assert ended.code == 2
        assert "its weights are in a stored format, and OUTPUT keeps the class of a multimodal model" in ended.err
        assert not made.output.exists()


def test_a_text_model_has_no_towers() -> None:
    with pytest.raises(ValueError, match="no towers for images"):
        whole_config(lamina.LaminaConfig())


@pytest.mark.usefixtures("inline")
def test_a_rounded_decoder_loads_whole(tmp_path: Path, job: MakeJob) -> None:
    source = make_whole(tmp_path / "source", "gemma3", hidden_size=64, intermediate_size=96)
    changes: dict[str, Any] = {"methods": [], "budget": None, "quantize": {"bits": 4, "group": 32}}
    made = job(source, **changes, **{"calibration.propagate": "dense"})
    ended = made.run()
    assert ended.code == 0, ended.err
    whole = AutoModelForImageTextToText.from_pretrained(made.output)
    exported = tmp_path / "exported"
    assert command("export", str(made.output), "--to", "dense", str(exported)).code == 0
    assert relative_error(logits_of(whole, "gemma3"), logits_of(source_model(exported), "gemma3")) < 1e-5
    stock = tmp_path / "stock"
    assert command("export", str(made.output), "--to", "stock", str(stock)).code == 0
    assert relative_error(logits_of(source_model(stock), "gemma3"), logits_of(source_model(exported), "gemma3")) < 1e-5
    faults = command("export", str(made.output), "--to", "gguf", str(tmp_path / "model.gguf"))
    assert (faults.code, "the towers of a gemma3 model" in faults.err) == (2, True)
