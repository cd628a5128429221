"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES
from pipeline.families.mixture import ROUTING, SPARSE_STEP, MixtureFamily
from pipeline.families.qwen3 import HEAD_NORMS

EXPERTS = {"router": "mlp.gate", "experts": "mlp.experts"}
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SIZES = {"experts": "num_experts", "width": "moe_intermediate_size", "top_k": "num_experts_per_tok"}

FAMILY = Family(
    model_type="qwen3_moe",
    block=BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": ATTENTION_BIAS},
    requires={"use_sliding_window": False},
    mixture=MixtureFamily(
        paths={**EXPERTS, "modules": PROJECTIONS},
        sizes=SIZES,
        fields={"renormalise": "norm_topk_prob"},
        dense_layers=SPARSE_STEP,
    ),
    unread={"attention_dropout": TRAINING, "sliding_window": "use_sliding_window is false", **ROUTING},
    unlisted=("head_dim",),
)
