"""Whole jobs on hybrids and on models with an indexer: attention and states are copied bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifests.errors import InputError
from pipeline.families.registry import geometry_of, standard_config
from pipeline.families.source_config import source_config
from pipeline.inputs.sources import open_dense
from tests import factories
from tests.end_to_end.jobs import Job, command, load, logits_of, read_tensors, relative_error, some_tokens

pytestmark = pytest.mark.usefixtures("inline")
MakeJob = Callable[..., Job]
DENSE = {"calibration.propagate": "dense"}
JOBS: dict[str, dict[str, Any]] = {
    "loss_aware": {"methods": [{"method": "loss_aware", "attention": False, "query_key": False}], **DENSE},
    "flat_llm": {"methods": [{"method": "flat_llm", "attention": False}], "quantize": {"bits": 8, "group": None}},
    "svd_llm": {"methods": [{"method": "svd_llm"}]},
    "joint_rank_k": {"methods": [{"method": "joint_rank_k", "query_key": "none", "mlp": True}]},
    "magnitude": {"methods": [{"method": "magnitude"}]},
}
WHOLE: dict[str, dict[str, Any]] = {
    "flat_llm": {"method": "flat_llm", "attention": False},
    "loss_aware": {"method": "loss_aware", "attention": False, "query_key": False},
    "svd": {"method": "svd"},
    "svd_llm": {"method": "svd_llm"},
    "magnitude": {"method": "magnitude"},
}
FAMILIES = (*factories.HYBRIDS, *factories.INDEXED, *factories.CHUNKED)
FIRST = {
    ("loss_aware", "qwen3_next"),
    ("flat_llm", "qwen3_5_text"),
    ("svd_llm", "qwen3_5_moe_text"),
    ("svd_llm", "kimi_linear"),
    ("loss_aware", "nemotron_h"),
    ("loss_aware", "deepseek_v32"),
    ("loss_aware", "llama4_text"),
    ("magnitude", "glm_moe_dsa"),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if (name, family) in FIRST else pytest.mark.nightly)
        for name in JOBS
        for family in FAMILIES
        if (name, family) != ("joint_rank_k", "nemotron_h")  # its MLPs have no gate
    ],
)
def test_a_job(name: str, family: str, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", family)
    run = job(source, **JOBS[name])
    planned = command("plan", str(run.write().manifest), "--json").json
    before = read_tensors(source)
    assert planned["dense_numbers"] == sum(tensor.numel() for tensor in before.values())
    ended = run.run()
    assert ended.code == 0, ended.err
    after = read_tensors(run.output)
    layers = geometry_of(open_dense(str(source))[1]).layers
    copied = [f"{layer.path(each.role)}.{part}" for layer in layers for each in layer.copied for part, _ in each.shapes]
    assert len(copied) > 15
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in copied)
    verified = command("verify", str(run.output), "--source", str(source), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    model = load(run.output, trust_remote_code=True)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    logits = logits_of(model, ids)
    assert relative_error(logits_of(model, ids[:, 12:], past_key_values=cache), logits[:, 12:]) < 1e-4
    assert 1e-3 < relative_error(logits, logits_of(load(source), ids)) < 1.5


@pytest.mark.parametrize(
    ("entry", "family"),
    [
        *((WHOLE["flat_llm"], family) for family in FAMILIES),
        *(pytest.param(WHOLE[name], family, marks=pytest.mark.nightly) for name in [*WHOLE][1:] for family in FAMILIES),
    ],
)
def test_what_loses_nothing_is_the_source(entry: dict[str, Any], family: str, job: MakeJob, tmp_path: Path) -> None:
    """After an export back to the family's class, too."""
    source = factories.make_model(tmp_path / "source", family)
    samples = 64 if family == "nemotron_h" else 12  # channels that no sample activates cost nothing
    run = job(source, methods=[{**entry, "keep": 1.0}], budget=None, **DENSE, **{"calibration.samples": samples})
    assert run.run().code == 0
    ids = some_tokens(320)
    expected = logits_of(load(source), ids)
    assert relative_error(logits_of(load(run.output), ids), expected) < 1e-5
    ended = command("export", str(run.output), "--to", "dense", str(tmp_path / "dense"))
    assert ended.code == 0, ended.err
    assert relative_error(logits_of(load(tmp_path / "dense"), ids), expected) < 1e-4
    opened, again = (open_dense(str(folder))[0].tensors for folder in (source, tmp_path / "dense"))
    assert opened.keys() == again.keys(), "the export's experts may be fused"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "calibration.sequence_length: 24 is longer than the model's index_topk 20"),
        ({"calibration.sequence_length": 16, "evaluation.perplexity.window": 22}, "window: 22 is longer than the"),
    ],
)
def test_samples_that_an_indexer_would_choose_from_are_refused(
    changes: dict[str, Any], reason: str, job: MakeJob, text: Path, tmp_path: Path
) -> None:
    """Where layers share its choice: each layer is run alone."""
    source = factories.make_model(tmp_path / "source", "glm_moe_dsa", index_topk=20)
    scored = {"evaluation.perplexity.text": {"files": [str(text)]}} if len(changes) > 1 else {}
    ended = job(source, methods=[{"method": "magnitude"}], **changes, **scored).run()
    assert ended.code == 2
    assert reason in ended.err


@pytest.mark.parametrize("kinds", [["shared", "full", "full"], ["full", "half", "full"], ["full", "shared"]])
def test_indexers_that_cannot_be_are_refused(kinds: list[str]) -> None:
    config = {**factories.make_config("glm_moe_dsa").to_dict(), "indexer_types": kinds}
    with pytest.raises(InputError, match="indexer_types: "):
        standard_config(config)


def test_kimi_linear_as_on_the_hub(tmp_path: Path) -> None:
    """Its files have another name of dense MLPs than those that transformers writes, and other fields."""
    source = factories.make_model(tmp_path / "source", "kimi_linear", max_shard_size="1GB")
    opened, standard = open_dense(str(source))
    written = source_config(standard, "float32")
    linear = written.pop("linear_attn_config")
    assert linear == {
        "head_dim": 6, "num_heads": 3, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1, 3],
    }  # fmt: skip
    theirs = {name: value for name, value in written.items() if not name.startswith(("linear_", "layer_", "mlp_layer"))}
    (source / "config.json").write_text(json.dumps({**theirs, "linear_attn_config": linear, "mla_use_nope": True}))
    [file] = source.glob("*.safetensors")
    tensors = {name.replace("0.block_sparse_moe", "0.mlp"): tensor for name, tensor in load_file(file).items()}
    assert "model.layers.0.mlp.gate_proj.weight" in tensors
    save_file(tensors, file, {"format": "pt"})
    again, same = open_dense(str(source))
    assert same == standard
    assert again.tensors.keys() == opened.tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("family", "entry", "reason"),
    [
        ("qwen3_5_text", {"method": "lorc"}, "no method compresses the attention of qwen3_5_text models"),
        ("nemotron_h", {"method": "joint_rank_k", "query_key": "none"}, "nemotron_h has an MLP without gate"),
    ],
)
def test_what_does_not_apply_is_refused(
    family: str, entry: dict[str, Any], reason: str, job: MakeJob, tmp_path: Path
) -> None:
    ended = job(factories.make_model(tmp_path / "source", family), methods=[entry]).run()
    assert ended.code == 2
    assert reason in ended.err
