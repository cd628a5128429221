"""dots.llm1: the attention of Qwen3, some of it with sliding windows, and DeepSeek-V3's mixtures."""

from pipeline.families import deepseek_v3
from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES
from pipeline.families.qwen3 import HEAD_NORMS

FAMILY = Family(
    model_type="dots1",
    block=BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": ATTENTION_BIAS},
    windows=("sliding_window", "layer_types"),
    mixture=deepseek_v3.FAMILY.mixture,
    unread={"attention_dropout": TRAINING, "output_router_logits": "the outputs of a call"},
    unlisted=("head_dim",),
)
