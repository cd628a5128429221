"""DeepSeek-V3, with R1 and Kimi-K2: Llama's MLP behind latent attention, which is copied."""

from typing import Any

from pipeline.families.family import TRAINING, Family
from pipeline.families.foreign import LATENT_BIASES, LATENT_MODULES, latent_family
from pipeline.families.llama import BLOCK, MODULES

ATTENTION = ("q", "k", "v", "o")
LAYER = {"input_norm": MODULES["input_norm"], **LATENT_MODULES}
LATENT_BLOCK: dict[str, Any] = BLOCK | {
    "modules": LAYER | {role: path for role, path in MODULES.items() if role not in (*ATTENTION, "input_norm")},
    "biases": LATENT_BIASES,
    "foreign": "self_attn",
}
UNROUTED = "of mixtures of experts, which no layer is"
UNREAD = {
    "attention_dropout": TRAINING,
    "pretraining_tp": "how the products were once cut; nobody reads it",
    **dict.fromkeys(
        (
            "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group",
            "topk_group", "norm_topk_prob", "routed_scaling_factor", "output_router_logits",
        ),
        UNROUTED,
    ),
}  # fmt: skip
EQUAL = {"num_key_value_heads": "num_attention_heads", "first_k_dense_replace": "num_hidden_layers"}
FIELDS = {"num_key_value_heads": "num_attention_heads"}

FAMILY = Family(
    model_type="deepseek_v3",
    block=LATENT_BLOCK,
    fields=FIELDS,
    equal=EQUAL,
    unread=UNREAD | {"num_mtp_layers": "of further predicted tokens, whose layers are left out"},
    foreign=latent_family("deepseek_v3"),
)
