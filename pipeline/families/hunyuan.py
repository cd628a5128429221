"""Hunyuan-MoE: norms of heads after the rotation; mixtures with a shared expert as wide as the others."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK, MODULES
from pipeline.families.mixture import ROUTING, MixtureFamily
from pipeline.families.qwen3_moe import PROJECTIONS

HEAD_NORMS = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}

FAMILY = Family(
    model_type="hunyuan_v1_moe",
    block=BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": ATTENTION_BIAS, "head_norms": "rotated"},
    mixture=MixtureFamily(
        paths={
            "router": "mlp.gate.wg",
            "experts": "mlp.experts",
            "modules": PROJECTIONS,
            "shared": "mlp.shared_mlp",
        },
        sizes={"experts": "num_experts", "width": "intermediate_size", "top_k": "moe_topk"},
        shared=("intermediate_size",),
        routing={"float_logits": True},
    ),
    unread={
        "attention_dropout": TRAINING,
        "pretraining_tp": "an unused setting of parallel products",
        "eod_token_id": "a token of the tokenizer",
        "sep_token_id": "a token of the tokenizer",
        "output_router_logits": ROUTING["output_router_logits"],
    },
)
