"""Qwen2: Llama with biases on q, k and v."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK

FAMILY = Family(
    model_type="qwen2",
    block=BLOCK | {"biases": dict.fromkeys(("q", "k", "v"), True)},
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING},
    unlisted=("head_dim",),
)
