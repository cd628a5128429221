"""GLM-4.5 to 4.7: grouped attention with a partial rotation, and DeepSeek-V3's mixtures."""

from pipeline.families import deepseek_v3
from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK, MODULES
from pipeline.families.qwen3 import HEAD_NORMS

FAMILY = Family(
    model_type="glm4_moe",
    block=BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": dict.fromkeys(("q", "k", "v"), "attention_bias")},
    optional=dict.fromkeys(HEAD_NORMS, "use_qk_norm"),
    unread={
        "attention_dropout": TRAINING,
        "output_router_logits": "the outputs of a call",
        "num_mtp_layers": "the layers for further predicted tokens are left out",
    },
    unlisted=("head_dim",),
    partial_rotary=True,
    further_layers=True,
    mixture=deepseek_v3.FAMILY.mixture,
)
