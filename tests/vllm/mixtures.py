"""Writes random checkpoints of mixtures, in sizes that vLLM's kernels accept: heads of 32, hidden states of 128.

`layer`: every layer has its own number and width of experts. `free`: experts of one layer differ in width and form.
`stock`: one number and width for all layers, so that an export is of the source's own class.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lamina import LaminaConfig, LaminaForCausalLM
from lamina.block_lamina import MLP_ROLES
from pipeline.checkpoint.exporting import export_checkpoint
from pipeline.families.registry import checkpoint_config, standard_config
from tests import factories
from tests.vllm.checkpoints import round_

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "intermediate_size": 96, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
NARROW = {"moe_intermediate_size": 64}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**SIZES, "intermediate_size": 64}),
    "qwen2": ("qwen2_moe", {**SIZES, **NARROW, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3": ("qwen3_moe", {**SIZES, **NARROW, "norm_topk_prob": False}),
    "glm4": ("glm4_moe", {
        **SIZES, **NARROW, "partial_rotary_factor": 0.5, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    }),
    "deepseek": ("deepseek_v3", {
        **SIZES, **NARROW, "num_key_value_heads": 4, "head_dim": 32, "q_lora_rank": 40, "kv_lora_rank": 48,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "attention_bias": False, "n_group": 1,
        "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
}  # fmt: skip
LAYER = [(4, 64), (4, 40), (6, 24)]  # experts and width of each layer
STOCK = [(4, 40)] * 3
LATENTS = {
    "kv_a_proj_with_mqa": 32,
    "kv_a_layernorm": 32,
    "kv_b_proj": 32,
    "q_a_proj": 24,
    "q_a_layernorm": 24,
    "q_b_proj": 24,
}


def shaped(config: dict[str, Any], sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the forms of layers with these numbers and widths of experts."""
    forms: list[dict[str, Any]] = [{} for _ in sizes]
    for layer, (count, width) in enumerate(sizes):
        if config["mixture"]["layers"][layer] is None:
            continue
        forms[layer]["router"] = {"form": "experts", "rank": count}
        for expert in range(count):
            forms[layer] |= {f"experts.{expert}.{role}": {"form": "pruned", "rank": width} for role in MLP_ROLES}
    return forms


def unlike(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return forms of different experts: narrow, factored, whole."""
    forms: list[dict[str, Any]] = []
    for sizes in config["mixture"]["layers"]:
        one: dict[str, Any] = {}
        for expert in range(0 if sizes is None else sizes["experts"]):
            kind = expert % 3
            if kind == 0:
                one |= {f"experts.{expert}.{role}": {"form": "pruned", "rank": 16 + 8 * expert} for role in MLP_ROLES}
            elif kind == 1:
                pivoted = {"form": "pivoted", "rank": 20, "group": "gate_up", "width": 48}
                one |= {f"experts.{expert}.{role}": pivoted for role in ("gate", "up")}
                one[f"experts.{expert}.down"] = {"form": "pruned", "rank": 48}
        forms.append(one)
    return forms


def narrow_latents(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return forms of the experts in `STOCK`, with both latents of the attention narrowed."""
    narrow = {role: {"form": "narrow", "rank": rank} for role, rank in LATENTS.items()}
    return [forms | narrow for forms in shaped(config, STOCK)]


CASES: dict[str, tuple[str, Any]] = {
    **{f"{name}-layer": (name, lambda config: shaped(config, LAYER)) for name in ("mixtral", "qwen2", "qwen3")},
    "glm4-layer": ("glm4", lambda config: shaped(config, [(4, 64), (4, 40), (8, 24)])),
    "qwen3-free": ("qwen3", unlike),
    **{f"{name}-stock": (name, lambda config: shaped(config, STOCK)) for name in ("mixtral", "qwen3", "deepseek")},
    "deepseek-latents-stock": ("deepseek", narrow_latents),
}


def write(folder: Path, name: str, bits: int | None = None) -> Path:
    """Write the checkpoint of a case. `bits`: round the linears of its layers."""
    family, sizes = SOURCES[CASES[name][0]]
    standard = standard_config(factories.make_config(family, **sizes).to_dict())
    described = checkpoint_config(standard, CASES[name][1](standard), "float32")
    torch.manual_seed(0)
    model = LaminaForCausalLM(LaminaConfig(**described))
    tensors = {
        key: tensor + torch.randn_like(tensor) * 0.15 if tensor.is_floating_point() else tensor
        for key, tensor in model.state_dict().items()
    }
    for key, tensor in tensors.items():
        if key.endswith("pivoted.indices"):
            tensors[key] = torch.arange(tensor.numel()).view_as(tensor)
    if bits is not None:
        tensors = round_(described, tensors, bits)
    folder.mkdir(parents=True)
    stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    del described["auto_map"]
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def exported(folder: Path, name: str) -> Path:
    """Export a case to the source's own class."""
    export_checkpoint(str(write(folder / "output", name)), "stock", str(folder / name), lambda _: None)
    return folder / name
