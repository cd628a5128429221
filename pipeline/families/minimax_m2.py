"""MiniMax-M2: norms over all queries and all keys, a partial rotation, and mixtures with a sigmoid router."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK, MODULES
from pipeline.families.mixtral import PATHS, SIZES
from pipeline.families.mixture import ROUTING, MixtureFamily
from pipeline.families.qwen3 import HEAD_NORMS

FAMILY = Family(
    model_type="minimax_m2",
    block=BLOCK | {"modules": MODULES | HEAD_NORMS, "head_norms": "all"},
    requires={
        "scoring_func": "sigmoid",
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
    unread={"attention_dropout": TRAINING, "router_jitter_noise": TRAINING, **ROUTING},
    partial_rotary=True,
    mixture=MixtureFamily(
        paths=PATHS | {"score_bias": "block_sparse_moe.e_score_correction_bias"},
        sizes=SIZES,
        routing={"score": "sigmoid"},
    ),
)
