"""Models that store their tensors in several dtypes: each keeps its own, in every count, budget and check."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from pipeline.checkpoint.compression_record import read_record
from pipeline.checkpoint.targets import TARGETS
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.verification.source_checks import SourceAndOutput, check_coverage
from tests import factories
from tests.end_to_end.exports import ROLES, as_llama, read_gguf
from tests.end_to_end.jobs import (
    Job,
    MakeJob,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.sources import FAMILIES
from tests.end_to_end.test_evaluate import WINDOW, evaluate, perplexity
from tests.end_to_end.test_sweep import Sweep

pytestmark = pytest.mark.usefixtures("inline")
BFLOAT, FLOAT, HALF = torch.bfloat16, torch.float32, torch.float16
MIXTURES: dict[str, Callable[[str, Tensor], torch.dtype]] = {
    "vectors float32": lambda name, tensor: BFLOAT if tensor.ndim > 1 else FLOAT,
    "vectors float16": lambda name, tensor: FLOAT if tensor.ndim > 1 else HALF,
    "matrices float16": lambda name, tensor: HALF if tensor.ndim > 1 else FLOAT,
    "a layer float32": lambda name, tensor: FLOAT if ".1." in name else BFLOAT,
    "embeddings float32": lambda name, tensor: FLOAT if "embed_tokens" in name or "lm_head" in name else BFLOAT,
    "queries float32": lambda name, tensor: FLOAT if "q_proj.weight" in name else BFLOAT,
}
MOST = dict.fromkeys(MIXTURES, "bfloat16") | {
    "vectors float16": "float32",
    "matrices float16": "float16",
}  # of the numbers
METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": {"method": "flat_llm", "query_key": "head_pca"},
    "flat_llm by loss": {"method": "flat_llm", "allocation": "loss"},
    "joint_rank_k": {"method": "joint_rank_k"},
    "lorc": {"method": "lorc"},
    "lestd": {"method": "lestd", "target": "both"},
    "loss_aware": {"method": "loss_aware", "widths": 3},
    "loss_aware plain": {"method": "loss_aware", "widths": 3, "factors": "plain"},
    "magnitude": {"method": "magnitude"},
    "svd_llm": {"method": "svd_llm"},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A source of a family in one of MIXTURES, written once."""
    written: dict[str, Path] = {}

    def make(family: str, mixture: str, **overrides: Any) -> Path:
        name = f"{family} {mixture} {sorted(overrides)}"
        if name not in written:
            written[name] = factories.make_model(tmp_path_factory.mktemp("mixed") / "source", family, **overrides)
            for file in written[name].glob("*.safetensors"):
                tensors = {name: tensor.to(MIXTURES[mixture](name, tensor)) for name, tensor in load_file(file).items()}
                save_file(tensors, file, {"format": "pt"})
        return written[name]

    return make


def check_dtypes(run: Job, source: Path) -> None:
    """A tensor of the source that is stored keeps its dtype; a factor has that of a weight of its layer."""
    before = {name: tensor.dtype for name, tensor in read_tensors(source).items()}
    for name, tensor in read_tensors(run.output).items():
        if name in before:
            assert tensor.dtype == before[name], name
        elif tensor.is_floating_point():
            layer = ".".join(name.split(".")[: name.split(".").index("1") + 1]) if ".1." in name else ""
            assert tensor.dtype in {dtype for other, dtype in before.items() if other.startswith(layer)}, name


