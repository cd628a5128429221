"""Numbers that misbehave: weights, activations and statistics that a method cannot take as they come.

Where the result is defined it is right, and what had to be done for it is in the layer's report; elsewhere the job
stops and says where. Nothing that is not finite is ever written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.end_to_end.jobs import (
    FLAT_LLM,
    Ended,
    Job,
    MakeJob,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.sources import make_source

pytestmark = pytest.mark.usefixtures("inline")
Change = Callable[[str, Tensor], Tensor]
PlainErrors = Callable[[str, torch.dtype], list[float]]
FLAT = {**FLAT_LLM, "query_key": "head_pca", "keep": 0.7}
PAPER = {**FLAT_LLM, "basis": "value", "weighting": "none", "selection": "leverage", "keep": 0.7}
METHODS: dict[str, dict[str, Any]] = {
    "flat_llm": FLAT,
    "flat_llm paper": PAPER,
    "lorc": {"method": "lorc", "cache_keep": 0.5},
    "lorc input": {"method": "lorc", "cache_keep": 0.5, "weighting": "input"},
    "lestd": {"method": "lestd", "target": "both", "keep": 0.5},
    "lestd input": {"method": "lestd", "keep": 0.5, "weighting": "input"},
    "joint": {"method": "joint_rank_k", "mlp": False, "keep": 0.6},
    "joint input": {"method": "joint_rank_k", "query_key": "separate", "keep": 0.7, "weighting": "input"},
}
FULL: dict[str, dict[str, Any]] = {
    "flat_llm": {**FLAT, "keep": 1.0},
    "flat_llm paper": {**PAPER, "keep": 1.0},
    "lorc": {"method": "lorc", "cache_keep": 1.0},
    "lestd": {"method": "lestd", "target": "both", "keep": 1.0},
    "joint": {"method": "joint_rank_k", "mlp": False, "keep": 1.0},
}
ONE_LAYER = {"layers": [1]}
FEW_TOKENS = {"calibration.samples": 1, "calibration.shards": 1, "calibration.sequence_length": 8}


def edited(source: Path, change: Change) -> Path:
    """The source with every tensor changed."""
    for path in sorted(source.glob("*.safetensors")):
        tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    return source


def dead(name: str, tensor: Tensor) -> Tensor:
    """Half of the channels, a value head, a query head and part of a key head of layer 1 are zero."""
    tensor = tensor.clone()
    if ".layers.1." in name and ("up_proj" in name or "gate_proj" in name):
        tensor[:40] = 0
    elif ".layers.1." in name and "down_proj" in name:
        tensor[:, :40] = 0
        tensor[3] = 0
    elif ".layers.1." in name and "v_proj" in name:
        tensor[:16] = 0
    elif ".layers.1." in name and "q_proj" in name:
        tensor[16:32] = 0
    elif ".layers.1." in name and "k_proj" in name:
        tensor[:8] = 0
    return tensor


def never_active(name: str, tensor: Tensor) -> Tensor:
    """OPT's ReLU never lets 40 neurons of layer 1 through."""
    if name.endswith("layers.1.fc1.bias"):
        tensor = tensor.clone()
        tensor[:40] = -100.0
    return tensor


def orthogonal(name: str, tensor: Tensor) -> Tensor:
    """All singular values are one."""
    if "proj" not in name:
        return tensor
    size = max(tensor.shape)
    basis = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(1))).Q
    return basis[: tensor.shape[0], : tensor.shape[1]]


def identity(name: str, tensor: Tensor) -> Tensor:
    return torch.eye(*tensor.shape) if "proj" in name else tensor


