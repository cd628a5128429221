"""The text model of Llama-4: attention within chunks, which is copied, and experts with router-weighted inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lamina.foreign_lamina import CHUNKED_LAYERS
from lamina.mixture_lamina import INPUTS
from pipeline.families.blocks import Copied
from pipeline.families.family import TRAINING, Family
from pipeline.families.foreign import ForeignBlock, ForeignFamily, size_faults, switch_faults
from pipeline.families.llama import BLOCK, MODULES
from pipeline.families.mixture import GATE_UP, MIXED, ROUTING, FusedExperts, MixtureFamily
from pipeline.families.qwen3_moe import PROJECTIONS

HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = {role: f"feed_forward.{name}" for role, name in PROJECTIONS.items()}
SWITCHES = ("attention_bias", "use_qk_norm", "attn_temperature_tuning")
COUNTS = ("attention_chunk_size", "floor_scale")


def _attention(sizes: Mapping[str, Any], layer_type: str) -> ForeignBlock:
    """Return grouped attention, whose norms of heads have no weights."""
    hidden, head_dim = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = (sizes[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    rows = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    copied = tuple(
        Copied(
            f"{layer_type}.{name}",
            (("weight", shape), *([("bias", shape[:1])] if sizes["attention_bias"] else [])),
        )
        for name, shape in rows.items()
    )
    scores = tuple(f"{layer_type}.{name}" for name in HEADS[:2])
    return ForeignBlock(None, copied, scores, sizes["num_attention_heads"], queries, 2 * keys)


def _faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module can be built."""
    return size_faults(fields, COUNTS) + switch_faults(fields, SWITCHES)


FAMILY = Family(
    model_type="llama4_text",
    block=BLOCK
    | {
        "modules": {
            "input_norm": MODULES["input_norm"],
            **{f"{kind}.{name}": f"self_attn.{name}" for kind in CHUNKED_LAYERS for name in HEADS},
            "mlp_norm": MODULES["mlp_norm"],
            **MLP,
        },
        "biases": {f"{kind}.{name}": "attention_bias" for kind in CHUNKED_LAYERS for name in HEADS},
        "foreign": dict.fromkeys(CHUNKED_LAYERS, "self_attn"),
    },
    fields={"intermediate_size": "intermediate_size_mlp"},
    windows=("layer_types",),
    foreign=ForeignFamily(
        "llama4_text", None, "", _faults, {kind: partial(_attention, layer_type=kind) for kind in CHUNKED_LAYERS}
    ),
    mixture=MixtureFamily(
        paths={
            "router": "feed_forward.router",
            "experts": "feed_forward.experts",
            "modules": PROJECTIONS,
            "shared": "feed_forward.shared_expert",
        },
        sizes={"experts": "num_local_experts", "width": "intermediate_size", "top_k": "num_experts_per_tok"},
        shared=("intermediate_size",),
        routing={"score": "sigmoid", "renormalise": False, "weighs": INPUTS},
        dense_layers=MIXED,
        fused={
            "feed_forward.experts.gate_up_proj": FusedExperts(GATE_UP, transposed=True),
            "feed_forward.experts.down_proj": FusedExperts(("down",), transposed=True),
        },
    ),
    unread={
        "attention_dropout": TRAINING,
        "router_jitter_noise": TRAINING,
        "no_rope_layer_interval": "no_rope_layers lists the layers",
        **ROUTING,
    },
)
