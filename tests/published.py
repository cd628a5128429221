"""Writes checkpoints without weights for the published models of the example manifests.

Such a checkpoint has config.json, and safetensors files with true headers, whose data is a hole in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.families.registry import geometry_of, standard_config
from stores.headers import build_header

LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 32000, "rope_theta": 10000.0}
LLAMA2 = LLAMA | {"max_position_embeddings": 4096}
LLAMA3 = LLAMA | {"max_position_embeddings": 8192, "vocab_size": 128256, "rope_theta": 500000.0}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


DEEPSEEK = _sizes(7168, 18432, 61, 128, 128) | {
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "vocab_size": 129280,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "tie_word_embeddings": False, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": LLAMA2 | _sizes(4096, 11008, 32, 32, 32),
    "meta-llama/Llama-2-13b-hf": LLAMA2 | _sizes(5120, 13824, 40, 40, 40),
    "meta-llama/Llama-2-70b-hf": LLAMA2 | _sizes(8192, 28672, 80, 64, 8),
    "meta-llama/Meta-Llama-3-8B": LLAMA3 | _sizes(4096, 14336, 32, 32, 8),
    "meta-llama/Meta-Llama-3-70B": LLAMA3 | _sizes(8192, 28672, 80, 64, 8),
    "mistralai/Mistral-7B-v0.1": LLAMA
    | _sizes(4096, 14336, 32, 32, 8)
    | {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768},
    "EleutherAI/gpt-j-6b": {
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_layer": 28,
        "n_inner": None,
        "n_positions": 2048,
        "rotary_dim": 64,
        "vocab_size": 50400,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "facebook/opt-30b": {
        "model_type": "opt",
        "hidden_size": 7168,
        "ffn_dim": 28672,
        "num_hidden_layers": 48,
        "num_attention_heads": 56,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "word_embed_proj_dim": 7168,
        "do_layer_norm_before": True,
        "activation_function": "relu",
    },
    "deepseek-ai/DeepSeek-V3": DEEPSEEK,
    "moonshotai/Kimi-K2-Base": DEEPSEEK | {
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "vocab_size": 163840, "routed_scaling_factor": 2.827,
    },
    "Qwen/Qwen3-235B-A22B": _sizes(4096, 12288, 94, 64, 4) | {
        "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "vocab_size": 151936, "tie_word_embeddings": False,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "zai-org/GLM-4.5": _sizes(5120, 12288, 92, 96, 8) | {
        "model_type": "glm4_moe", "head_dim": 128, "partial_rotary_factor": 0.5, "n_routed_experts": 160,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "first_k_dense_replace": 3,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "attention_bias": True,
        "use_qk_norm": True, "vocab_size": 151552, "tie_word_embeddings": False, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
PARAMETERS = {  # as published, in 10⁹
    "meta-llama/Llama-2-7b-hf": 6.738,
    "meta-llama/Llama-2-13b-hf": 13.016,
    "meta-llama/Llama-2-70b-hf": 68.977,
    "meta-llama/Meta-Llama-3-8B": 8.030,
    "meta-llama/Meta-Llama-3-70B": 70.554,
    "mistralai/Mistral-7B-v0.1": 7.242,
    "EleutherAI/gpt-j-6b": 6.051,
    "facebook/opt-30b": 29.975,
    "deepseek-ai/DeepSeek-V3": 671.026,
    "Qwen/Qwen3-235B-A22B": 235.094,
}


def write_hollow_checkpoint(directory: Path, name: str, dtype: str = "BF16") -> Path:
    """Write config.json and one safetensors file per layer, whose data takes no space on the disk."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    geometry = geometry_of(standard_config(CONFIGS[name]))
    parts = [dict(geometry.outer)] + [dict(layer.tensors().values()) for layer in geometry.layers]
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        header, records = build_header([(tensor, dtype, shape) for tensor, shape in tensors.items()], {"format": "pt"})
        with open(directory / file, "wb") as opened:
            opened.write(header)
            opened.truncate(records[-1].end)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
