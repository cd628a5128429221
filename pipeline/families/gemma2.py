"""Gemma 2: norms before and after each half, 1 + weight; soft-capped scores and logits; every other layer slides."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES

FOUR_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
GEMMA_BLOCK = BLOCK | {
    "modules": MODULES | FOUR_NORMS,
    "biases": ATTENTION_BIAS,
    "embed_scale": "sqrt(hidden_size)",
    "norm_offset": 1.0,
}

FAMILY = Family(
    model_type="gemma2",
    block=GEMMA_BLOCK,
    settings={
        "query_scalar": "query_pre_attn_scalar",
        "attention_softcap": "attn_logit_softcapping",
        "logit_softcap": "final_logit_softcapping",
    },
    fields={"hidden_act": "hidden_activation"},
    requires={"use_bidirectional_attention": None},
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING},
)
