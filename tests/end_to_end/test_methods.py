"""Every method on every family, alone and together: the real job, verified, reloaded, decoded with its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.families.registry import FAMILIES as REGISTERED
from tests.end_to_end.jobs import Job, MakeJob, command, load, logits_of, relative_error, some_tokens
from tests.end_to_end.sources import FAMILIES, make_source

pytestmark = pytest.mark.usefixtures("inline")
TRAINED = ("wiki-llama-gqa-8m", "wiki-llama-mha-6m", "babyllama-361", "opt-tiny-ts", "gptj-tiny-ts")
STEPS = 32
ENTRIES: dict[str, list[dict[str, Any]]] = {
    "lorc": [{"method": "lorc", "cache_keep": 0.5}],
    "lorc-input": [{"method": "lorc", "cache_keep": 0.4, "weighting": "input", "allocation": "uniform"}],
    "lestd": [{"method": "lestd", "target": "both", "keep": 0.6}],
    "lestd-input": [{"method": "lestd", "keep": 0.5, "weighting": "input"}],
    "lestd-model": [{"method": "lestd", "keep": 0.5, "threshold": "model"}],
    "lestd-dense-core": [{"method": "lestd", "keep": 0.6, "prune": False}],
    "joint": [{"method": "joint_rank_k", "keep": 0.6, "query_key": "joint", "mlp": False}],
    "separate-input": [
        {"method": "joint_rank_k", "keep": 0.7, "query_key": "separate", "mlp": False, "weighting": "input"}
    ],
    "svd": [{"method": "svd", "keep": 0.6}],
    "asvd": [{"method": "asvd", "keep": 0.6}],
    "svd-llm": [{"method": "svd_llm", "keep": 0.6}],
    "magnitude": [{"method": "magnitude", "keep": 0.6}],
    "flat-joint": [{"method": "flat_llm"}, {"method": "joint_rank_k", "mlp": False, "weighting": "input"}],
    "flat-lorc": [{"method": "flat_llm"}, {"method": "lorc", "value": False, "cache_keep": 0.5, "weighting": "input"}],
}
FULL: dict[str, dict[str, Any]] = {
    "lorc": {"method": "lorc", "cache_keep": 1.0},
    "lestd": {"method": "lestd", "target": "both", "keep": 1.0},
    "joint": {"method": "joint_rank_k", "mlp": False, "keep": 1.0},
    "svd": {"method": "svd", "keep": 1.0},
    "svd-llm": {"method": "svd_llm", "keep": 1.0},
    "magnitude": {"method": "magnitude", "keep": 1.0},
    "flat": {"method": "flat_llm", "query_key": "head_pca", "keep": 1.0},
    "asvd": {"method": "asvd", "keep": 1.0},
    "joint-mlp": {"method": "joint_rank_k", "keep": 1.0},
    "loss-aware": {"method": "loss_aware", "keep": 1.0},
}
# Every method that applies to a family; of the pairs, most each night.
FULL_PAIRS = [
    pytest.param(method, family, marks=[pytest.mark.nightly] if (i + j) % 6 else [])
    for i, method in enumerate(FULL)
    for j, family in enumerate(FAMILIES)
    if method != "joint-mlp" or "gate" in REGISTERED[family].block["modules"]
]


def propagate_of(method: str) -> str:
    return "dense" if method == "loss-aware" else "compressed"


def checked(job: Job) -> Any:
    """Runs a job and verifies its output against the source; the reloaded model."""
    job.run().json  # noqa: B018 - asserts the exit code
    ended = command("verify", str(job.output), "--source", str(job.source), "--bound", "10")
    assert ended.code == 0, ended.out
    return load(job.output)


# Entries of one method stand side by side: every method meets every family, every entry half of them.
PAIRS = [(name, family) for i, name in enumerate(ENTRIES) for j, family in enumerate(FAMILIES) if (i + j) % 2 == 0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_random_model(name: str, family: str, tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    budget = {"keep": 0.7} if name.startswith("flat-") else None  # the others say their sizes themselves
    model = checked(job(source, methods=ENTRIES[name], budget=budget))
    assert (
        sum(p.numel() for p in model.parameters()) < sum(t.numel() for t in load(source).parameters()) or "lorc" in name
    )
    decodes_as_it_prefills(model, source)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for i, method in enumerate(FULL)
        for j, name in enumerate(TRAINED)
        if (i + j) % 2 == 0 and (method, name) != ("joint-mlp", "gptj-tiny-ts")  # an MLP without gate
    ],
)
def test_full_rank_is_the_source(method: str, name: str, shared_dir: Path, tmp_path: Path, job: MakeJob) -> None:
    """In float32: the factors of a bfloat16 checkpoint would be rounded to bfloat16 once more."""
    source = tmp_path / "float32"
    model = AutoModelForCausalLM.from_pretrained(shared_dir / "models" / name, dtype=torch.float32)
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(shared_dir / "models" / name).save_pretrained(source)
    # With fewer tokens than channels, `loss_aware` chooses ranks below the full one that lose nothing on these tokens.
    tokens = {"calibration.samples": 64} if method == "loss-aware" else {}
    made = job(source, methods=[FULL[method]], budget=None, **{"calibration.propagate": propagate_of(method), **tokens})
    made.run().json  # noqa: B018 - asserts the exit code
    ids_BT = some_tokens(300)
    assert relative_error(logits_of(load(made.output), ids_BT), logits_of(model.eval(), ids_BT)) < 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize(("method", "family"), FULL_PAIRS)
def test_full_rank_of_a_random_model_is_the_source(method: str, family: str, tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", family, layers=2)
    propagate = {"calibration.propagate": propagate_of(method)}
    model = checked(job(source, methods=[FULL[method]], budget=None, **propagate))
    ids_BT = some_tokens(320)
    assert relative_error(logits_of(model, ids_BT), logits_of(load(source), ids_BT)) < 1e-5


def decodes_as_it_prefills(model: Any, source: Path) -> None:
    """A left-padded batch of three: the logits of 32 cached steps are those of one prefill, to 1e-4."""
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["Anna had", "In the morning Clara put the red ball on the table in", "Then she"]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    options: dict[str, Any] = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        made = model.generate(**batch, **options)
        steps_BTV = torch.stack(made.logits, dim=1)
        grown = torch.nn.functional.pad(batch["attention_mask"], (0, STEPS), value=1)
        positions = (grown.cumsum(-1) - 1).clamp_min(0)
        full_BTV = model(input_ids=made.sequences, attention_mask=grown, position_ids=positions, use_cache=False).logits
    width = batch["input_ids"].shape[1]
    assert relative_error(steps_BTV, full_BTV[:, width - 1 : -1]) < 1e-4
