"""Attention that is not softmax over keys: in hybrids, and in foreign layers, which are copied."""

from __future__ import annotations

import json
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
from tests.end_to_end.exports import export
from tests.end_to_end.jobs import (
    FLAT_LLM,
    Job,
    MakeJob,
    command,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
    source_error,
)

pytestmark = pytest.mark.usefixtures("inline")

LOSS_AWARE: dict[str, Any] = {"method": "loss_aware", "widths": 3, "attention": False}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "loss_aware": ("deepseek_v3", {"methods": [LOSS_AWARE], "calibration.propagate": "dense", "budget.keep": 0.6}),
    "corrected": (
        "deepseek_v2",
        {"methods": [{**LOSS_AWARE, "correct": "output"}], "calibration.propagate": "dense", "budget.keep": 0.6},
    ),
    "flat_llm": ("deepseek_v2", {"methods": [FLAT_LLM]}),
    "svd": ("deepseek_v3", {"methods": [{"method": "svd"}]}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss_aware": ("deepseek_v3", {"methods": [LOSS_AWARE], "calibration.propagate": "dense"}),
    "flat_llm": ("deepseek_v2", {"methods": [FLAT_LLM]}),
    "svd_llm": ("deepseek_v3", {"methods": [{"method": "svd_llm"}]}),
}


def checked_error(output: Path, source: Path) -> float:
    """Verify a checkpoint, and compare its logits with and without a cache. Return their error against the source's."""
    verified = command("verify", str(output), "--source", str(source), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err
    ids_BT, model = some_tokens(320), load(output, trust_remote_code=True)
    cache = model(ids_BT[:, :12], use_cache=True).past_key_values
    logits_BTV = logits_of(model, ids_BT)
    assert relative_error(logits_of(model, ids_BT[:, 12:], past_key_values=cache), logits_BTV[:, 12:]) < 1e-4
    return relative_error(logits_BTV, logits_of(load(source), ids_BT))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    return {
        family: factories.make_model(folder / family, family, dtype=torch.bfloat16, first_k_dense_replace=3)
        for family in ("deepseek_v2", "deepseek_v3")
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(JOBS))
def test_a_job(name: str, job: MakeJob, sources: dict[str, Path]) -> None:
    family, changes = JOBS[name]
    source = sources[family]
    run = job(source, **changes)
    planned = command("plan", str(run.write().manifest), "--json").json
    tensors = read_tensors(source)
    assert planned["dense_numbers"] == sum(tensor.numel() for tensor in tensors.values())
    ended = run.run()
    assert ended.code == 0, ended.err
    assert f"the latent attention of {family} models is copied unchanged" in ended.err
    stored, record = read_tensors(run.output), run.compression()
    attention = [tensor for tensor in tensors if ".self_attn." in tensor]
    assert len(attention) == 3 * 10
    for tensor in attention:
        assert torch.equal(stored[tensor], tensors[tensor])
        assert record["tensors"][tensor]["origin"] == "copied"
    counts = record["counts"]
    assert counts["cache_bytes_per_token"]["dense"] == counts["cache_bytes_per_token"]["compressed"] == 2 * 3 * (12 + 6)
    kept = counts["decoder_parameters"]["compressed"] / counts["decoder_parameters"]["dense"]
    keep = run.document()["budget"]["keep"]
    assert keep - 0.06 < kept <= keep
    verified = command("verify", str(run.output), "--source", str(source))
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    model = load(run.output, trust_remote_code=True)
    assert 1e-3 < relative_error(logits_of(model, ids), logits_of(load(source), ids)) < 1.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(MIXTURES))
def test_a_job_on_a_mixture(name: str, job: MakeJob, tmp_path: Path) -> None:
    family, changes = MIXTURES[name]
    source = factories.make_model(tmp_path / "source", family)
    run = job(source, **changes)
    ended = run.run()
    assert ended.code == 0, ended.err
    before, after = read_tensors(source), read_tensors(run.output)
    copied = [tensor for tensor in before if ".self_attn." in tensor or ".mlp.gate." in tensor]
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in copied)
    assert checked_error(run.output, source) < 1.5


