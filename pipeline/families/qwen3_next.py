"""Qwen3-Next: gated delta networks and gated attention, which are copied, and Qwen2-MoE's mixtures."""

from pipeline.families import qwen2_moe
from pipeline.families.delta import delta_family, hybrid_block, readers_of_next
from pipeline.families.family import TRAINING, Family
from pipeline.families.mixture import ROUTING

FAMILY = Family(
    model_type="qwen3_next",
    block=hybrid_block(readers_of_next),
    foreign=delta_family("qwen3_next", readers_of_next),
    windows=("layer_types",),
    partial_rotary=True,
    mixture=qwen2_moe.FAMILY.mixture,
    unread={"attention_dropout": TRAINING, **ROUTING},
)
