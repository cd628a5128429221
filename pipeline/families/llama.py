"""Llama: RMSNorm, rotary halves, gated MLP; biases where the config asks for them."""

from pipeline.families.family import Family

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
ATTENTION_BIAS = dict.fromkeys(("q", "k", "v", "o"), "attention_bias")

FAMILY = Family(
    model_type="llama",
    modules=MODULES,
    biases=ATTENTION_BIAS | dict.fromkeys(("gate", "up", "down"), "mlp_bias"),
)
