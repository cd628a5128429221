"""Models whose latent attention no method claims: it is copied bit for bit, and all else works as on other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import factories
from tests.end_to_end.jobs import FLAT_LLM, Job, command, load, logits_of, read_tensors, relative_error, some_tokens

pytestmark = pytest.mark.usefixtures("inline")
MakeJob = Callable[..., Job]

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
    verified = command("verify", str(run.output), "--source", str(source), "--bound", "10")
    assert verified.code == 0, verified.out + verified.err
    ids = some_tokens(320)
    model = load(run.output, trust_remote_code=True)
    cache = model(ids[:, :12], use_cache=True).past_key_values
    logits = logits_of(model, ids)
    assert relative_error(logits_of(model, ids[:, 12:], past_key_values=cache), logits[:, 12:]) < 1e-4
    assert relative_error(logits, logits_of(load(source), ids)) < 1.5


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


@pytest.mark.parametrize("family", factories.FOREIGN)
def test_a_mixture_that_loses_nothing(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", family)
    run = job(source, methods=[{**FLAT_LLM, "keep": 1.0}], budget=None)
    assert run.run().code == 0
    ids = some_tokens(320)
    expected = logits_of(load(source), ids)
    assert relative_error(logits_of(load(run.output), ids), expected) < 1e-5
    ended = command("export", str(run.output), "--to", "dense", str(tmp_path / "dense"))
    assert ended.code == 0, ended.err
    assert relative_error(logits_of(load(tmp_path / "dense"), ids), expected) < 1e-4


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