def zero(name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if "proj" in name else tensor


def scaled(up: float, down: float, roles: tuple[str, ...] = ("v", "up", "q")) -> Change:
    """v, up and q times one number, o, down and k times another: with the inverse one, the model is the same."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if any(f"{role}_proj" in name for role in roles):
            return (tensor.double() * up).to(tensor.dtype)
        return (tensor.double() * down).to(tensor.dtype) if "proj" in name and "gate" not in name else tensor

    return change


def finite(job: Job) -> Ended:
    """The job runs, and every number of OUTPUT and of its logits is finite."""
    ended = job.run()
    assert ended.code == 0, ended.err
    for name, tensor in read_tensors(job.output).items():
        assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), name
    assert torch.isfinite(logits_of(load(job.output, dtype=torch.float32), some_tokens(320))).all()
    return ended


def reports(job: Job, layer: int | None = None) -> Iterator[dict[str, Any]]:
    """What the groups of a layer, or of all, say of themselves."""
    layers = job.compression()["layers"]
    for entry in layers if layer is None else [layers[layer]]:
        yield from entry["groups"].values()


def errors_of(job: Job) -> list[float]:
    """All errors that the groups of layer 1 report."""
    return [value for report in reports(job, 1) for key, value in sorted(report.items()) if "error" in key]


def error_of(job: Job) -> float:
    """Of the logits, relative to the largest of the source's."""
    ids_BT = some_tokens(320)
    dense, packed = (logits_of(load(path, dtype=torch.float32), ids_BT) for path in (job.source, job.output))
    return relative_error(packed, dense)


# -- zeros, singular moments, equal eigenvalues ------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *itertools.product(["flat_llm", "flat_llm paper", "lorc input", "lestd", "lestd input", "joint"], [dead]),
        *itertools.product(["flat_llm", "lorc input", "lestd"], [zero]),
        *itertools.product(["lestd", "joint"], [orthogonal, identity]),
    ],
)
def test_degenerate_weights(name: str, change: Change, tmp_path: Path, job: MakeJob) -> None:
    source = edited(make_source(tmp_path / "source", "llama", layers=2), change)
    made = job(source, methods=[{**METHODS[name], **ONE_LAYER}], budget=None)
    finite(made)
    for report in reports(made, 1):
        assert all(0.0 <= value <= 1.0 for key, value in report.items() if "error" in key), report
    if change is zero:
        assert error_of(made) == 0.0
    if change is dead and name == "flat_llm":
        assert next(report["error"] for report in reports(made, 1) if "mlp" in report["ranks"]) < 1e-9


@pytest.mark.parametrize(("name", "change"), [("flat_llm", dead), ("flat_llm paper", identity)])
def test_degenerate_weights_at_full_rank(name: str, change: Change, tmp_path: Path, job: MakeJob) -> None:
    source = edited(make_source(tmp_path / "source", "llama", layers=2), change)
    made = job(source, methods=[FULL[name]], budget=None)
    finite(made)
    assert error_of(made) < 1e-5


@pytest.mark.parametrize("name", ["flat_llm", "flat_llm paper"])
def test_neurons_that_are_never_active(name: str, tmp_path: Path, job: MakeJob) -> None:
    """They go first: 40 of 80 may be left out without an error."""
    source = edited(make_source(tmp_path / "source", "opt", layers=2), never_active)
    entry = {key: value for key, value in METHODS[name].items() if key not in ("keep", "query_key")}
    enough: dict[str, Any] = {"calibration.samples": 40, "budget": None}  # so that the others are active
    made = job(source, methods=[{**entry, "attention": False, **ONE_LAYER, "ranks": {"mlp": 40}}], **enough)
    finite(made)
    assert error_of(made) < 1e-5
    kept = {tensor: value for tensor, value in read_tensors(made.output).items() if "layers.1.fc1.bias" in tensor}
    assert [value.min().item() > -100.0 for value in kept.values()] == [True]


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("flat_llm", "one token"),
        ("flat_llm", "few tokens"),
        ("flat_llm paper", "one token"),
        ("lorc input", "few tokens"),
        ("lestd input", "one token"),
        ("joint input", "few tokens"),
    ],
)
def test_singular_moments(name: str, few: str, tmp_path: Path, llama: Path, job: MakeJob) -> None:
    """Text of one token again and again, or fewer tokens than dimensions: solved by a fallback that is recorded."""
    (tmp_path / "one.txt").write_text("a" * 4000)
    calibration = {"calibration.text": {"files": [str(tmp_path / "one.txt")]}} if few == "one token" else FEW_TOKENS
    made = job(llama, methods=[{**METHODS[name], **ONE_LAYER}], budget=None, **calibration)
    finite(made)
    recorded = {key for report in reports(made) for key, value in report.items() if value}
    assert recorded & {"fallback", "clipped", "selection_jitter"}, recorded


