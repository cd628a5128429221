"""From a manifest to a checkpoint, and what is in it: the real command, a real Ray, real files, real transformers.

Legend: B batch, T tokens, D hidden, N intermediate, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import workers.pool
from manifests.calibration import Text
from pipeline.units.units import Unit
from stores.corpus import draw_samples, read_documents
from stores.special_tokens import text_prefix
from tests.end_to_end.jobs import (
    FLAT_LLM,
    Job,
    MakeJob,
    file_digests,
    leaves,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.shared_ray import KeptPool
from tests.end_to_end.sources import FAMILIES, densified, make_source

LAYERS = 3  # of the fixture `llama`
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]

OPTIONS = [
    {"basis": basis, "weighting": weighting, "selection": selection, "query_key": query_key}
    for basis, weighting, selection, query_key in itertools.product(
        ("value", "context"), ("none", "output"), ("leverage", "eliminate"), ("none", "head_pca")
    )
]
IN_PAIRS = [OPTIONS[row] for row in (0b0000, 0b0111, 0b1011, 0b1101, 0b1110)]  # any two options in all four ways
DENSE_NUMBERS_PER_LAYER = 48 * (64 + 32 + 32 + 64) + 3 * 48 * 80 + 2 * 48
CHANNEL_NUMBERS = 3 * 48  # the finest step of a rank: one MLP channel
OUTSIDER = """
import sys
class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lamina", "pipeline", "stores", "workers", "manifests", "ray", "zarr"):
            raise ModuleNotFoundError(f"{name} is not here")
sys.meta_path.insert(0, Closed())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
ids, *models = sys.argv[1:]
ids = load_file(ids)["ids"]
for path in models:
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    with torch.no_grad():
        save_file({"logits": model(ids).logits.contiguous()}, path + "/outsider.logits")
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, text: Path, shared_ray: None) -> Job:
    """A finished job: ten layers, every weight of which is compressed, at keep 0.7."""
    root = tmp_path_factory.mktemp("kept")
    source = make_source(root / "source", "llama", layers=10)
    job = Job(root, source, text, {"methods": [{**FLAT_LLM, "query_key": "head_pca"}], "workers.max": 2})
    assert job.run().json["output"] == str(job.output)
    return job


# -- the same function -------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "propagate"), list(zip(FAMILIES, itertools.cycle(("compressed", "dense")), strict=False))
)
def test_full_rank_is_the_source_with_every_option(family: str, propagate: str, tmp_path: Path, job: MakeJob) -> None:
    """A layer for each of the sixteen combinations of options; of the other families, for those with all pairs."""
    combinations = OPTIONS if family == "llama" else IN_PAIRS
    source = make_source(tmp_path / "source", family, layers=len(combinations))
    methods = [{**FLAT_LLM, **options, "layers": [layer]} for layer, options in enumerate(combinations)]
    made = job(source, **{"budget.keep": 1.0, "methods": methods, "calibration.propagate": propagate})
    summary = made.run().json
    assert summary["counts"]["parameters"]["dense"] == summary["counts"]["parameters"]["compressed"]
    assert all(forms["v"] == {"form": "head_pca", "rank": made_rank(source)} for forms in forms_of(made))
    ids_BT = some_tokens(320)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(source), ids_BT)
    assert relative_error(logits_of(load(made.output), ids_BT), expected) < 1e-5


