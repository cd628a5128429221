"""Command-A and Command-R7B: Command-R with rotation of queries and keys only in the sliding layers."""

from pipeline.families.cohere import COHERE_BLOCK
from pipeline.families.family import TRAINING, Family

FAMILY = Family(
    model_type="cohere2",
    block=COHERE_BLOCK | {"rotary_layers": "sliding_attention"},
    settings={"logit_scale": "logit_scale"},
    fields={"norm_eps": "layer_norm_eps"},
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING},
    unlisted=("head_dim",),
)