def test_singular_moments_at_full_rank(llama: Path, job: MakeJob) -> None:
    made = job(llama, methods=[FULL["flat_llm"]], budget=None, **FEW_TOKENS)
    finite(made)
    assert error_of(made) < 1e-5


def test_an_output_projection_without_rank(tmp_path: Path, job: MakeJob) -> None:
    """W_o of rank 4: the Gram matrix of the two heads that share their values has no inverse."""

    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor[:, :4] @ tensor[:4] if "layers.1.self_attn.o_proj" in name else tensor

    source = edited(make_source(tmp_path / "source", "llama", layers=2), change)
    made = job(source, methods=[{**METHODS["flat_llm"], **ONE_LAYER}], budget=None)
    finite(made)
    assert max(report.get("clipped", 0) for report in reports(made, 1)) > 0


# -- magnitudes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_errors(tmp_path_factory: pytest.TempPathFactory, text: Path) -> PlainErrors:
    """The errors that a method reports of layer 1 when nothing is unusual; computed once."""
    root = tmp_path_factory.mktemp("plain")

    @cache
    def find(name: str, dtype: torch.dtype) -> list[float]:
        source = make_source(root / f"source {name} {dtype}", "llama", layers=2, dtype=dtype)
        changes = {"methods": [{**METHODS[name], **ONE_LAYER}], "budget": None}
        made = Job(root / f"{name} {dtype}", source, text, changes).write()
        assert made.run().code == 0
        assert not any("scaled" in report for report in reports(made))
        return errors_of(made)

    return find


@pytest.mark.parametrize(
    ("name", "dtype", "up", "down"),
    [
        ("flat_llm", torch.float32, 2.0**100, 2.0**-100),
        ("flat_llm", torch.bfloat16, 2.0**-100, 2.0**100),
        ("lorc", torch.bfloat16, 2.0**100, 2.0**-100),
        ("lorc input", torch.float32, 2.0**-100, 2.0**100),
        ("lestd", torch.float32, 2.0**-100, 2.0**100),
        ("lestd", torch.bfloat16, 2.0**100, 2.0**-100),
        ("joint", torch.float32, 2.0**100, 2.0**-100),
        ("joint", torch.bfloat16, 2.0**-100, 2.0**100),
    ],
)
def test_weights_of_1e30_and_of_1e_30(
    name: str,
    dtype: torch.dtype,
    up: float,
    down: float,
    tmp_path: Path,
    job: MakeJob,
    plain_errors: PlainErrors,
) -> None:
    """Scales that cancel out: the errors are those of the model as it was."""
    source = edited(make_source(tmp_path / "source", "llama", layers=2, dtype=dtype), scaled(up, down))
    made = job(source, methods=[{**METHODS[name], **ONE_LAYER}], budget=None)
    finite(made)
    assert errors_of(made) == pytest.approx(plain_errors(name, dtype), rel=0.25, abs=1e-6)
    assert any("scaled" in report for report in reports(made)) == (name in ("lestd", "joint"))


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [(name, *((1e30, 1e-30) if even else (1e-30, 1e30))) for name, even in zip(FULL, (1, 0, 1, 0, 1), strict=True)],
)
def test_magnitudes_at_full_rank(name: str, up: float, down: float, tmp_path: Path, job: MakeJob) -> None:
    source = edited(make_source(tmp_path / "source", "llama", layers=2), scaled(up, down))
    made = job(source, methods=[FULL[name]], budget=None)
    finite(made)
    assert error_of(made) < 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", METHODS)
def test_all_weights_of_1e_30(name: str, tmp_path: Path, job: MakeJob) -> None:
    """Their products vanish beside the residual stream; their errors do not."""
    source = edited(make_source(tmp_path / "source", "llama", layers=2), scaled(1e-30, 1e-30))
    made = job(source, methods=[{**METHODS[name], **ONE_LAYER}], budget=None)
    finite(made)
    assert error_of(made) < 1e-6
    assert 0.0 < max(errors_of(made)) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_that_no_dtype_holds(dtype: torch.dtype, tmp_path: Path, job: MakeJob) -> None:
    """All weights of 1e30: the source itself computes infinity."""
    source = edited(make_source(tmp_path / "source", "llama", layers=2, dtype=dtype), scaled(1e30, 1e30))
    made = job(source)
    ended = made.run()
    assert ended.code == 2, ended.err
    assert "layer 0: NaN or infinity first appears in the output of self_attn" in ended.err
    assert "the model's own activations overflow" in ended.err
    assert not made.output.exists()


