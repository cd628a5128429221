"""DeepSeek-V2: V3 with another rotation, and biases in the MLP where the config asks for them."""

from pipeline.families.deepseek_v3 import EQUAL, FIELDS, LATENT_BLOCK, UNREAD, UNROUTED
from pipeline.families.family import Family
from pipeline.families.foreign import LATENT_BIASES, latent_family

FAMILY = Family(
    model_type="deepseek_v2",
    block=LATENT_BLOCK | {"biases": LATENT_BIASES | dict.fromkeys(("gate", "up", "down"), "mlp_bias")},
    fields=FIELDS,
    equal=EQUAL,
    unread=UNREAD | {"head_dim": "qk_rope_head_dim replaces it", "topk_method": UNROUTED},
    foreign=latent_family("deepseek_v2", even=True),
)
