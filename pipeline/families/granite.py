"""Granite: Llama with four multipliers: of embeddings, attention scores, the outputs of both halves, and logits."""

from pipeline.families import llama
from pipeline.families.family import TRAINING, Family

FAMILY = Family(
    model_type="granite",
    block=llama.FAMILY.block,
    settings={
        "embed_scale": "embedding_multiplier",
        "attention_scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_divisor": "logits_scaling",
    },
    unread={"attention_dropout": TRAINING},
    unlisted=("head_dim",),
)