def check_job(run: Job, source: Path, mixture: str) -> None:
    """Run and verified; it stores what was planned, and no more where the plan names a bound."""
    planned = command("plan", str(run.write().manifest), "--json", "--gpu", "H100").json
    ended = run.run()
    assert ended.code == 0, ended.err
    counts = run.compression()["counts"]["bytes"]
    assert counts["dense"] == sum(tensor.nbytes for tensor in read_tensors(source).values())
    assert counts["compressed"] == sum(tensor.nbytes for tensor in read_tensors(run.output).values())
    assert counts["compressed"] <= planned["output_bytes"]
    assert planned["output_bound"] or counts["compressed"] == planned["output_bytes"]
    check_dtypes(run, source)
    assert json.loads((run.output / "config.json").read_text())["dtype"] == MOST[mixture]
    verified = command("verify", str(run.output), "--source", str(source))
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.sample(2)
@pytest.mark.parametrize("mixture", ["vectors float32", "vectors float16", "a layer float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, mixture: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    """All roles, with and without biases."""
    source = mixed(family, mixture)
    run = job(source, methods=[{"method": "svd"}], calibration=None)
    check_job(run, source, mixture)


FIXED: dict[str, dict[str, Any]] = {
    "uniform": {"methods": [{"method": "flat_llm", "uniform": True}]},
    "ranks": {"methods": [{"method": "flat_llm", "ranks": {"value": 8, "mlp": 32}}], "budget": None},
    "full rank": {"methods": [{"method": "flat_llm"}], "budget.keep": 1.0},
    "latents": {"methods": [{"method": "lorc", "cache_keep": 0.5, "allocation": "uniform"}], "budget": None},
    "rounded": {"methods": [], "budget": None, "quantize": {"bits": 4, "what": "all"}},
    "rounded rows": {"methods": [], "budget": None, "quantize": {"bits": 3, "group": None, "skip": ["o"]}},
    "rounded and cut": {"methods": [{"method": "flat_llm", "uniform": True}], "quantize": {"bits": 8}},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mixture", ["vectors float32", "a layer float32"])
@pytest.mark.parametrize("name", FIXED)
def test_planned_bytes_are_those_written(name: str, mixture: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    """Wherever the manifest fixes every shape."""
    run = job(mixed("qwen2", mixture), **FIXED[name]).write()
    planned = command("plan", str(run.manifest), "--json", "--gpu", "H100").json
    assert planned["output_bound"] == ""
    ended = run.run()
    assert ended.code == 0, ended.err
    tensors = read_tensors(run.output).values()
    assert planned["output_bytes"] == sum(tensor.nbytes for tensor in tensors)


LATENTS: dict[str, dict[str, Any]] = {
    "keep": {"methods": [{"method": "lorc", "allocation": "progressive"}], "budget.keep": 1.0},
    "keep, uniform": {"methods": [{"method": "lorc", "allocation": "uniform"}], "budget.keep": 1.0},
    "keep of its own": {"methods": [{"method": "lorc", "keep": 1.0, "allocation": "progressive"}], "budget": None},
    "cache": {"methods": [{"method": "lorc", "cache_keep": 1.0, "allocation": "progressive"}], "budget": None},
    "most of the cache, uniform": {
        "methods": [{"method": "lorc", "cache_keep": 0.9, "allocation": "uniform"}],
        "budget": None,
    },
}


@pytest.mark.parametrize("name", LATENTS)
def test_planned_bytes_of_heads_wider_than_the_hidden_size(name: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    """G·d = 64 > D = 48: a latent of the full rank is no wider than D, and a layer at its most may stay dense."""
    source = mixed("qwen2", "vectors float32", num_key_value_heads=4)
    run = job(source, **LATENTS[name]).write()
    planned = command("plan", str(run.manifest), "--json", "--gpu", "H100").json
    assert planned["output_bound"] == ""
    check_job(run, source, "vectors float32")


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("lestd", "self_attn.tucker.first"),
        pytest.param("loss_aware", "self_attn.query_key.pivoted.rows.weight", marks=pytest.mark.slow),
    ],
)
def test_verify_reads_the_dtypes_of_groups(name: str, shared: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    """Of cores and factors that belong to no role."""
    source = mixed("qwen2", "queries float32")
    run = job(source, methods=[METHODS[name]], **{"calibration.propagate": "dense", "budget.keep": 0.6})
    run.run().json  # noqa: B018 - asserts the exit code
    (original, standard), (checkpoint, config) = (read_checkpoint(str(place)) for place in (source, run.output))
    compression = read_record(run.output)
    pair = SourceAndOutput(original, standard, checkpoint, config, compression)
    assert not check_coverage(pair).faults
    tensor = next(tensor for tensor in compression["tensors"] if tensor.endswith(shared))
    assert compression["tensors"][tensor]["dtype"] == "F32"
    compression["tensors"][tensor]["dtype"] = "BF16"
    (fault,) = check_coverage(pair).faults
    assert fault.startswith(f"{tensor}: BF16 numbers, by the source's")


SLOW = ("flat_llm by loss", "loss_aware", "loss_aware plain")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        *(pytest.param(name, "vectors float32", marks=[pytest.mark.slow] * (name in SLOW)) for name in METHODS),
        ("joint_rank_k", "queries float32"),
        ("lestd", "queries float32"),
    ],
)
def test_every_method(name: str, mixture: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    """A factor that several roles share has the widest of their dtypes."""
    source = mixed("qwen2", mixture)
    changes: dict[str, Any] = {"calibration.propagate": "dense", "budget.keep": 0.9}
    check_job(job(source, methods=[METHODS[name]], **changes), source, mixture)


@pytest.mark.parametrize("name", ["flat_llm", "lestd"])
def test_at_full_rank(name: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    source = mixed("qwen2", "vectors float16")
    run = job(source, methods=[{**METHODS[name], "keep": 1.0}], budget=None)
    check_job(run, source, "vectors float16")
    ids = some_tokens(320)
    expected = logits_of(load(source, dtype=FLOAT), ids)
    assert relative_error(logits_of(load(run.output, trust_remote_code=True, dtype=FLOAT), ids), expected) < 1e-3


OTHER_FAMILIES = {"opt": "vectors float32", "gptj": "queries float32"}
PLAIN_MLP = METHODS | {"joint_rank_k": {"method": "joint_rank_k", "mlp": False}}  # gate and up are what it stacks


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in METHODS])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_blocks(family: str, name: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    """Biases everywhere and layer norms; parallel blocks."""
    source = mixed(family, OTHER_FAMILIES[family], num_hidden_layers=2)
    keep = 0.8 if name == "joint_rank_k" else 0.7  # by what it claims
    run = job(source, methods=[PLAIN_MLP[name]], **{"calibration.propagate": "dense", "budget.keep": keep})
    check_job(run, source, OTHER_FAMILIES[family])


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SLOW])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_blocks_at_full_rank(family: str, name: str, job: MakeJob, mixed: Callable[..., Path]) -> None:
    source = mixed(family, OTHER_FAMILIES[family], num_hidden_layers=2)
    run = job(source, methods=[{**PLAIN_MLP[name], "keep": 1.0}], budget=None, **{"calibration.propagate": "dense"})
    check_job(run, source, OTHER_FAMILIES[family])
    ids = some_tokens(320)
    expected = logits_of(load(source, dtype=FLOAT), ids)
    assert relative_error(logits_of(load(run.output, trust_remote_code=True, dtype=FLOAT), ids), expected) < 0.03


def test_tied_embeddings_of_another_dtype(job: MakeJob, mixed: Callable[..., Path], scored: Path) -> None:
    """They are copied as they are, and exported and scored."""
    source = mixed("llama", "embeddings float32", tie_word_embeddings=True)
    run = job(source, methods=[{"method": "flat_llm"}])
    check_job(run, source, "embeddings float32")
    check_export(run, source, "dense")
    for model in (source, run.output, run.root / "dense"):
        check_score(model, scored)


EXPORTS: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [  # family, mixture, what is done, targets
    ("llama", "a layer float32", {"methods": [{"method": "flat_llm", "uniform": True}]}, TARGETS),
    ("llama", "vectors float32", {"methods": [], "budget": None, "quantize": {"bits": 8, "what": "all"}}, TARGETS),
    ("mistral", "embeddings float32", {"methods": [METHODS["lorc"]], "budget.keep": 0.9}, ("dense", "stock")),
    ("qwen2", "queries float32", {"methods": [METHODS["joint_rank_k"]], "budget.keep": 0.9}, ("dense", "stock")),
    ("qwen2", "queries float32", {"methods": [METHODS["lestd"]], "budget.keep": 0.9}, ("dense",)),
    ("opt", "vectors float16", {"methods": [{"method": "flat_llm", "query_key": "head_pca"}]}, ("dense",)),
    ("gptj", "a layer float32", {"methods": [{"method": "svd"}], "calibration": None}, ("dense",)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "mixture", "changes", "targets"), EXPORTS)
def test_exports(
    family: str,
    mixture: str,
    changes: dict[str, Any],
    targets: tuple[str, ...],
    job: MakeJob,
    mixed: Callable[..., Path],
) -> None:
    """Every tensor has the source's dtype, and the logits are the compressed checkpoint's."""
    source = mixed(family, mixture)
    run = job(source, **changes)
    run.run().json  # noqa: B018 - asserts the exit code
    for target in targets:
        if target != "gguf" or importlib.util.find_spec("gguf"):
            check_export(run, source, target)


def check_export(run: Job, source: Path, target: str) -> None:
    """Of every tensor, the dtype; and the logits, as far as the coarsest dtype says them."""
    destination = run.root / target
    ended = command("export", str(run.output), "--to", target, str(destination))
    assert ended.code == 0, ended.err
    ids = some_tokens(320)
    expected = logits_of(load(run.output, trust_remote_code=True, dtype=FLOAT), ids)
    if target == "gguf":
        check_gguf_dtypes(destination, source)
        found = logits_of(as_llama(*read_gguf(destination)), ids)
    else:
        before = {name: tensor.dtype for name, tensor in read_tensors(source).items()}
        after = {name: tensor.dtype for name, tensor in read_tensors(destination).items()}
        packed = {name for name in after if name.endswith(("_packed", "_shape", "_scale"))}
        scales = {name.replace("_scale", ""): after[name] for name in packed if name.endswith("_scale")}
        assert {name: after[name] for name in after if name not in packed} | scales == before
        config = json.loads((destination / "config.json").read_text())
        assert config["dtype"] == json.loads((run.output / "config.json").read_text())["dtype"]
        if packed and importlib.util.find_spec("compressed_tensors") is None:
            return
        found = logits_of(load(destination, dtype=FLOAT), ids)
    assert relative_error(found, expected) < 0.03


def check_gguf_dtypes(destination: Path, source: Path) -> None:
    """A matrix that is not rounded has the source's dtype, a vector float32."""
    import gguf

    tensors = read_tensors(source)
    kinds = {FLOAT: "F32", BFLOAT: "BF16", HALF: "F16"}
    for tensor in gguf.GGUFReader(destination).tensors:
        layer, role = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # type: ignore[union-attr]
        dtype = tensors[f"{f'model.layers.{layer}.' if layer else ''}{ROLES[role]}.weight"].dtype
        kind = "F32" if len(tensor.shape) == 1 else kinds[dtype]
        assert tensor.tensor_type.name in (kind, "Q8_0"), tensor.name


def check_score(model: Path, text: Path) -> None:
    """As transformers scores it, in float32; and as stored, to rounding."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected, _ = perplexity(load(model, trust_remote_code=True, dtype=FLOAT), tokenizer, text.read_text(), WINDOW)
    assert evaluate(model, text)["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert evaluate(model, text, "--dtype", "stored")["perplexity"] == pytest.approx(expected, rel=0.05)


@pytest.mark.nightly
def test_a_sweep(job: MakeJob, mixed: Callable[..., Path], scored: Path) -> None:
    """A point that is kept is its job's checkpoint, byte for byte."""
    source = mixed("qwen2", "a layer float32")
    point = {"name": "flat_llm", "methods": [{"method": "flat_llm"}], "save": [0.7]}
    swept = Sweep(job(source), scored, [point], keep=[0.7])
    assert swept.run().code == 0
    alone = job(source, **{"calibration.propagate": "dense", "evaluation": swept.document["evaluation"]})
    check_job(alone, source, "a layer float32")
    assert file_digests(swept.job.output / "flat_llm-0.7") == file_digests(alone.output)


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize("mixture", ["vectors float32", "a layer float32"])
@pytest.mark.parametrize(
    ("share", "changes"),
    [
        (0.7, {"methods": [{"method": "svd"}]}),
        (0.5, {"methods": [{"method": "flat_llm", "uniform": True}], "quantize": {"bits": 8}}),
    ],
)
def test_a_budget_of_bytes(
    share: float, changes: dict[str, Any], family: str, mixture: str, job: MakeJob, mixed: Callable[..., Path]
) -> None:
    """Is counted in bytes as stored, and never passed."""
    source = mixed(family, mixture)
    run = job(source, budget={"bytes": share}, **changes)
    ended = run.run()
    assert ended.code == 0, ended.err
    stored, dense = (
        sum(tensor.nbytes for name, tensor in read_tensors(place).items() if ".layers." in name)
        for place in (run.output, source)
    )
    assert share - 0.15 < stored / dense <= share


def test_rounding_leaves_wider_biases(job: MakeJob, mixed: Callable[..., Path]) -> None:
    """The block at hand computes in float32 with biases that were rounded to float16: they are read again."""
    source = mixed("opt", "matrices float16")
    run = job(source, methods=[], budget=None, quantize={"bits": 4, "group": None})
    run.run().json  # noqa: B018 - asserts the exit code
    before, after = read_tensors(source), read_tensors(run.output)
    biases = [name for name in before if name.endswith(".bias")]
    assert biases
    assert not [name for name in biases if not torch.equal(before[name], after[name])]
