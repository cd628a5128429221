"""Decoders with mixtures of experts, whose attention is that of dense decoders."""

from dataclasses import replace

from pipeline.families.dense import (
    ATTENTION_BIAS,
    BLOCK,
    GRANITE_SETTINGS,
    HEAD_NORMS,
    MODULES,
    QKV,
    QKV_BIAS,
    QWEN3_BLOCK,
    WINDOW,
    WINDOWS,
)
from pipeline.families.family import Family
from pipeline.families.mixture import (
    DOWN,
    EVERY_LAYER,
    FIRST_DENSE,
    GATE_UP,
    SPARSE_STEP,
    FusedExperts,
    MixtureFamily,
)

PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PATHS = {"router": "mlp.gate", "experts": "mlp.experts", "modules": PROJECTIONS}
SIZES = {"experts": "num_experts", "width": "moe_intermediate_size", "top_k": "num_experts_per_tok"}
ONE_WIDTH = {"experts": "num_local_experts", "width": "intermediate_size", "top_k": "num_experts_per_tok"}
RENORMALISE = {"renormalise": "norm_topk_prob"}

MIXTRAL_PATHS = {
    "router": "block_sparse_moe.gate",
    "experts": "block_sparse_moe.experts",
    "modules": {"gate": "w1", "up": "w3", "down": "w2"},
}
QWEN2_MIXTURE = MixtureFamily(
    PATHS | {"shared": "mlp.shared_expert", "shared_gate": "mlp.shared_expert_gate"},
    SIZES,
    shared=("shared_expert_intermediate_size",),
    fields=RENORMALISE,
    dense_layers=SPARSE_STEP,
)
# DeepSeek's: experts are chosen from the best groups; the shared expert is as wide as n_shared_experts of the others.
DEEPSEEK_PATHS = PATHS | {"shared": "mlp.shared_experts"}
DEEPSEEK_SIZES = SIZES | {"experts": "n_routed_experts"}
DEEPSEEK_SHARED = ("moe_intermediate_size", "n_shared_experts")
GROUPS = {"scale": "routed_scaling_factor", "groups": "n_group", "top_groups": "topk_group"}
SIGMOID = {"score": "sigmoid", "float_logits": True, "group_score": "top2"}
V3_MIXTURE = MixtureFamily(
    DEEPSEEK_PATHS | {"score_bias": "mlp.gate.e_score_correction_bias"},
    DEEPSEEK_SIZES,
    shared=DEEPSEEK_SHARED,
    routing=SIGMOID,
    fields=GROUPS | RENORMALISE,
    dense_layers=FIRST_DENSE,
)
FURTHER_TOKENS = {"num_mtp_layers": "the layers for further predicted tokens are left out"}
NO_WINDOWS = "use_sliding_window is false"

FAMILIES = (
    Family(
        "mixtral",
        "Mixtral",
        BLOCK,
        windows=WINDOW,
        mixture=MixtureFamily(MIXTRAL_PATHS, ONE_WIDTH),
    ),
    # Mixtures in some layers, with a gated shared expert.
    Family(
        "qwen2_moe",
        "Qwen2-MoE",
        BLOCK | {"biases": dict.fromkeys(QKV, "qkv_bias")},
        requires={"use_sliding_window": False},
        unread=dict.fromkeys(("sliding_window", "max_window_layers", "layer_types"), NO_WINDOWS),
        mixture=QWEN2_MIXTURE,
    ),
    Family(
        "qwen3_moe",
        "Qwen3-MoE",
        QWEN3_BLOCK,
        requires={"use_sliding_window": False},
        unread={"sliding_window": NO_WINDOWS},
        mixture=MixtureFamily(PATHS, SIZES, fields=RENORMALISE, dense_layers=SPARSE_STEP),
    ),
    # Partial rotation, optional norms of heads.
    Family(
        "glm4_moe",
        "GLM-4.5",
        BLOCK | {"modules": MODULES | HEAD_NORMS, "biases": QKV_BIAS},
        optional=dict.fromkeys(HEAD_NORMS, "use_qk_norm"),
        unread=FURTHER_TOKENS,
        partial_rotary=True,
        further_layers=True,
        mixture=V3_MIXTURE,
    ),
    Family("dots1", "dots.llm1", QWEN3_BLOCK, windows=WINDOWS, mixture=V3_MIXTURE),
    Family(
        "solar_open",
        "Solar Open",
        BLOCK | {"biases": QKV_BIAS},
        fields={"intermediate_size": "moe_intermediate_size"},
        mixture=replace(V3_MIXTURE, dense_layers=EVERY_LAYER),
    ),
    # Norms of all queries and all keys together, partial rotation.
    Family(
        "minimax_m2",
        "MiniMax-M2",
        BLOCK | {"modules": MODULES | HEAD_NORMS, "head_norms": "all"},
        requires={
            "scoring_func": "sigmoid",
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
        },
        partial_rotary=True,
        mixture=MixtureFamily(
            MIXTRAL_PATHS | {"score_bias": "block_sparse_moe.e_score_correction_bias"},
            ONE_WIDTH,
            routing={"score": "sigmoid"},
        ),
    ),
    # Attention sinks; experts with biases and clamped channels, all of a layer in one tensor.
    Family(
        "gpt_oss",
        "gpt-oss",
        BLOCK | {"modules": MODULES | {"sinks": "self_attn"}, "biases": ATTENTION_BIAS},
        settings={"glu_alpha": "swiglu_alpha", "glu_limit": "swiglu_limit"},
        windows=WINDOWS,
        mixture=MixtureFamily(
            PATHS | {"router": "mlp.router"},
            ONE_WIDTH,
            routing={"biases": True, "logit_bias": True},
            fused={
                "mlp.experts.gate_up_proj": FusedExperts(GATE_UP, transposed=True, interleaved=True),
                "mlp.experts.gate_up_proj_bias": FusedExperts(GATE_UP, "bias", interleaved=True),
                "mlp.experts.down_proj": FusedExperts(DOWN, transposed=True),
                "mlp.experts.down_proj_bias": FusedExperts(DOWN, "bias"),
            },
        ),
    ),
    # Granite, with all experts of a layer in one tensor.
    Family(
        "granitemoe",
        "Granite-MoE",
        BLOCK | {"biases": ATTENTION_BIAS},
        settings=GRANITE_SETTINGS,
        mixture=MixtureFamily(
            {
                "router": "block_sparse_moe.router.layer",
                "experts": "block_sparse_moe.experts",
                "modules": PROJECTIONS,
            },
            ONE_WIDTH,
            fused={
                "block_sparse_moe.input_linear.weight": FusedExperts(GATE_UP),
                "block_sparse_moe.output_linear.weight": FusedExperts(DOWN),
            },
        ),
    ),
    # Norms of heads after the rotation; a shared expert as wide as the others.
    Family(
        "hunyuan_v1_moe",
        "Hunyuan-MoE",
        BLOCK
        | {
            "modules": MODULES | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
            "biases": ATTENTION_BIAS,
            "head_norms": "rotated",
        },
        unread=dict.fromkeys(("eod_token_id", "sep_token_id"), "a token of the tokenizer"),
        mixture=MixtureFamily(
            PATHS | {"router": "mlp.gate.wg", "shared": "mlp.shared_mlp"},
            {"experts": "num_experts", "width": "intermediate_size", "top_k": "moe_topk"},
            shared=("intermediate_size",),
            routing={"float_logits": True},
        ),
    ),
)
