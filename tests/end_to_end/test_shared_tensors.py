"""Tensors that a group shares, through the whole job: named, owned, counted, and run by the methods that come after."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import factories
from tests.end_to_end.jobs import Job, command, file_digests, load, logits_of, read_tensors, relative_error, some_tokens
from tests.end_to_end.sources import make_source

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]
BOTH = {"method": "lestd", "target": "both", "keep": 0.5}
DATA_FREE: dict[str, Any] = {"budget": None, "calibration": None}
PARENTS = {"llama": ("self_attn", "mlp"), "opt": ("self_attn", "mlp_factors")}


@pytest.mark.parametrize("family", PARENTS)
def test_named_and_owned(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family)
    made = job(source, **DATA_FREE, methods=[{**BOTH, "layers": [1], "core": "csr"}])
    assert made.run().code == 0
    compression, config = made.compression(), json.loads((made.output / "config.json").read_text())
    assert config["core_format"] == "csr"
    block = config["block"]
    prefix = f"{block['layers']}.1."
    shared = {name: entry for name, entry in compression["tensors"].items() if ".tucker." in name}
    assert {name.removeprefix(prefix).split(".tucker.")[0] for name in shared} == set(PARENTS[family])
    for name, entry in shared.items():
        role = "q" if "self_attn" in name else "up"
        assert (entry["origin"], entry["form"]) == ("lestd", "tucker")
        assert entry["ranks"] == config["forms"][1][role]["ranks"]
        assert entry["dtype"] == ("U8" if name.endswith(".mask") else "F32")
    roles = [role for role in ("q", "k", "v", "o", "gate", "up", "down") if role in block["modules"]]
    assert set(config["forms"][1]) == set(roles)
    weights = {f"{prefix}{block['modules'][role]}.weight" for role in roles}
    assert not weights & set(read_tensors(made.output))
    assert {name for name, method in compression["claimed"].items() if method == "lestd"} >= weights
    untouched = [entry for name, entry in compression["tensors"].items() if not name.startswith(prefix)]
    assert {entry["origin"] for entry in untouched} == {"copied"}
    assert command("verify", str(made.output), "--source", str(source), "--bound", "10").code == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_index_counts_by_its_bits(dtype: torch.dtype, job: MakeJob, tmp_path: Path) -> None:
    source = factories.make_model(tmp_path / "source", dtype=dtype)
    made = job(source, **DATA_FREE, methods=[{"method": "lestd", "keep": 0.5, "refine_sweeps": 0}])
    assert made.run().code == 0
    compression, tensors = made.compression(), read_tensors(made.output)
    numbers = {
        name: tensor.numel() if tensor.is_floating_point() else math.ceil(tensor.nbytes / dtype.itemsize)
        for name, tensor in tensors.items()
    }
    assert compression["counts"]["parameters"]["compressed"] == sum(numbers.values())
    assert compression["counts"]["bytes"]["compressed"] == sum(tensor.nbytes for tensor in tensors.values())
    dense = sum(t.numel() for n, t in read_tensors(source).items() if any(f".{r}_proj." in n for r in "qkvo"))
    kept = sum(number for name, number in numbers.items() if ".tucker." in name)
    assert 0.97 * dense < 2 * kept <= dense
    plain = sum(t.numel() for n, t in tensors.items() if ".tucker." in n and t.is_floating_point())
    index = sum(t.nbytes for n, t in tensors.items() if n.endswith(".mask"))
    assert 0 <= kept - plain - index / dtype.itemsize < compression["counts"]["parameters"]["dense"] * 1e-3
    groups = [entry["groups"]["attention"] for entry in compression["layers"]]
    assert sum(group["numbers"] for group in groups) == kept
    assert sum(group["numbers_without_index"] for group in groups) == plain
    model = load(made.output, dtype=torch.float32)
    assert torch.isfinite(logits_of(model, some_tokens(320))).all()


def test_statistics_after_it_are_taken_through_it(job: MakeJob) -> None:
    """With hidden states of the compressed model, the MLP's method sees what the factored attention gives."""
    flat = {"method": "flat_llm", "attention": False, "keep": 0.6}
    attention = {"method": "lestd", "keep": 0.4, "refine_sweeps": 0}
    alone, together = job(methods=[flat], budget=None), job(methods=[flat, attention], budget=None)
    for made in (alone, together):
        assert made.run().code == 0
    first, second = (read_tensors(made.output) for made in (alone, together))
    names = [name for name in first if "mlp" in name]
    assert all(torch.equal(first[name], second[name]) for name in names if ".layers.0." in name)
    assert any(not torch.equal(first[name], second[name]) for name in names if ".layers.1." in name)
    assert command("verify", str(together.output), "--source", str(together.source), "--bound", "10").code == 0


def test_again_gives_the_same_bytes(job: MakeJob) -> None:
    entry = {"method": "lestd", "target": "both", "keep": 0.5, "threshold": "model"}
    outputs = []
    for _ in range(2):
        made = job(**DATA_FREE, methods=[entry])
        assert made.run().code == 0
        outputs.append(file_digests(made.output))
    assert outputs[0] == outputs[1]
    again = logits_of(load(made.output), some_tokens(320))
    csr = logits_of(load(made.output, core_format="csr"), some_tokens(320))
    assert relative_error(csr, again) < 1e-4
