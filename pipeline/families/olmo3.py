"""OLMo 3: OLMo 2 with sliding layers, which may have a different rotation."""

from pipeline.families.family import TRAINING, Family
from pipeline.families.olmo2 import OLMO_BLOCK

FAMILY = Family(
    model_type="olmo3",
    block=OLMO_BLOCK,
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING},
    unlisted=("head_dim",),
)
