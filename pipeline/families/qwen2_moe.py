"""Qwen2-MoE: Qwen2 with a mixture of experts in some layers, and a gated shared expert."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK
from pipeline.families.mixture import ROUTING, SPARSE_STEP, MixtureFamily
from pipeline.families.qwen3_moe import EXPERTS, PROJECTIONS, SIZES

WINDOWS = "use_sliding_window is false"

FAMILY = Family(
    model_type="qwen2_moe",
    block=BLOCK | {"biases": dict.fromkeys(("q", "k", "v"), "qkv_bias")},
    requires={"use_sliding_window": False},
    mixture=MixtureFamily(
        paths={
            **EXPERTS,
            "modules": PROJECTIONS,
            "shared": "mlp.shared_expert",
            "shared_gate": "mlp.shared_expert_gate",
        },
        sizes=SIZES,
        shared=("shared_expert_intermediate_size",),
        fields={"renormalise": "norm_topk_prob"},
        dense_layers=SPARSE_STEP,
    ),
    unread={
        "attention_dropout": TRAINING,
        **dict.fromkeys(("sliding_window", "max_window_layers", "layer_types"), WINDOWS),
        **ROUTING,
    },
    unlisted=("head_dim",),
)
