"""Jobs whose codes stand for levels in tables: what is written and counted, loaded, checked, exported and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina import LaminaConfig, LaminaForCausalLM
from lamina.levels_lamina import TableEmbedding, TableLinear
from pipeline.kernels.levels import normal_levels
from pipeline.rounding.schemes import FIELD, TABLES, packed_modules, rounded_modules, unpacked
from tests.end_to_end.jobs import (
    Job,
    command,
    file_digests,
    load,
    logits_of,
    read_tensors,
    relative_error,
    some_tokens,
)
from tests.end_to_end.sources import make_source

pytestmark = pytest.mark.usefixtures("inline")

MakeJob = Callable[..., Job]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
PLAIN = {"method": "loss_aware", "factors": "plain", "rank_multiple": 32}


def rounding(bits: int | str, levels: str, **more: Any) -> dict[str, Any]:
    return {"quantize": {"bits": bits, "levels": levels, **more}, "calibration.propagate": "dense", "budget": None}


def config_of(output: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((output / "config.json").read_text())
    return config


def plain_model(output: Path) -> Any:
    """The checkpoint's own class with unrounded weights, which are multiplied out here."""
    config, tensors = config_of(output), read_tensors(output)
    weights = unpacked(tensors, rounded_modules(config, packed_modules(tensors)))
    fields = {name: value for name, value in config.items() if name not in (FIELD, TABLES)}
    model = LaminaForCausalLM(LaminaConfig(**fields))
    model.load_state_dict(weights, strict=True)
    return model.eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("methods", "bits", "levels", "more"),
    [
        ([], 4, "normal", {}),
        ([], 3, "learned", {"what": "all"}),
        ([PLAIN], 2, "learned", {"skip": ["v"]}),
        ([{"method": "loss_aware", "correct": "output"}], 4, "learned", {"what": "all"}),
        ([], 8, "normal", {"group": None}),
        ([], 4, "learned", {"feedback": False}),
    ],
    ids=["4", "3", "2", "corrected", "8", "nearest"],
)
def test_transformers_loads_what_was_meant(
    wide: Path, job: MakeJob, methods: list[Any], bits: int, levels: str, more: dict[str, Any]
) -> None:
    budget = {"keep": 0.8} if methods else None
    made = job(wide, methods=methods, **{**rounding(bits, levels, **more), "budget": budget})
    held_out = made.run().json["held_out"]
    assert held_out is None if more.get("feedback") is False else 0.0 < held_out["divergence"] < 1.0
    config, model, ids = config_of(made.output), load(made.output), some_tokens(320)
    assert FIELD not in config
    kinds = {type(module) for module in model.modules()} & {TableLinear, TableEmbedding}
    assert kinds == ({TableLinear, TableEmbedding} if more.get("what") else {TableLinear})
    assert {scheme["levels"] for scheme in config[TABLES].values()} == {levels}
    assert not any(path.endswith("v_proj") for path in config[TABLES]) or "skip" not in more
    logits = logits_of(model, ids)
    assert relative_error(logits, logits_of(plain_model(made.output), ids)) < 1e-5
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    for end in range(ids.shape[1], tokens.shape[1]):
        assert torch.equal(logits_of(model, tokens[:, :end])[:, -1].argmax(-1), tokens[:, end])
    verified = command("verify", str(made.output), "--source", str(wide), "--json")
    assert verified.code == 0, verified.out + verified.err
    if levels == "normal":
        tables = [tensor for name, tensor in read_tensors(made.output).items() if name.endswith("weight_levels")]
        assert all(torch.equal(table, normal_levels(bits).to(table.dtype)) for table in tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_tables(dtype: torch.dtype, tmp_path: Path, job: MakeJob) -> None:
    """In the checkpoint's dtype."""
    source = make_source(tmp_path / "source", "llama", layers=2, dtype=dtype, **SIZES)
    made = job(source, methods=[], **rounding(4, "learned", what="all"))
    planned = command("plan", str(made.write().manifest), "--json")
    assert planned.code == 0, planned.err
    assert made.run().code == 0
    stored = sum(tensor.nbytes for tensor in read_tensors(made.output).values())
    assert json.loads(planned.out)["output_bytes"] == stored


def test_exports(wide: Path, job: MakeJob) -> None:
    """Multiplied out, `stock` and `dense` give the same logits; `stock` and `gguf` refuse tables unless asked."""
    made = job(wide, methods=[], **rounding(4, "learned", what="all"))
    assert made.run().code == 0
    meant, ids = plain_model(made.output), some_tokens(320)
    for target in ("stock", "gguf"):
        refused = command("export", str(made.output), "--to", target, str(made.root / "refused"))
        assert refused.code == 2, refused.err
        assert "learned levels (quantize.levels) of" in refused.err
        assert "--multiply-out" in refused.err
    for target, more in (("dense", ()), ("stock", ("--multiply-out",))):
        assert command("export", str(made.output), "--to", target, *more, str(made.root / target)).code == 0
        model = AutoModelForCausalLM.from_pretrained(made.root / target, dtype=torch.float32).eval()
        assert relative_error(logits_of(model, ids), logits_of(meant, ids)) < 1e-5


def test_normal_levels_of_four_bits_are_exported_as_nf4(wide: Path, job: MakeJob) -> None:
    """Read by hand as bitsandbytes does: the high half of a byte first, an absmax for each block of the flat weight."""
    made = job(wide, methods=[], **rounding(4, "normal", skip=["v"]))
    assert made.run().code == 0
    stock = made.root / "stock"
    assert command("export", str(made.output), "--to", "stock", str(stock)).code == 0
    tensors, ours = read_tensors(stock), plain_model(made.output).state_dict()
    quantization = config_of(stock)["quantization_config"]
    assert "model.layers.0.self_attn.v_proj" in quantization["llm_int8_skip_modules"]
    for name in [name.removesuffix(".absmax") for name in tensors if name.endswith(".absmax")]:
        state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
        packed = tensors[name].flatten()
        levels = tensors[f"{name}.quant_map"][torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()]
        weight = levels.unflatten(0, (-1, state["blocksize"])) * tensors[f"{name}.absmax"][:, None]
        meant = ours[name]
        assert relative_error(weight.reshape(state["shape"]), meant) < 0.004  # levels are stored in bfloat16
        del ours[name]
    assert not [name for name in ours if name.endswith(("q_proj.weight", "down_proj.weight"))]
    if find_spec("bitsandbytes"):
        ids = some_tokens(320)
        logits = logits_of(AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32).eval(), ids)
        assert relative_error(logits, logits_of(plain_model(made.output), ids)) < 0.02


