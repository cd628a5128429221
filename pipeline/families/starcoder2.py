"""StarCoder2: LayerNorm, rotary halves, an MLP without gate, biases everywhere or nowhere."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import BLOCK, MODULES

KEPT = {role: path for role, path in MODULES.items() if role not in ("gate", "up", "down")}

FAMILY = Family(
    model_type="starcoder2",
    block=BLOCK
    | {
        "modules": KEPT | {"up": "mlp.c_fc", "down": "mlp.c_proj"},
        "biases": dict.fromkeys(("q", "k", "v", "o", "up", "down"), "use_bias"),
        "norm": "layer",
    },
    fields={"norm_eps": "norm_epsilon"},
    windows=("sliding_window",),
    unread=dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), TRAINING),
    unlisted=("head_dim",),
)
