"""Writes checkpoints like those of `mla`, of random Llamas: 8 query heads of 32 numbers over 4, hidden states of 128.

T tokens, D hidden, C numbers of all keys.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from manifests.methods import MLA
from pipeline.families.latent_config import output_config
from pipeline.families.registry import geometry_of, standard_config
from pipeline.methods.method import Moment, Statistics
from pipeline.methods.mla import DENSITY, RANK, ROPE, MLAMethod

ROTATED = 32  # a CPU's kernels need heads of 32 + 32
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def write(folder: Path, cache_keep: float, tied: bool = False, rotated: int = ROTATED, density: int = 1) -> Path:
    """Compress a random model by `mla`, with statistics of random text. `tied`: output and input embeddings are one."""
    source = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    standard = standard_config(source.to_dict())
    geometry = geometry_of(standard)
    method = MLAMethod(MLA(method="mla", cache_keep=cache_keep, rope=rotated))
    rank = int(cache_keep * geometry.layers[0].cache_numbers) - rotated
    ranks = {RANK: rank, ROPE: rotated, DENSITY: density}
    tensors, forms = dict(model.state_dict()), []
    for group, layer, inputs_TD in zip(method.claims(geometry), geometry.layers, inputs_of(model), strict=True):
        weights = {key: tensors.pop(name) for key, (name, _) in layer.tensors(group.roles).items()}
        moments = {each: moment(each, inputs_TD, layer.attention) for each in group.moments}
        solution = group.with_data(weights, Statistics(moments, len(inputs_TD))).solve(ranks)
        tensors |= {layer.tensor_name(key, group.roles): each.float() for key, each in solution.tensors.items()}
        forms.append({role: form.as_json() for role, form in solution.forms.items()})
    if tied:
        del tensors["lm_head.weight"]
    return saved(folder, output_config(standard, forms, "float32"), tensors)


def inputs_of(model: LlamaForCausalLM) -> list[Tensor]:
    """Return the normed hidden states (T, D) that each layer's attention reads, for random tokens."""
    seen: list[Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda *call: seen.append(call[2].flatten(0, 1)))
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model(torch.randint(3, 128, (16, 64), generator=torch.Generator().manual_seed(1)))
    for hook in hooks:
        hook.remove()
    return seen


def moment(of: Moment, inputs_TD: Tensor, block: Any) -> Tensor:
    """Return a statistic of `mla`, with gradients that weigh all numbers of keys and values alike."""
    if of.kind == "gradient":
        return torch.eye(block.key.shape[0])[None]
    return inputs_TD[None] if of.kind == "sample" else (inputs_TD.T @ inputs_TD)[None]


def write_random(folder: Path, latent: int, rotated: int) -> Path:
    """Write a random model of `mla`'s class, with a cache of these sizes, in bfloat16."""
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8, "num_hidden_layers": 1, "head_dim": rotated},
        q_lora_rank=None, kv_lora_rank=latent, qk_nope_head_dim=64, qk_rope_head_dim=rotated, v_head_dim=64,
        first_k_dense_replace=1, n_routed_experts=1, n_shared_experts=1, num_experts_per_tok=1, n_group=1, topk_group=1,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return saved_model(folder, DeepseekV3ForCausalLM(config))


def write_dense(folder: Path, heads: int, width: int) -> Path:
    """Write a random Llama with `heads` key and query heads of `width`, in bfloat16."""
    sizes = {
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
    }
    torch.manual_seed(0)
    return saved_model(folder, LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes, "num_hidden_layers": 1})))


def saved_model(folder: Path, model: Any) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder
