"""Llama: RMSNorm, rotary halves, gated MLP; optional biases."""

from typing import Any

from pipeline.families.family import TRAINING, Family

MODULES = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
BLOCK: dict[str, Any] = {
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "final_norm": "model.norm",
    "head": "lm_head",
    "head_bias": False,
    "modules": MODULES,
    "biases": {},
    "norm": "rms",
    "rotary": "half",
    "positions": None,
    "parallel": False,
}
ATTENTION_BIAS = dict.fromkeys(("q", "k", "v", "o"), "attention_bias")

FAMILY = Family(
    model_type="llama",
    block=BLOCK | {"biases": ATTENTION_BIAS | dict.fromkeys(("gate", "up", "down"), "mlp_bias")},
    unread={"attention_dropout": TRAINING, "pretraining_tp": "an unused setting of parallel products"},
)
