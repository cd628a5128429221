"""Llama, and dense decoders as their differences from it.

`lamina.block_lamina` lists the keys of a block, `Family` the other fields.
"""

from typing import Any

from lamina.block_lamina import DEFAULT_BLOCK
from pipeline.families.family import Family

MODULES: dict[str, str] = DEFAULT_BLOCK["modules"]
BLOCK: dict[str, Any] = DEFAULT_BLOCK | {"head_bias": False, "biases": {}, "positions": None, "parallel": False}
QKV, QKVO, MLP = ("q", "k", "v"), ("q", "k", "v", "o"), ("gate", "up", "down")
QKV_BIAS, ATTENTION_BIAS = (dict.fromkeys(roles, "attention_bias") for roles in (QKV, QKVO))
MLP_BIAS = dict.fromkeys(MLP, "mlp_bias")
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
# Norms of the outputs of attention and MLP: besides those of their inputs, or instead of them.
GEMMA_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
GLM_NORMS = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}
OLMO_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
NO_NORMS = {role: path for role, path in MODULES.items() if not role.endswith("norm")}
NO_MLP_NORM = {role: path for role, path in MODULES.items() if role != "mlp_norm"}
MLP_HALF = {role: MODULES[role] for role in ("mlp_norm", *MLP)}
NO_MLP = {role: path for role, path in MODULES.items() if role not in MLP}
FUSED_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": QKV}
FUSED_MLP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("gate", "up")}
WINDOW, WINDOWS = ("sliding_window",), ("sliding_window", "layer_types")

LLAMA_BLOCK = BLOCK | {"biases": ATTENTION_BIAS | MLP_BIAS}
QWEN3_BLOCK = BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": ATTENTION_BIAS}
GEMMA_BLOCK = BLOCK | {
    "modules": MODULES | GEMMA_NORMS,
    "biases": ATTENTION_BIAS,
    "embed_scale": "sqrt(hidden_size)",
    "norm_offset": 1.0,
}
GEMMA_SETTINGS = {"query_scalar": "query_pre_attn_scalar", "logit_softcap": "final_logit_softcapping"}
OLMO_BLOCK = BLOCK | {"modules": NO_NORMS | OLMO_NORMS | HEAD_NORMS, "biases": ATTENTION_BIAS, "head_norms": "all"}
GRANITE_SETTINGS = {
    "embed_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}
GLM_BLOCK = BLOCK | {"biases": QKV_BIAS, "rotary": "interleaved"}
COHERE_BLOCK = BLOCK | {
    "modules": NO_MLP_NORM,
    "biases": ATTENTION_BIAS,
    "norm": "layer",
    "norm_bias": False,
    "rotary": "interleaved",
    "parallel": True,
}
COHERE_SETTINGS, COHERE_FIELDS = {"logit_scale": "logit_scale"}, {"norm_eps": "layer_norm_eps"}

FAMILIES = (
    Family("llama", "Llama", LLAMA_BLOCK),
    # With layer types, transformers loads it as another family, ministral.
    Family("mistral", "Mistral", BLOCK, windows=WINDOW, requires={"layer_types": None}),
    Family("qwen2", "Qwen2", BLOCK | {"biases": dict.fromkeys(QKV, True)}, windows=WINDOWS),
    # Norms of each query and key head before the rotation.
    Family("qwen3", "Qwen3", QWEN3_BLOCK, windows=WINDOWS),
    # Norms before and after each half, which multiply by 1 + weight; soft-capped scores and logits.
    Family(
        "gemma2",
        "Gemma 2",
        GEMMA_BLOCK,
        settings=GEMMA_SETTINGS | {"attention_softcap": "attn_logit_softcapping"},
        fields={"hidden_act": "hidden_activation"},
        requires={"use_bidirectional_attention": None},
        windows=WINDOWS,
    ),
    # Gemma 2 with norms of heads, a rotation for each layer type, and no capped scores.
    Family(
        "gemma3_text",
        "Gemma 3",
        GEMMA_BLOCK | {"modules": GEMMA_BLOCK["modules"] | HEAD_NORMS},
        settings=GEMMA_SETTINGS,
        fields={"hidden_act": "hidden_activation"},
        requires={"use_bidirectional_attention": False},
        unread={"attn_logit_softcapping": "the model caps no scores"},
        windows=WINDOWS,
    ),
    # Norms after each half instead of before it, and of all queries and all keys together.
    Family("olmo2", "OLMo 2", OLMO_BLOCK),
    Family("olmo3", "OLMo 3", OLMO_BLOCK, windows=WINDOWS),  # sliding layers may have a rotation of their own
    # Multipliers of embeddings, attention scores, the outputs of both halves, and logits.
    Family("granite", "Granite", LLAMA_BLOCK, settings=GRANITE_SETTINGS),
    # Some layers do not rotate queries and keys.
    Family(
        "smollm3",
        "SmolLM3",
        LLAMA_BLOCK,
        settings={"rotary_layers": "no_rope_layers"},
        unread={"no_rope_layer_interval": "the default of no_rope_layers follows from it"},
        windows=WINDOWS,
    ),
    # One tensor for q, k and v, another for gate and up.
    Family("phi3", "Phi-3, Phi-4", BLOCK, fused=FUSED_QKV | FUSED_MLP, partial_rotary=True, windows=WINDOW),
    Family("glm", "GLM-4 (2024)", GLM_BLOCK, fused=FUSED_MLP, partial_rotary=True),
    # GLM with norms after each half besides those before it.
    Family("glm4", "GLM-4 (2025)", GLM_BLOCK | {"modules": MODULES | GLM_NORMS}, fused=FUSED_MLP, partial_rotary=True),
    # LayerNorms, an MLP without gate.
    Family(
        "starcoder2",
        "StarCoder2",
        BLOCK
        | {
            "modules": NO_MLP | {"up": "mlp.c_fc", "down": "mlp.c_proj"},
            "biases": dict.fromkeys((*QKVO, "up", "down"), "use_bias"),
            "norm": "layer",
        },
        fields={"norm_eps": "norm_epsilon"},
        windows=WINDOW,
    ),
    # Attention and MLP in parallel after one LayerNorm without bias.
    Family(
        "cohere",
        "Command-R",
        COHERE_BLOCK,
        settings=COHERE_SETTINGS,
        fields=COHERE_FIELDS,
        requires={"use_qk_norm": False},
    ),
    # Only the sliding layers rotate queries and keys.
    Family(
        "cohere2",
        "Command-A",
        COHERE_BLOCK | {"rotary_layers": "sliding_attention"},
        settings=COHERE_SETTINGS,
        fields=COHERE_FIELDS,
        windows=WINDOWS,
    ),
    # The output projection's bias has a switch of its own.
    Family("seed_oss", "Seed-OSS", BLOCK | {"biases": QKV_BIAS | {"o": "attention_out_bias"} | MLP_BIAS}),
    # One switch for all biases.
    Family(
        "ernie4_5",
        "ERNIE 4.5",
        BLOCK | {"biases": dict.fromkeys((*QKVO, *MLP), "use_bias"), "rotary": "interleaved"},
    ),
)
