"""Models cut over two processes by transformers' tensor parallelism (gloo), and what the plan says of their forms."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lamina import LaminaConfig
from tests.buckets import free_port
from tests.serving import serving_factors as kinds
from tests.serving import two_processes
from tests.serving.serving_factors import factorise, forms_of
from tests.serving.serving_sources import build, describe, make_source

pytestmark = pytest.mark.slow


def narrow(sizes: Any, share: float) -> dict[str, Any]:
    """Value heads of 6 numbers and 40 channels: as many on either process."""
    value = {"form": "head_pca", "rank": sizes.head_dim // 2}
    return {"v": value, "o": value} | {
        role: {"form": "pruned", "rank": 40} for role in ("gate", "up", "down") if role in sizes.roles
    }


def factors(sizes: Any, share: float) -> dict[str, Any]:
    """Odd ranks: what the devices divide is heads and channels."""
    return {role: {**spec, "rank": 23} for role, spec in kinds.low_rank(sizes, share).items()}


def attention_only(sizes: Any, share: float) -> dict[str, Any]:
    pivoted = kinds.pivoted(sizes, share)
    return factors(sizes, share) | {role: pivoted[role] for role in ("gate", "up", "down")}


CASES: dict[str, tuple[str, Any]] = {
    "dense": ("llama-mha", kinds.dense),
    "narrow": ("llama-mha", narrow),
    "factors": ("llama-mha", factors),
    "joint": ("llama-mha", kinds.joint),
    "latent": ("llama-mha", kinds.latent_both),
    "attention_only": ("llama-mha", attention_only),
}
# Of the weights below, the shape on one of two processes.
CUT = {
    "dense": {"q_proj.weight": [24, 48], "o_proj.weight": [48, 24], "down_proj.weight": [48, 40]},
    "narrow": {"v_proj.weight": [12, 48], "up_proj.weight": [20, 48]},
    "factors": {"q_proj.first.weight": [23, 48], "q_proj.second.weight": [24, 23], "o_proj.first.weight": [23, 24]},
    "joint": {"q_proj.first.weight": [24, 48], "k_proj.second.weight": [24, 24], "o_proj.weight": [48, 24]},
    "latent": {"k_proj.first.weight": [24, 48], "k_proj.second.weight": [24, 24]},
    "attention_only": {"q_proj.second.weight": [24, 23], "gate_up.pivoted.rows.weight": [24, 48]},
}


def write(folder: Path, name: str) -> None:
    """A checkpoint, and the logits and greedy tokens of the whole model."""
    source = make_source(CASES[name][0])
    forms = forms_of(source.config, CASES[name][1], 0.5)
    tensors, _ = factorise(source.config, source.state_dict(), forms)
    model = build(source.config, tensors, forms)
    ids = torch.arange(10, 34).view(2, 12)
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(describe(source.config, forms)))
    save_file({"ids": ids, "logits": logits, "tokens": tokens}, folder / "expected.safetensors")


def rank_of_two(rank: int, port: int, folders: list[str], log: str) -> None:
    """Do the work of one of torchrun's processes, in one that has already imported torch and transformers."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    two_processes.main(folders)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("accelerate")
    root = tmp_path_factory.mktemp("cut")
    for name in CASES:
        write(root / name, name)
    from tests.end_to_end.children import CONTEXT, WAIT_S  # which imports all commands

    logs, folders, port = [root / "0.log", root / "1.log"], [str(root / name) for name in CASES], free_port()
    ranks = [CONTEXT.Process(target=rank_of_two, args=(rank, port, folders, str(logs[rank]))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process, log in zip(ranks, logs, strict=True):
        process.join(WAIT_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
    lines = [line.removeprefix("RESULT ") for line in logs[0].read_text().splitlines() if line.startswith("RESULT ")]
    return {Path(one["folder"]).name: one for one in map(json.loads, lines)}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_the_same(answers: dict[str, Any], name: str) -> None:
    assert answers[name]["difference"] <= 2e-5
    assert answers[name]["same_tokens"]


@pytest.mark.parametrize("name", CASES)
def test_what_is_cut(answers: dict[str, Any], name: str) -> None:
    for end, shape in CUT[name].items():
        found = [one for key, one in answers[name]["shapes"].items() if key.endswith(end)]
        assert found == [shape], end


def plan_of(name: str, kind: Any) -> dict[str, str] | None:
    source = make_source(name).config
    plan: dict[str, str] | None = LaminaConfig(**describe(source, forms_of(source, kind, 0.5))).base_model_tp_plan
    return plan


def test_the_plan() -> None:
    column, row = "colwise", "rowwise"
    at = "layers.*.self_attn"
    assert plan_of("llama-gqa", attention_only) == {
        f"{at}.q_proj.second": column, f"{at}.k_proj.second": column, f"{at}.v_proj.second": column,
        f"{at}.o_proj.first": row,
    }  # fmt: skip
    assert plan_of("llama-gqa", kinds.tucker) is None
    dense_mlp = {"layers.*.mlp.gate_proj": column, "layers.*.mlp.up_proj": column, "layers.*.mlp.down_proj": row}
    for kind in (kinds.joint_head, kinds.narrow_keys_latent_values, kinds.absorbed):
        assert plan_of("llama-mha", kind) == dense_mlp
    assert plan_of("llama-gqa", [kinds.dense, kinds.low_rank, kinds.dense]) is None  # not the same modules everywhere
    assert "decoder.layers.*.fc1.second" not in (plan_of("opt-tied", kinds.low_rank) or {})  # its bias is not cut