def made_rank(source: Path) -> int:
    """head_dim of a source."""
    config = json.loads((source / "config.json").read_text())
    return int(config.get("head_dim") or 48 // 4)


def forms_of(job: Job) -> list[dict[str, Any]]:
    forms: list[dict[str, Any]] = json.loads((job.output / "config.json").read_text())["forms"]
    return forms


@pytest.mark.parametrize("name", ["opt-tiny-ts", "gptj-tiny-ts"])
def test_trained_model_in_one_file(name: str, shared_dir: Path, job: MakeJob) -> None:
    """Full rank in the first layer, compressed in the others."""
    source = shared_dir / "models" / name
    methods = [{**FLAT_LLM, "layers": [0], "keep": 1.0}, {**FLAT_LLM, "layers": "last:3", "query_key": "head_pca"}]
    made = job(source, methods=methods)
    made.run().json  # noqa: B018 - asserts the exit code
    ids_BT = some_tokens(512)
    dense = AutoModelForCausalLM.from_pretrained(source).eval()
    first_layer_only = densified(source, made.output, layers=1)
    assert relative_error(logits_of(first_layer_only, ids_BT), logits_of(dense, ids_BT)) < 1e-5
    found = logits_of(load(made.output), ids_BT)
    assert relative_error(found, logits_of(densified(source, made.output), ids_BT)) < 1e-5
    assert relative_error(found, logits_of(dense, ids_BT)) > 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "dtype", "overrides"),
    [
        ("llama", torch.bfloat16, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen2", torch.float16, {"num_key_value_heads": 4, "head_dim": 12}),
        ("mistral", torch.bfloat16, {"num_attention_heads": 6, "head_dim": 8, "sliding_window": 8}),
        ("qwen3", torch.float32, {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_dtypes_heads_and_ties(
    family: str, dtype: torch.dtype, overrides: dict[str, Any], tmp_path: Path, job: MakeJob
) -> None:
    """MHA, GQA and MQA; head_dim other than D/H; tied embeddings; half precision."""
    source = make_source(tmp_path / "source", family, layers=2, dtype=dtype, **overrides)
    made = job(source, methods=[{**FLAT_LLM, "query_key": "head_pca"}])
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(source), read_tensors(made.output)
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    assert ("lm_head.weight" in after) is not overrides.get("tie_word_embeddings", False)
    assert sum(t.numel() for t in after.values()) < sum(t.numel() for t in before.values())
    model = load(made.output)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    ids_BT = some_tokens(320)
    found = logits_of(load(made.output, dtype=torch.float32), ids_BT)
    assert relative_error(found, logits_of(densified(source, made.output), ids_BT)) < 1e-5


def test_strangers_reload_it(kept: Job, tmp_path: Path) -> None:
    """A process to which none of our packages (nor Ray or Zarr) exists."""
    ids_BT = some_tokens(320)
    save_file({"ids": ids_BT}, tmp_path / "ids.safetensors")
    copy = tmp_path / "output"
    copy.mkdir()
    for path in kept.output.iterdir():
        os.link(path, copy / path.name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", OUTSIDER, str(tmp_path / "ids.safetensors"), str(copy)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    found = load_file(copy / "outsider.logits")["logits"]
    assert relative_error(found, logits_of(densified(kept.source, kept.output), ids_BT)) < 1e-5
    assert torch.equal(found, logits_of(load(kept.output), ids_BT))


def test_value_cache_and_generation(kept: Job) -> None:
    """r numbers per KV head are cached; cached decoding of a left-padded batch gives what no cache gives."""
    model = load(kept.output)
    tokenizer = AutoTokenizer.from_pretrained(kept.output, padding_side="left")
    batch = tokenizer(
        ["Anna had", "In the morning Clara put the red ball on the table in", "Then"], padding=True, return_tensors="pt"
    )
    cache = model(**batch, use_cache=True).past_key_values
    shapes = [(layer.keys.shape[-1], layer.values.shape[1], layer.values.shape[-1]) for layer in cache.layers]
    assert shapes == [(16, 2, forms["v"]["rank"]) for forms in forms_of(kept)]
    assert len({width for *_, width in shapes}) > 1
    numbers = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in cache.layers)
    assert kept.compression()["counts"]["cache_bytes_per_token"]["compressed"] == 4 * numbers
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with_cache, without = (model.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)
    assert relative_error(torch.stack(with_cache.logits), torch.stack(without.logits)) < 1e-5
    alone = logits_of(model, batch["input_ids"][0:1][:, batch["attention_mask"][0] == 1])[0, -1]
    assert (
        relative_error(logits_of(model, batch["input_ids"], attention_mask=batch["attention_mask"])[0, -1], alone)
        < 1e-5
    )


# -- the budget and the files ------------------------------------------------------------------------------------------


def test_budget_is_met(kept: Job) -> None:
    written = sum(t.numel() for name, t in read_tensors(kept.output).items() if name.startswith("model.layers."))
    target = 0.7 * 10 * DENSE_NUMBERS_PER_LAYER
    assert target * 0.999 <= written <= target
    ranks = {
        group["ranks"]["value"] for layer in kept.compression()["layers"] for group in [layer["groups"]["attention"]]
    }
    assert len(ranks) > 1


def test_budget_of_the_whole_model(job: MakeJob) -> None:
    made = job(**{"budget": {"keep": 0.75, "scope": "model"}, "methods": [{**FLAT_LLM, "allocation": "uniform"}]})
    dense = made.run().json["counts"]["parameters"]["dense"]
    written = sum(tensor.numel() for tensor in read_tensors(made.output).values())
    assert dense == 3 * DENSE_NUMBERS_PER_LAYER + 2 * 320 * 48 + 48
    assert 0 <= 0.75 * dense - written < CHANNEL_NUMBERS
    assert len({json.dumps(layer) for layer in made.compression()["layers"][0]["forms"].values()}) == 2


def test_contract_agrees_with_the_files(kept: Job) -> None:
    """Names, shapes, dtypes, shards, digests and counts of compression.json; the index; the config."""
    compression, tensors = kept.compression(), read_tensors(kept.output)
    index = json.loads((kept.output / "model.safetensors.index.json").read_text())
    assert set(compression["tensors"]) == set(tensors) == set(index["weight_map"])
    for name, tensor in tensors.items():
        entry = compression["tensors"][name]
        assert entry["shard"] == index["weight_map"][name]
        assert (entry["shape"], entry["dtype"]) == (list(tensor.shape), "F32")
        assert entry["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    digests = file_digests(kept.output)
    assert compression["shards"] == {
        name: {"size": (kept.output / name).stat().st_size, "sha256": digest}
        for name, digest in digests.items()
        if name.endswith(".safetensors")
    }
    sources = file_digests(kept.source)
    assert all(sources[name] == found["sha256"] for name, found in compression["source"]["files"].items())
    numbers = sum(tensor.numel() for tensor in tensors.values())
    assert compression["counts"]["parameters"]["compressed"] == numbers == index["metadata"]["total_parameters"]
    assert compression["counts"]["bytes"]["compressed"] == 4 * numbers == index["metadata"]["total_size"]
    dense = sum(tensor.numel() for tensor in read_tensors(kept.source).values())
    assert compression["counts"]["parameters"]["dense"] == dense
    assert [layer["forms"] for layer in compression["layers"]] == forms_of(kept)
    budget = {"keep": 0.7, "bytes": None, "max_loss": None, "scope": "decoder", "multiple": None}
    assert compression["manifest"]["budget"] == budget


def test_each_tensor_says_what_became_of_it(kept: Job) -> None:
    before, after = read_tensors(kept.source), read_tensors(kept.output)
    copied = {name for name, entry in kept.compression()["tensors"].items() if entry["origin"] == "copied"}
    assert copied == {name for name in before if "norm" in name or "embed" in name or "lm_head" in name}
    assert all(torch.equal(before[name], after[name]) for name in copied)
    expected = {"q": "head_low_rank", "k": "head_low_rank", "v": "head_pca", "o": "head_pca"}
    for name in set(after) - copied:
        layer, role = int(name.split(".")[2]), name.partition("_proj")[0].rpartition(".")[2]
        entry, form = kept.compression()["tensors"][name], forms_of(kept)[layer].get(role, {"form": "dense"})
        assert entry["origin"] == "flat_llm"
        assert {key: entry[key] for key in form} == form
        assert form["form"] == expected.get(role, "pruned") or (role in "qk" and torch.equal(before[name], after[name]))
    assert any("q" in forms for forms in forms_of(kept))


def test_layers_that_nobody_claims_are_left_alone(llama: Path, job: MakeJob) -> None:
    """A source shard of which nothing is claimed becomes a second name of the same file."""
    made = job(methods=[{**FLAT_LLM, "layers": "last:1"}], **{"budget.keep": 0.9})
    made.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(llama), read_tensors(made.output)
    claimed = {
        f"model.layers.2.{path}.weight"
        for path in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert {name for name in before if not torch.equal(before[name], after[name])} == claimed
    assert forms_of(made)[:2] == [{}, {}]
    weight_map = json.loads((llama / "model.safetensors.index.json").read_text())["weight_map"]
    whole = {file for file in weight_map.values()} - {file for name, file in weight_map.items() if "layers.2." in name}
    inodes = {path.stat().st_ino for path in made.output.iterdir()}
    assert whole
    assert len(whole) < len(set(weight_map.values()))
    assert {(llama / file).stat().st_ino in inodes for file in whole} == {True}
    assert {(llama / file).stat().st_ino in inodes for file in set(weight_map.values()) - whole} == {False}


# -- the numbers are those of the whole model --------------------------------------------------------------------------


def test_importance_and_errors_are_those_of_the_whole_model(llama: Path, job: MakeJob) -> None:
    """Cosines of the dense model; errors of layer l on the text, with the layers before it compressed."""
    made = job(methods=[{**FLAT_LLM, "basis": "value", "weighting": "none"}])
    made.run().json  # noqa: B018 - asserts the exit code
    calibration = made.document()["calibration"]
    documents = read_documents(Text(files=tuple(calibration["text"]["files"])))
    tokenizer = AutoTokenizer.from_pretrained(llama)
    ids_BT = draw_samples([documents], tokenizer, 8, 0, 24, 3, text_prefix(tokenizer)).samples
    assert len(set(made.ledger("ranks")["importance"].values())) == 3
    for layer in range(3):
        seen = watch(densified(llama, made.output, layers=0), layer, ids_BT)
        cosine = torch.cosine_similarity(seen["in"], seen["out"], dim=-1).mean().item()
        assert made.ledger("ranks")["importance"][str(layer)] == pytest.approx(math.acos(cosine) / math.pi, rel=1e-5)
        seen = watch(densified(llama, made.output, layers=layer), layer, ids_BT)
        groups = made.compression()["layers"][layer]["groups"]
        assert groups["attention"]["error"] == pytest.approx(
            value_error(seen["v"], groups["attention"]["ranks"]["value"]), rel=1e-4
        )
        assert groups["mlp"]["error"] == pytest.approx(mlp_error(llama, made.output, layer, seen["h"]), rel=1e-4)


def watch(model: Any, layer: int, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """What passes one layer of the whole model, (tokens, features) in float64: in, out, values v, MLP activations h."""
    seen: dict[str, torch.Tensor] = {}
    module = model.model.layers[layer]

    def keep(name: str, value: Any) -> None:
        seen[name] = (value[0] if isinstance(value, tuple) else value).double().flatten(0, 1)

    module.register_forward_pre_hook(lambda _, inputs: keep("in", inputs))
    module.register_forward_hook(lambda _, __, result: keep("out", result))
    module.self_attn.v_proj.register_forward_hook(lambda _, __, result: keep("v", result))
    module.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: keep("h", inputs))
    logits_of(model, ids_BT)
    return seen


def value_error(values: torch.Tensor, rank: int) -> float:
    """The least share of the energy that a basis of `rank` for each of the two KV heads leaves out."""
    eigenvalues = [torch.linalg.eigvalsh(head.T @ head) for head in values.split(16, dim=1)]
    dropped, whole = (sum(float(e[:end].sum()) for e in eigenvalues) for end in (16 - rank, 16))
    return dropped / whole


def mlp_error(source: Path, output: Path, layer: int, h: torch.Tensor) -> float:
    """‖W h − W̃ h_S‖² / ‖W h‖², with S found by comparing the rows of the up projections."""
    prefix = f"model.layers.{layer}.mlp."
    before, after = (
        {k: t.double() for k, t in read_tensors(path).items() if k.startswith(prefix)} for path in (source, output)
    )
    rows = [row.tolist() for row in before[f"{prefix}up_proj.weight"]]
    chosen = [rows.index(row.tolist()) for row in after[f"{prefix}up_proj.weight"]]
    assert chosen == sorted(chosen)
    assert torch.equal(before[f"{prefix}gate_proj.weight"][chosen], after[f"{prefix}gate_proj.weight"])
    dense = h @ before[f"{prefix}down_proj.weight"].T
    error = dense - h[:, chosen] @ after[f"{prefix}down_proj.weight"].T
    return (error.square().sum() / dense.square().sum()).item()


# -- again -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_ray")
def test_finished_job_is_left_alone(kept: Job) -> None:
    before = {path: path.stat().st_mtime_ns for path in kept.output.iterdir()}
    started = time.monotonic()
    ended = kept.run()
    assert time.monotonic() - started < 5
    assert ended.json["already_finished"] is True
    assert {path: path.stat().st_mtime_ns for path in kept.output.iterdir()} == before


def test_no_tensor_passes_the_driver(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Any] = []

    class Watched(KeptPool):
        def submit(self, unit: Unit) -> None:
            passed.append(unit)
            super().submit(unit)

        def wait(self) -> tuple[Unit, Any]:
            unit, result = super().wait()
            passed.append(result)
            return unit, result

    monkeypatch.setattr(workers.pool, "RayPool", Watched)
    job().run().json  # noqa: B018 - asserts the exit code
    found = {type(leaf) for leaf in leaves(passed)}
    assert len(passed) > 2 * 3 * 2
    assert not {kind for kind in found if issubclass(kind, (torch.Tensor, np.ndarray, bytes, bytearray, memoryview))}
    assert {kind.__name__ for kind in found} <= {"str", "int", "float", "bool", "NoneType", "ObjectRef"}
