"""Whole jobs on hybrids and on models with an indexer: attention and states are copied bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    copied = [tensor for tensor in before if "_attn." in tensor or ".gate." in tensor]
    assert len(copied) > 20
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
    run = job(source, methods=[{**entry, "keep": 1.0}], budget=None, **DENSE)
    assert run.run().code == 0
    ids = some_tokens(320)
    expected = logits_of(load(source), ids)
    assert relative_error(logits_of(load(run.output), ids), expected) < 1e-5
    ended = command("export", str(run.output), "--to", "dense", str(tmp_path / "dense"))
    assert ended.code == 0, ended.err
    assert relative_error(logits_of(load(tmp_path / "dense"), ids), expected) < 1e-4
    opened, again = (open_dense(str(folder))[0].tensors for folder in (source, tmp_path / "dense"))
    assert opened.keys() == again.keys(), "the export's experts may be fused"


def test_a_method_of_heads_is_refused(job: MakeJob, tmp_path: Path) -> None:
    ended = job(factories.make_model(tmp_path / "source", "qwen3_5_text"), methods=[{"method": "lorc"}]).run()
    assert ended.code == 2
    assert "no method compresses the attention of qwen3_5_text models" in ended.err
