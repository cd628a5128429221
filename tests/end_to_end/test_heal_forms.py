"""Healing of every stored form that trains, and of families that differ: trained, written back, loaded, verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.jobs import Job, command, load, read_tensors
from tests.end_to_end.sources import make_source

pytestmark = pytest.mark.usefixtures("small_steps")

MakeJob = Callable[..., Job]
# Method -> a part of the names of its own tensors that must change.
ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "lestd": ({"method": "lestd", "target": "both", "keep": 0.6}, "core"),
    "lestd-dense-core": ({"method": "lestd", "keep": 0.6, "prune": False}, "core"),
    "joint": ({"method": "joint_rank_k", "keep": 0.6, "mlp": False}, "first"),
    "lorc": ({"method": "lorc", "cache_keep": 0.5}, "k_proj"),
    "loss-aware": ({"method": "loss_aware", "keep": 0.6}, "coefficients"),
    "svd": ({"method": "svd", "keep": 0.6}, "second"),
    "magnitude": ({"method": "magnitude", "keep": 0.6}, "down"),
}
SAMPLE = ("lestd", "loss-aware")
FAMILIES = ("opt", "gemma2", "mixtral", "qwen3_next")


def healed(made: Job) -> set[str]:
    """Run a job with healing, check OUTPUT, and return the names of the tensors that the healing changed."""
    summary = made.run().json
    figures = summary["healed"]
    assert figures["after"] < figures["before"]
    record, tensors = made.compression(), read_tensors(made.output)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
    verified = command("verify", str(made.output), "--source", str(made.source))
    assert verified.code == 0, verified.out
    load(made.output)
    return {name for name, entry in record["tensors"].items() if entry.get("healed")}


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly]) for name in ENTRIES]
)
def test_a_form_trains_and_is_written_back(method: str, job: MakeJob) -> None:
    entry, part = ENTRIES[method]
    made = job(
        methods=[entry], budget=None, heal={"epochs": 4, "learning_rate": 0.002}, **{"calibration.propagate": "dense"}
    )
    changed = healed(made)
    assert any(part in name for name in changed), changed
    assert any("norm" in name for name in changed)
    assert not any(name.endswith("indices") for name in changed)


DENSE = {"calibration.propagate": "dense"}
MLA_HEAL = {"epochs": 4, "learning_rate": 0.002}
WHOLE: dict[str, Any] = {"methods": [], "budget": None}
ROUNDED: dict[str, dict[str, Any]] = {
    "uniform": {"quantize": {"bits": 3}, **WHOLE},
    "tables": {"quantize": {"bits": 3, "levels": "normal"}, **WHOLE},
    "rows": {"quantize": {"bits": 4, "group": None}, **WHOLE},
    "factors": {**WHOLE, "quantize": {"bits": 4, "levels": "normal"}, "methods": [ENTRIES["loss-aware"][0]]},
}  # fmt: skip


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=[] if name == "uniform" else [pytest.mark.nightly]) for name in ROUNDED]
)
def test_scales_and_levels_train_while_codes_stay(form: str, job: MakeJob) -> None:
    made = job(heal={"epochs": 4, "learning_rate": 0.0005}, **{"calibration.propagate": "dense", **ROUNDED[form]})
    changed = healed(made)
    assert any(name.endswith("weight_scale") for name in changed)
    assert any(name.endswith("weight_levels") for name in changed) == ("levels: normal" in made.manifest.read_text())
    assert not any(name.endswith(("weight_packed", "weight_shape")) for name in changed)
    figures, held_out = made.compression()["healed"], made.ledger("held_out_score")
    assert figures["before"] == pytest.approx(held_out["divergence"], rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("levels", ["uniform", "normal"])
def test_a_rounded_head_stays_while_layers_heal(levels: str, job: MakeJob) -> None:
    quantize = {"bits": 3, "levels": levels, "what": "all"}
    made = job(quantize=quantize, heal={"epochs": 4, "learning_rate": 0.0005}, **WHOLE, **DENSE)
    changed = healed(made)
    assert any(name.endswith("weight_scale") for name in changed)
    assert all(".layers." in name for name in changed)
    record = made.compression()
    assert any(name.startswith("lm_head.weight_packed") for name in record["tensors"])
    assert record["healed"]["before"] == pytest.approx(made.ledger("held_out_score")["divergence"], rel=0.02)


def test_a_checkpoint_of_another_class(job: MakeJob) -> None:
    made = job(methods=[{"method": "mla", "cache_keep": 0.5}], budget=None, heal=MLA_HEAL, **DENSE)
    changed = healed(made)
    assert any("kv_b_proj" in name for name in changed)
    assert any("norm" in name for name in changed)
    assert all(".layers." in name for name in changed)
    figures, held_out = made.compression()["healed"], made.ledger("held_out_score")
    assert figures["before"] == pytest.approx(held_out["divergence"], rel=0.02)


@pytest.mark.parametrize("form", ["tables", pytest.param("factors", marks=pytest.mark.nightly)])
def test_codes_train_through_the_rounding(form: str, job: MakeJob) -> None:
    heal = {"epochs": 4, "learning_rate": 0.005, "what": "codes"}
    changed = healed(job(heal=heal, **{"calibration.propagate": "dense", **ROUNDED[form]}))
    assert any(name.endswith("weight_packed") for name in changed)
    assert not any(name.endswith("weight_shape") for name in changed)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str, job: MakeJob, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family)
    changed = healed(job(source, heal={"epochs": 8, "learning_rate": 0.0005}))
    assert changed
    assert not any("router" in name or name.endswith("gate.weight") for name in changed)


@pytest.mark.nightly
def test_a_router_with_fewer_experts_stays(job: MakeJob, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "mixtral")
    methods, heal = [{"method": "reap", "refit": True}], {"epochs": 8, "learning_rate": 0.0005}
    changed = healed(job(source, methods=methods, heal=heal, **{"calibration.propagate": "dense"}))
    assert any("experts" in name for name in changed)
    assert not any(name.endswith("gate.weight") for name in changed)


def test_text_of_its_own_for_a_job_without_calibration(job: MakeJob, text: Path) -> None:
    heal = {"text": {"files": [str(text)]}, "tokens": 640, "learning_rate": 0.002, "what": "norms"}
    made = job(methods=[{"method": "svd", "keep": 0.6}], budget=None, calibration=None, heal=heal)
    changed = healed(made)
    assert all(name.endswith("norm.weight") for name in changed)
    assert made.compression()["healed"]["text"] == [text.name]