# -- float16 -----------------------------------------------------------------------------------------------------------


def test_activations_that_overflow_float16(tmp_path: Path, job: MakeJob) -> None:
    """A clear stop that says what to change; converted to float32, the same job runs."""

    def massive(where: str, tensor: Tensor) -> Tensor:
        return tensor * 3e4 if "layers.1.mlp.down_proj" in where else tensor

    source = edited(make_source(tmp_path / "source", "llama", dtype=torch.float16), massive)
    made = job(source, methods=[METHODS["flat_llm"]], budget=None)
    ended = made.run()
    assert ended.code == 2, ended.err
    assert "layer 1: NaN or infinity first appears in the output of mlp.down_proj (torch.float16)" in ended.err
    assert "convert the checkpoint to bfloat16 or float32" in ended.err
    assert not made.output.exists()
    load(source, dtype=torch.float32).save_pretrained(tmp_path / "converted")
    for path in source.glob("tokenizer*"):
        (tmp_path / "converted" / path.name).write_bytes(path.read_bytes())
    finite(job(tmp_path / "converted", methods=[METHODS["flat_llm"]], budget=None))


@pytest.mark.parametrize("name", ["lorc", "lestd", "joint"])
def test_factors_of_large_float16_weights(name: str, tmp_path: Path, job: MakeJob, plain_errors: PlainErrors) -> None:
    """v, up and q times 1024, o, down and k by 128 in float16: the errors stay what they are at one size."""
    source = edited(make_source(tmp_path / "source", "llama", layers=2, dtype=torch.float16), scaled(2.0**10, 2.0**-7))
    made = job(source, methods=[{**METHODS[name], **ONE_LAYER}], budget=None)
    finite(made)
    assert errors_of(made) == pytest.approx(plain_errors(name, torch.float16), rel=0.25, abs=1e-6)


def test_a_factor_that_float16_cannot_hold(tmp_path: Path, job: MakeJob) -> None:
    """Keys of 6e4 all over have a singular value beyond 65504: a stop that names the tensor."""

    def change(where: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 6e4) if "layers.1.self_attn.k_proj" in where else tensor

    source = edited(make_source(tmp_path / "source", "llama", layers=2, dtype=torch.float16), change)
    made = job(source, methods=[METHODS["lorc"]], budget=None)
    ended = made.run()
    assert ended.code == 2, ended.err
    assert "tensor model.layers.1.self_attn.k_proj.second.weight" in ended.err
    assert "overflowed in the checkpoint's dtype" in ended.err
    assert not made.output.exists()


# -- NaN and infinity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor_name", "value"),
    [
        ("flat_llm", "model.layers.1.mlp.up_proj.weight", math.nan),
        ("flat_llm", "model.layers.0.self_attn.q_proj.weight", -math.inf),
        ("flat_llm", "lm_head.weight", math.inf),
        ("lorc", "model.layers.0.self_attn.k_proj.weight", math.nan),
        ("lorc", "model.layers.0.mlp.up_proj.weight", math.nan),
        ("lestd", "model.layers.1.mlp.up_proj.weight", math.inf),
        ("joint", "model.norm.weight", math.nan),
    ],
)
def test_nan_and_infinity_in_weights(name: str, tensor_name: str, value: float, tmp_path: Path, job: MakeJob) -> None:
    def change(where: str, tensor: Tensor) -> Tensor:
        if where == tensor_name:
            tensor = tensor.clone()
            tensor.view(-1)[7] = value
        return tensor

    source = edited(make_source(tmp_path / "source", "llama", layers=2), change)
    made = job(source, methods=[METHODS[name]], budget=None)
    ended = made.run()
    assert (ended.code, tensor_name in ended.err) == (2, True), ended.err
    assert "NaN or infin" in ended.err
    assert not made.output.exists()
