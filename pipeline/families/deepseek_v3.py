"""DeepSeek-V3, R1 and Kimi-K2: latent attention and mixtures of experts."""

from typing import Any

from pipeline.families.family import TRAINING, Family
from pipeline.families.foreign import LATENT_BIASES, LATENT_MODULES, latent_family
from pipeline.families.llama import BLOCK, MODULES
from pipeline.families.mixture import FIRST_DENSE, MixtureFamily
from pipeline.families.qwen3_moe import EXPERTS, PROJECTIONS

ATTENTION = ("q", "k", "v", "o")
LAYER = {"input_norm": MODULES["input_norm"], **LATENT_MODULES}
LATENT_BLOCK: dict[str, Any] = BLOCK | {
    "modules": LAYER | {role: path for role, path in MODULES.items() if role not in (*ATTENTION, "input_norm")},
    "biases": LATENT_BIASES,
    "foreign": "self_attn",
}
PATHS = {**EXPERTS, "modules": PROJECTIONS, "shared": "mlp.shared_experts"}
SIZES = {"experts": "n_routed_experts", "width": "moe_intermediate_size", "top_k": "num_experts_per_tok"}
SHARED = ("moe_intermediate_size", "n_shared_experts")
GROUPS = {"scale": "routed_scaling_factor", "groups": "n_group", "top_groups": "topk_group"}
SIGMOID = {"score": "sigmoid", "float_logits": True, "group_score": "top2"}
UNREAD = {
    "attention_dropout": TRAINING,
    "pretraining_tp": "an unused setting of parallel products",
    "output_router_logits": "the outputs of a call",
}
EQUAL = {"num_key_value_heads": "num_attention_heads"}

FAMILY = Family(
    model_type="deepseek_v3",
    block=LATENT_BLOCK,
    fields=EQUAL,
    equal=EQUAL,
    requires={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    unread=UNREAD | {"num_mtp_layers": "the layers for further predicted tokens are left out"},
    foreign=latent_family("deepseek_v3"),
    further_layers=True,
    mixture=MixtureFamily(
        paths=PATHS | {"score_bias": "mlp.gate.e_score_correction_bias"},
        sizes=SIZES,
        shared=SHARED,
        routing=SIGMOID,
        fields=GROUPS | {"renormalise": "norm_topk_prob"},
        dense_layers=FIRST_DENSE,
    ),
)
