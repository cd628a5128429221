"""Command-R: attention and a gated MLP in parallel after one LayerNorm without bias; scaled logits."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES

COHERE_BLOCK = BLOCK | {
    "modules": {role: path for role, path in MODULES.items() if role != "mlp_norm"},
    "biases": ATTENTION_BIAS,
    "norm": "layer",
    "norm_bias": False,
    "rotary": "interleaved",
    "parallel": True,
}

FAMILY = Family(
    model_type="cohere",
    block=COHERE_BLOCK,
    settings={"logit_scale": "logit_scale"},
    fields={"norm_eps": "layer_norm_eps"},
    requires={"use_qk_norm": False},
    unread={"attention_dropout": TRAINING},
    unlisted=("head_dim",),
)
