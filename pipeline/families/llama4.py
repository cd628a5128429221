"""The text model of Llama-4: attention within chunks, which is copied, and experts with router-weighted inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lamina.foreign_lamina import CHUNKED_LAYERS
from lamina.mixture_lamina import INPUTS
from pipeline.families.dense import BLOCK, MODULES
from pipeline.families.family import Family
from pipeline.families.foreign import ATTENTION_MODULES, ForeignFamily, copied_attention, size_faults, switch_faults
from pipeline.families.mixture import DOWN, GATE_UP, MIXED, FusedExperts, MixtureFamily
from pipeline.families.moe import ONE_WIDTH, PROJECTIONS

SWITCHES = ("attention_bias", "use_qk_norm", "attn_temperature_tuning")
COUNTS = ("attention_chunk_size", "floor_scale")


def _faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module can be built."""
    return size_faults(fields, COUNTS) + switch_faults(fields, SWITCHES)


LLAMA4 = Family(
    "llama4_text",
    "Llama-4",
    BLOCK
    | {
        "modules": {
            "input_norm": MODULES["input_norm"],
            **{f"{kind}.{name}": f"self_attn.{name}" for kind in CHUNKED_LAYERS for name in ATTENTION_MODULES},
            "mlp_norm": MODULES["mlp_norm"],
            **{role: f"feed_forward.{name}" for role, name in PROJECTIONS.items()},
        },
        "biases": {f"{kind}.{name}": "attention_bias" for kind in CHUNKED_LAYERS for name in ATTENTION_MODULES},
        "foreign": dict.fromkeys(CHUNKED_LAYERS, "self_attn"),
    },
    fields={"intermediate_size": "intermediate_size_mlp"},
    windows=("layer_types",),
    foreign=ForeignFamily(
        "llama4_text", None, "", _faults, {kind: partial(copied_attention, layer_type=kind) for kind in CHUNKED_LAYERS}
    ),
    mixture=MixtureFamily(
        {
            "router": "feed_forward.router",
            "experts": "feed_forward.experts",
            "modules": PROJECTIONS,
            "shared": "feed_forward.shared_expert",
        },
        ONE_WIDTH,
        shared=("intermediate_size",),
        routing={"score": "sigmoid", "renormalise": False, "weighs": INPUTS},
        dense_layers=MIXED,
        fused={
            "feed_forward.experts.gate_up_proj": FusedExperts(GATE_UP, transposed=True),
            "feed_forward.experts.down_proj": FusedExperts(DOWN, transposed=True),
        },
    ),
    unread={"no_rope_layer_interval": "no_rope_layers lists the layers"},
)

FAMILIES = (LLAMA4,)
