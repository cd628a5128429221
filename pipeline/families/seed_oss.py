"""Seed-OSS: Llama whose output projection has a bias of its own switch."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK

FAMILY = Family(
    model_type="seed_oss",
    block=BLOCK
    | {"biases": ATTENTION_BIAS | {"o": "attention_out_bias"} | dict.fromkeys(("gate", "up", "down"), "mlp_bias")},
    unread={
        "attention_dropout": TRAINING,
        "residual_dropout": TRAINING,
        "pretraining_tp": "an unused setting of parallel products",
    },
)