@pytest.mark.nightly
def test_layers_that_predict_further_tokens_are_left_out(job: MakeJob, tmp_path: Path) -> None:
    """As transformers leaves them out. It is said before the job begins and on the card."""
    source = factories.make_model(tmp_path / "source", "deepseek_v3", max_shard_size="1GB")
    tensors = read_tensors(source)
    further = {f"model.layers.3.{name}": torch.ones(4, 4) for name in ("eh_proj.weight", "self_attn.q_a_proj.weight")}
    save_file(tensors | further, source / "model.safetensors", metadata={"format": "pt"})
    run = job(source)
    ended = run.run()
    assert ended.code == 0, ended.err
    said = "2 tensors of the layers that predict further tokens are left out (model.layers.3.eh_proj.weight"
    assert said in ended.err
    assert not {*read_tensors(run.output)} & {*further}
    assert (
        "It lacks the source's layers that predict further tokens: 2 tensors" in (run.output / "README.md").read_text()
    )
    assert command("verify", str(run.output), "--source", str(source)).code == 0
    load(run.output, trust_remote_code=True)


def checked_export(run: Job, source: Path) -> Path:
    """Run a job that loses nothing: its output and its export to the family's class have the source's logits. Return
    the export."""
    assert run.run().code == 0
    assert source_error(run.output, source) < 1e-5
    ended, exported = export(run, "dense")
    assert ended.code == 0, ended.err
    assert source_error(exported, source) < 1e-4
    return exported


@pytest.mark.parametrize("family", factories.FOREIGN)
def test_a_mixture_that_loses_nothing(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", family)
    run = job(source, methods=[{**FLAT_LLM, "keep": 1.0}], budget=None)
    checked_export(run, source)


def test_at_full_rank_the_logits_are_the_source_s(job: MakeJob, sources: dict[str, Path], tmp_path: Path) -> None:
    """Also with a cache, and after an export back to the family."""
    source = sources["deepseek_v3"]
    run = job(source, methods=[{**FLAT_LLM, "keep": 1.0}], budget=None)
    assert run.run().code == 0
    ids = some_tokens(320)
    model, expected = load(run.output, trust_remote_code=True), logits_of(load(source), ids)
    assert torch.equal(logits_of(model, ids), expected)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    assert relative_error(logits_of(model, ids[:, 12:], past_key_values=cache), expected[:, 12:]) < 0.02
    for target in ("dense", "stock"):
        ended = command("export", str(run.output), "--to", target, str(tmp_path / target))
        assert ended.code == 0, ended.err
        exported = read_tensors(tmp_path / target)
        assert exported.keys() == read_tensors(source).keys()
        assert json.loads((tmp_path / target / "config.json").read_text())["model_type"] == "deepseek_v3"
        assert relative_error(logits_of(load(tmp_path / target), ids), expected) < 0.02
    ended = command("export", str(run.output), "--to", "gguf", str(tmp_path / "model.gguf"))
    assert (ended.code, "a deepseek_v3 model without experts" in ended.err) == (2, True), ended.err
    card = (run.output / "README.md").read_text()
    assert "not served: attention of deepseek_v3 inside of Lamina's model" in card


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (
            [{"method": "lorc", "cache_keep": 0.5}],
            "deepseek_v3 models have latent attention, whose keys and values are",
        ),
        ([{"method": "lestd", "target": "attention"}], "(lestd): nothing to compress: deepseek_v3 models have latent"),
        ([{**LOSS_AWARE, "mlp": False}], "(loss_aware): nothing to compress: deepseek_v3 models have latent attention"),
        (
            [{"method": "flat_llm", "ranks": {"value": 4, "mlp": 8}}],
            "ranks.value: 4 is given, but deepseek_v3 models have latent",
        ),
    ],
    ids=["lorc", "lestd", "loss_aware", "ranks"],
)
def test_methods_of_attention_are_refused(
    methods: list[dict[str, Any]], expected: str, job: MakeJob, sources: dict[str, Path]
) -> None:
    ended = job(sources["deepseek_v3"], methods=methods, **{"calibration.propagate": "dense"}).run()
    assert (ended.code, expected in ended.err) == (2, True), ended.err


DENSE = {"calibration.propagate": "dense"}
HYBRID_JOBS: dict[str, dict[str, Any]] = {
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
        for name in HYBRID_JOBS
        for family in FAMILIES
        if (name, family) != ("joint_rank_k", "nemotron_h")  # its MLPs have no gate
    ],
)
def test_a_job_on_a_hybrid(name: str, family: str, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", family)
    run = job(source, **HYBRID_JOBS[name])
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
    assert 1e-3 < checked_error(run.output, source) < 1.5


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
    exported = checked_export(run, source)
    opened, again = (open_dense(str(folder))[0].tensors for folder in (source, exported))
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
