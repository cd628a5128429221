"""The text model of Qwen3.5: Qwen3-Next's attention with other matrices, and a dense MLP."""

from pipeline.families.delta import delta_family, hybrid_block, readers_apart
from pipeline.families.family import TRAINING, Family

FAMILY = Family(
    model_type="qwen3_5_text",
    block=hybrid_block(readers_apart),
    foreign=delta_family("qwen3_5_text", readers_apart),
    windows=("layer_types",),
    partial_rotary=True,
    unread={"attention_dropout": TRAINING},
)
