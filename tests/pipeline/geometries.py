"""Geometries and manifests for tests, without any model."""

from __future__ import annotations

from typing import Any

from manifests.schema import Manifest
from pipeline.families.family import Geometry
from pipeline.families.registry import geometry_of, standard_config

SIZES: dict[str, dict[str, Any]] = {
    # D, N, L, H, G, d: d is D / H in some, not in others.
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "mqa": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 12},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "wide-heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 40, "intermediate_size": 100},
}


def llama(name: str = "gqa", **overrides: Any) -> Geometry:
    """A small Llama geometry: D 48, N 80, L 6."""
    config = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 6,
        "max_position_embeddings": 64,
    }
    return geometry_of(standard_config({**config, **SIZES[name], **overrides}))


def other(model_type: str) -> Geometry:
    """A small geometry of a family without a gated MLP (`opt`, `gptj`), or with biases or norms of its own."""
    configs: dict[str, dict[str, Any]] = {
        "opt": {
            "hidden_size": 48, "num_attention_heads": 4, "ffn_dim": 80, "num_hidden_layers": 6, "vocab_size": 320,
            "word_embed_proj_dim": 48,
        },
        "gptj": {"n_embd": 48, "n_head": 4, "n_inner": 80, "n_layer": 6, "vocab_size": 320, "rotary_dim": 8},
        "qwen2": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4,
                  "num_key_value_heads": 2},
        "qwen3": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 16},
    }  # fmt: skip
    return geometry_of(standard_config({"model_type": model_type, **configs[model_type]}))


def manifest(*methods: dict[str, Any], keep: float | None = None, scope: str = "decoder", **fields: Any) -> Manifest:
    """A manifest of flat_llm entries; with no entry, one with its defaults."""
    document = {
        "version": 1,
        "model": {"source": "model"},
        "output": "out",
        "run_dir": "run",
        "budget": None if keep is None else {"keep": keep, "scope": scope},
        "methods": [{"method": "flat_llm", **method} for method in methods or ({},)],
        **fields,
    }
    return Manifest.model_validate(document)
