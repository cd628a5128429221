"""SmolLM3: Llama without rotation of queries and keys in some layers."""

from pipeline.families import llama
from pipeline.families.family import TRAINING, Family

FAMILY = Family(
    model_type="smollm3",
    block=llama.FAMILY.block,
    settings={"rotary_layers": "no_rope_layers"},
    windows=("sliding_window", "layer_types"),
    unread={"attention_dropout": TRAINING, "no_rope_layer_interval": "the default of no_rope_layers follows from it"},
    unlisted=("head_dim",),
)