def test_kinds_are_chosen_by_error(wide: Path, job: MakeJob) -> None:
    """Codes of uniform levels stay in the layout that engines have kernels for."""
    made = job(wide, methods=[], **rounding(8, "auto"))
    assert made.run().code == 0
    config = config_of(made.output)
    kinds = {scheme["levels"] for scheme in config.get(TABLES, {}).values()}
    assert "normal" not in kinds  # of so many levels they are the worst
    assert FIELD in config or kinds == {"learned"}
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("levels", ["learned", "auto"])
@pytest.mark.nightly
def test_bits_are_chosen_with_ranks(wide: Path, job: MakeJob, levels: str) -> None:
    """Within the bytes, tables counted."""
    made = job(wide, methods=[{"method": "loss_aware"}], **{**rounding("auto", levels), "budget": {"bytes": 0.19}})
    assert made.run().code == 0, made.run().err
    layers, dense = (
        sum(tensor.nbytes for name, tensor in read_tensors(place).items() if name.startswith("model.layers."))
        for place in (made.output, wide)
    )
    assert 0.15 < layers / dense <= 0.19
    assert command("verify", str(made.output), "--source", str(wide), "--json").code == 0


def test_a_killed_job_goes_on_with_the_same_bytes(wide: Path, job: MakeJob) -> None:
    whole = job(wide, methods=[], **rounding(3, "learned"))
    assert whole.run().code == 0
    again = job(wide, methods=[], **rounding(3, "uniform"))
    assert again.run().code == 0
    for entry in (again.run_dir / "ledger").glob("layer.00001.*"):
        entry.unlink()
    again.changes = {**again.changes, **rounding(3, "learned")}
    assert again.run().json["seconds_saved"] > 0.0
    assert file_digests(again.output) == file_digests(whole.output)
