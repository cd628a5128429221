"""`export --to gguf` of mixtures: the tensors in the file are the model's, and llama.cpp agrees where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.checkpoint.targets import export_faults
from pipeline.families.registry import checkpoint_config, standard_config
from tests import factories
from tests.end_to_end.jobs import Job, command, load, logits_of, read_tensors, relative_error, some_tokens
from tests.end_to_end.sources import make_source
from tests.end_to_end.test_export import export
from tests.end_to_end.test_export_gguf import needs_gguf, read_gguf
from tests.llama_cpp import LlamaCpp, needs_llama_cpp

pytestmark = [needs_gguf, pytest.mark.usefixtures("inline")]
MakeJob = Callable[..., Job]
STOCK: dict[str, Any] = {
    "methods": [{"method": "loss_aware", "shapes": "stock"}], "calibration.propagate": "dense", "budget.keep": 0.7,
    "budget.scope": "experts",
}  # fmt: skip
WHOLE: dict[str, Any] = {"methods": [{"method": "flat_llm", "keep": 1.0}], "budget": None}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen3_moe": (
        "qwen3moe",
        {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "num_experts": 12},
    ),
    "deepseek_v3": ("deepseek2", {"attention_bias": False, "rope_parameters": YARN}),
}
TRAINED = ("mixtral-tiny-ts", "qwen3moe-tiny-ts", "deepseekv3-tiny-ts")
OWN_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def own_tensor(name: str, stock: dict[str, Tensor], family: str, heads: dict[str, int]) -> Tensor:
    """The tensor of a file's name, put together from an ordinary checkpoint's."""
    if not name.startswith("blk."):
        return stock[f"{OUTER[name.removesuffix('.weight')]}.weight"]
    _, layer, role, _ = name.split(".")
    prefix = f"model.layers.{layer}."
    if role == "exp_probs_b":
        return stock[f"{prefix}mlp.gate.e_score_correction_bias"]
    mixture = prefix + ("block_sparse_moe" if family == "mixtral" else "mlp")
    if role == "ffn_gate_inp":
        return stock[f"{mixture}.gate.weight"]
    if role.endswith("_exps"):
        part = role.split("_")[1]
        own = IN_MIXTRAL[part] if family == "mixtral" else f"{part}_proj"
        count = len(stock[f"{mixture}.gate.weight"])
        return torch.stack([stock[f"{mixture}.experts.{expert}.{own}.weight"] for expert in range(count)])
    if role in ("attn_k_b", "attn_v_b"):
        rows = stock[f"{prefix}self_attn.kv_b_proj.weight"].unflatten(0, (4, -1))
        return rows[:, :10].transpose(1, 2) if role == "attn_k_b" else rows[:, 10:]
    tensor = stock[f"{prefix}{OWN_NAMES[role]}.weight"]
    if family == "mixtral" and role in heads:  # pairs of neighbours
        return tensor.unflatten(0, (heads[role], 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_the_tensors_of_a_stock_checkpoint(family: str, tmp_path: Path, job: MakeJob) -> None:
    architecture, options = FAMILIES[family]
    made = job(make_source(tmp_path / "source", family, layers=2, **options), **STOCK)
    assert made.run().code == 0
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    assert command("export", "--to", "stock", str(made.output), str(tmp_path / "stock")).code == 0
    fields, tensors = read_gguf(destination)
    stock = read_tensors(tmp_path / "stock")
    assert fields["general.architecture"] == architecture
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(tensor.numel() for tensor in stock.values())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, own_tensor(name, stock, family, {"attn_q": 4, "attn_k": 2})), name
    field = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    experts = config.get("num_local_experts") or config["n_routed_experts"]
    assert field["expert_count"] == len(tensors["blk.1.ffn_gate_inp.weight"]) == experts
    assert field["expert_used_count"] == config["num_experts_per_tok"]
    if family == "deepseek_v3":
        assert field["leading_dense_block_count"] == 1
        assert field["expert_shared_count"] == config["n_shared_experts"]
        assert (field["attention.key_length"], field["attention.key_length_mla"]) == (12 + 6, 16)
        assert field["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: false"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "dense MLPs between mixtures of experts"),
        ("qwen3_moe", {"attention_bias": True}, "biases on"),
        ("qwen3_moe", {"attention_bias": True, "hidden_size": 64}, "biases on k, o, q, v"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0}}, "YaRN with mscale 1.0 and mscale_all_dim 0.7"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave: false"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "a deepseek_v3 model without experts"),
        ("qwen2_moe", {}, "mixtures of experts"),
    ],
)
def test_what_llama_cpp_cannot_say_is_named(family: str, changes: dict[str, Any], said: str) -> None:
    fields = {**FAMILIES.get(family, ("", {}))[1], **changes}
    standard = standard_config(factories.make_config(family, num_hidden_layers=2, **fields).to_dict())
    config = checkpoint_config(standard, standard["forms"], "float32")
    assert said in "; ".join(export_faults(config, "gguf"))


def test_experts_that_differ_are_refused_by_name(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "mixtral", layers=2, **FAMILIES["mixtral"][1])
    made = job(source, **{**STOCK, "methods": [{"method": "loss_aware"}]})
    assert made.run().code == 0
    ended, destination = export(made, "gguf", "model.gguf")
    assert (ended.code, destination.exists()) == (2, False)
    assert "{method: loss_aware, shapes: stock} keeps to one" in ended.err


@needs_llama_cpp
@pytest.mark.parametrize("entry", [WHOLE, STOCK], ids=["whole", "stock"])
@pytest.mark.parametrize("name", TRAINED)
def test_llama_cpp_computes_the_same(
    name: str, entry: dict[str, Any], tmp_path: Path, job: MakeJob, shared_dir: Path
) -> None:
    check_llama_cpp(job(shared_dir / "models" / name, **entry), 512)


@needs_llama_cpp
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_at_odd_sizes(family: str, tmp_path: Path, job: MakeJob) -> None:
    """Also with YaRN, groups of experts and a correction bias."""
    check_llama_cpp(job(make_source(tmp_path / "source", family, layers=2, **FAMILIES[family][1]), **STOCK), 320)


def check_llama_cpp(made: Job, vocabulary: int) -> None:
    """Logits of a job's checkpoint in llama.cpp against ours. Its matrices of float32 meet activations of float16."""
    ended = made.run()
    assert ended.code == 0, ended.err
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    ids_BT = some_tokens(vocabulary, length=32)[:1]
    got = LlamaCpp(destination).log_probabilities(ids_BT[0].tolist(), vocabulary)
    expected = logits_of(load(made.output), ids_BT)[0].log_softmax(-1)
    assert relative_error(got, expected) < 0.005
    # Of two tokens with logits as near as the error either may lead.
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9
    chosen_T = expected.gather(-1, got.argmax(-1, keepdim=True))[:, 0]
    assert float((expected.amax(-1) - chosen_T).max()) < 0.005 * float(expected.abs().max())


@pytest.mark.slow
def test_rounded_experts_are_written_as_their_values(tmp_path: Path, job: MakeJob) -> None:
    source = make_source(tmp_path / "source", "mixtral", layers=2, **FAMILIES["mixtral"][1])
    made = job(source, methods=[], budget=None, quantize={"bits": 8, "group": None})
    assert made.run().code == 0
    assert any(name.endswith("weight_packed") for name in read_tensors(made.output) if ".experts." in name)
    ended, destination = export(made, "gguf", "model.gguf")
    assert ended.code == 0, ended.err
    assert command("export", "--to", "dense", str(made.output), str(tmp_path / "dense")).code == 0
    dense, tensors = read_tensors(tmp_path / "dense"), read_gguf(destination)[1]
    assert {name for name in tensors if "_exps" in name}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, own_tensor(name, dense, "mixtral", {"attn_q": 4, "attn_k": 2})), name
