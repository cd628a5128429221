"""Qwen3: Llama with RMS norms over each query and key head before the rotation."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES

HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}

FAMILY = Family(
    model_type="qwen3",
    block=BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": ATTENTION_BIAS},
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING},
)
