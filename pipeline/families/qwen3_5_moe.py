"""The text model of Qwen3.5 with a mixture of experts in every layer."""

from dataclasses import replace

from pipeline.families import qwen3_next
from pipeline.families.delta import delta_family, hybrid_block, readers_apart
from pipeline.families.family import TRAINING, Family
from pipeline.families.mixture import EVERY_LAYER, GATE_UP, ROUTING, FusedExperts

mixture = qwen3_next.FAMILY.mixture
assert mixture is not None

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    block=hybrid_block(readers_apart),
    fields={"intermediate_size": "moe_intermediate_size"},
    foreign=delta_family("qwen3_5_moe_text", readers_apart),
    windows=("layer_types",),
    partial_rotary=True,
    mixture=replace(
        mixture,
        fields={},
        dense_layers=EVERY_LAYER,
        fused={
            "mlp.experts.gate_up_proj": FusedExperts(GATE_UP),
            "mlp.experts.down_proj": FusedExperts(("down",)),
        },
    ),
    unread={"attention_dropout": TRAINING, **ROUTING},
)
