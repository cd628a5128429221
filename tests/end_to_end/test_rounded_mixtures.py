"""Jobs on mixtures of experts that store codes of a few bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

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
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_methods import decodes_as_it_prefills
from tests.end_to_end.test_quantize import load_plain, plain_model, rounding

pytestmark = pytest.mark.usefixtures("inline")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}  # groups of 32 divide them


CHOSEN: dict[str, dict[str, Any]] = {
    "stock": {"method": "loss_aware", "shapes": "stock"},
    "layer": {"method": "loss_aware", "shapes": "layer"},
    "reap": {"method": "reap", "refit": True},
    "merge": {"method": "merge_experts"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "family", "levels", "bits"),
    [
        ("stock", "mixtral", "uniform", 4),
        ("stock", "qwen3_moe", "normal", 4),
        ("layer", "qwen3_moe", "uniform", 4),
        ("layer", "llama4_text", "uniform", 8),  # whose router weighs inputs
        ("layer", "mixtral", "normal", 3),
        ("reap", "mixtral", "uniform", 3),
        ("merge", "qwen3_moe", "learned", 4),
    ],
)
def test_experts_that_are_chosen_together_are_rounded(
    name: str, family: str, levels: str, bits: int, tmp_path: Path, job: MakeJob
) -> None:
    sizes = SIZES if family == "qwen3_moe" else {"hidden_size": 64, "intermediate_size": 96}
    source = make_source(tmp_path / "source", family, 2, **sizes)
    budget = {"keep": 0.6, "scope": "experts"}
    made = job(source, methods=[CHOSEN[name]], budget=budget, **rounding(bits, levels=levels))
    assert command("plan", str(made.manifest)).code == 0
    ended = made.run()
    assert ended.code == 0, ended.err
    model, ids_BT = load(made.output), some_tokens(320)
    assert relative_error(logits_of(model, ids_BT), logits_of(plain_model(made.output), ids_BT)) < 1e-5
    decodes_as_it_prefills(model, source)
    assert command("verify", str(made.output), "--source", str(source), "--bound", "10").code == 0
    before, after = read_tensors(source), read_tensors(made.output)
    experts = [key for key in after if ".experts." in key]
    assert experts
    assert all("weight_" in key for key in experts)
    routers = [key for key in after if re.search(r"(mlp|sparse_moe|feed_forward)\.(gate|router)\.", key)]
    assert name == "layer" or any(len(after[key]) < len(before[key]) for key in routers), "experts go"
    assert all(after[key].is_floating_point() for key in routers)
    layers = [layer["groups"] for layer in made.compression()["layers"]]
    groups = [groups["experts"] for groups in layers if "experts" in groups]
    # Of random weights at 3 bits it is 0.51, as feedback is damped.
    assert all(0.0 < group["rounding_error"] < 0.6 and "nearest" not in group for group in groups)


@pytest.mark.nightly
def test_bits_chosen_for_experts_in_slices_are_those_of_whole_layers(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "qwen3_moe", 2, **SIZES)
    settings = {"budget": {"bytes": 0.3, "scope": "experts"}}
    whole, sliced = (
        job(source, methods=[{"method": "loss_aware"}], **settings, **rounding("auto"), **{"workers.experts": n})
        for n in (100, 2)
    )
    for made in (whole, sliced):
        ended = made.run()
        assert ended.code == 0, ended.err
    assert file_digests(whole.output) == file_digests(sliced.output)


@pytest.mark.parametrize(
    ("skip", "plain"),
    [
        (["down"], {"experts.down", "shared.down", "down"}),
        (["experts.down", "shared.gate"], {"experts.down", "shared.gate"}),
        (["experts.gate", "experts.up", "experts.down"], {"experts.gate", "experts.up", "experts.down"}),
    ],
)
def test_roles_of_experts_are_skipped(skip: list[str], plain: set[str], tmp_path: Path, job: MakeJob) -> None:
    """In glm4_moe the first layer has a dense MLP, the second experts and a shared one."""
    source = make_source(tmp_path / "source", "glm4_moe", 2, **SIZES)
    made = job(source, methods=[], budget=None, **rounding(8, skip=skip))
    assert made.run().code == 0
    unrounded = set()
    for name in read_tensors(made.output):
        path, _, kind = name.rpartition("_proj.")
        if kind == "weight" and ".mlp." in path:
            block = {"experts": "experts.", "shared_experts": "shared."}.get(path.split(".")[4], "")
            unrounded.add(block + path.rpartition(".")[2])
    assert unrounded == plain
    ids_BT = some_tokens(320)
    config = json.loads((made.output / "config.json").read_text())
    meant = logits_of(load_plain(made.output, config), ids_BT)
    assert relative_error(logits_of(load(made.output), ids_BT), meant) < 1e-5
    assert command("verify", str(made.output), "--source", str(source)).code == 0


def test_a_skipped_role_that_no_layer_has(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "mixtral", 1, hidden_size=64, intermediate_size=96)
    ended = job(source, methods=[], budget=None, **rounding(8, skip=["shared.down"])).run()
    assert ended.code == 2
    assert "has no matrix shared.down; it has q, k, v, o, experts.gate, experts.up, experts.down" in ended.err


def exported(made: Job, name: str, *options: str) -> Any:
    """The job's `stock` export in the source's own class of transformers, float32."""
    folder = made.root / name
    ended = command("export", str(made.output), "--to", "stock", *options, str(folder))
    assert ended.code == 0, ended.err
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


OTHERS_SKIPPED = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "sizes", "quantize"),
    [
        ("mixtral", {"intermediate_size": 96}, {"bits": 4}),
        ("qwen3_moe", {"moe_intermediate_size": 48}, {"bits": 4}),  # gate and up in groups of 32, down in groups of 16
        ("qwen2_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}, {"bits": 3}),
        (
            "deepseek_v3",
            {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
            {"bits": 4, "skip": OTHERS_SKIPPED},
        ),
        ("hunyuan_v1_moe", {"intermediate_size": 96}, {"bits": 4}),  # whose router is a linear module
        ("glm4_moe", {"moe_intermediate_size": 32, "intermediate_size": 80}, {"bits": 8, "group": None}),
    ],
)
def test_transformers_own_classes_read_codes_of_experts(
    family: str, sizes: dict[str, int], quantize: dict[str, Any], tmp_path: Path, job: MakeJob
) -> None:
    pytest.importorskip("compressed_tensors")
    source = make_source(tmp_path / "source", family, 2, hidden_size=64, **sizes)
    budget = {"keep": 0.7, "scope": "experts"}
    made = job(source, methods=[CHOSEN["stock"]], budget=budget, **rounding(**quantize))
    assert made.run().code == 0
    ids_BT = some_tokens(320)
    assert (
        relative_error(logits_of(exported(made, "stock"), ids_BT), logits_of(plain_model(made.output), ids_BT)) < 1e-5
    )
    names = read_tensors(made.root / "stock")
    assert all("weight_" in name for name in names if ".experts." in name)
    assert any(".experts." in name for name in names)
    assert "--to stock DEST" in (made.output / "README.md").read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "quantize", "reason"),
    [
        ("qwen3_moe", {"bits": 4, "skip": ["experts.down"]}, "matrices of experts without (quantize.skip)"),
        ("qwen3_moe", {"bits": 4, "skip": ["experts.gate", "experts.up", "experts.down"]}, "of experts without"),
        ("mixtral", {"bits": 4, "levels": "normal"}, "NF4 codes of"),
        ("llama4_text", {"bits": 4}, "which transformers then expects one by one"),
    ],
)
def test_codes_of_experts_that_transformers_cannot_read_are_refused(
    family: str, quantize: dict[str, Any], reason: str, tmp_path: Path, job: MakeJob
) -> None:
    sizes = SIZES if family == "qwen3_moe" else {"hidden_size": 64, "intermediate_size": 96}
    source = make_source(tmp_path / "source", family, 2, **sizes)
    made = job(source, methods=[], budget=None, **rounding(**quantize))
    assert made.run().code == 0
    refused = command("export", str(made.output), "--to", "stock", str(made.root / "stock"))
    assert refused.code == 2
    assert reason in refused.err
    assert "--multiply-out" in refused.err
    ids_BT, model = some_tokens(320), exported(made, "unrounded", "--multiply-out")
    assert relative_error(logits_of(model, ids_BT), logits_of(plain_model(made.output), ids_BT)) < 1e-5
    assert not [name for name in read_tensors(made.root / "unrounded") if "weight_" in name]
    assert "--to stock --multiply-out DEST" in (made.output / "README.md").read_text()


@pytest.mark.parametrize("family", ["gemma2", "gptj", "deepseek_v3", "llama4_text"])
def test_what_is_no_routed_expert_is_corrected(family: str, tmp_path: Path, job: MakeJob) -> None:
    """Behind a norm, beside an MLP that reads the same, around latents, and in front of experts."""
    source = make_source(tmp_path / "source", family, 2)
    made = job(
        source,
        methods=[],
        budget=None,
        quantize={"bits": 8, "group": None, "correct": "output"},
        **{"calibration.propagate": "dense"},
    )
    assert made.run().json["held_out"]["divergence"] < 0.01
    verified = command("verify", str(made.output), "--source", str(source), "--json")
    assert verified.code == 0, verified.out + verified.err
