"""GLM-4.5 to 4.7: grouped attention with a partial rotation, and DeepSeek-V3's mixtures."""

from pipeline.families.deepseek_v3 import GROUPS, PATHS, SHARED, SIGMOID, SIZES
from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK, MODULES
from pipeline.families.mixture import FIRST_DENSE, MixtureFamily
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
    mixture=MixtureFamily(
        paths=PATHS | {"score_bias": "mlp.gate.e_score_correction_bias"},
        sizes=SIZES,
        shared=SHARED,
        routing=SIGMOID,
        fields=GROUPS | {"renormalise": "norm_topk_prob"},
        dense_layers=FIRST_DENSE,
    ),
)
