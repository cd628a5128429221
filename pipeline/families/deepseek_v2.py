"""DeepSeek-V2: V3 with a different rotation and a different router."""

from pipeline.families.deepseek_v3 import EQUAL, GROUPS, LATENT_BLOCK, PATHS, SHARED, SIZES, UNREAD
from pipeline.families.family import Family
from pipeline.families.foreign import latent_family
from pipeline.families.mixture import FIRST_DENSE, MixtureFamily

FAMILY = Family(
    model_type="deepseek_v2",
    block=LATENT_BLOCK,
    fields=EQUAL,
    equal=EQUAL,
    requires={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False},
    unread=UNREAD | {"head_dim": "qk_rope_head_dim replaces it"},
    foreign=latent_family("deepseek_v2", even=True),
    mixture=MixtureFamily(
        paths=PATHS,
        sizes=SIZES,
        shared=SHARED,
        routing={"float_logits": True, "renormalise": False},
        fields=GROUPS,
        group_methods=("topk_method", "greedy", "group_limited_greedy"),
        dense_layers=FIRST_DENSE,
    ),
)
