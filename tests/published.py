"""The published geometries of the models in the example manifests, and checkpoints of them without weights.

A checkpoint here is config.json and safetensors whose headers are true and whose data is a hole in the file.
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
}
PARAMETERS = {  # as published, in 10⁹
    "meta-llama/Llama-2-7b-hf": 6.738,
    "meta-llama/Llama-2-13b-hf": 13.016,
    "meta-llama/Llama-2-70b-hf": 68.977,
    "meta-llama/Meta-Llama-3-8B": 8.030,
    "meta-llama/Meta-Llama-3-70B": 70.554,
    "mistralai/Mistral-7B-v0.1": 7.242,
    "EleutherAI/gpt-j-6b": 6.051,
    "facebook/opt-30b": 29.975,
}


def write_hollow_checkpoint(directory: Path, name: str, dtype: str = "BF16") -> Path:
    """config.json and one hollow safetensors file per layer; takes next to no disk."""
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
