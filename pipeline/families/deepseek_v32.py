"""DeepSeek-V3.2: V3 with an indexer that chooses the tokens of latent attention; both are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lamina.foreign_lamina import SHARING_LAYERS
from pipeline.families import deepseek_v3
from pipeline.families.blocks import Copied
from pipeline.families.family import TRAINING, Family
from pipeline.families.foreign import (
    LATENT_BIASES,
    LATENT_ROLES,
    SHARED,
    ForeignBlock,
    ForeignFamily,
    latent_attention,
    latent_faults,
    size_faults,
)
from pipeline.families.llama import BLOCK, MODULES
from pipeline.families.mixture import LISTED, MixtureFamily

INDEXED = "indexed_attention"
INDEXER = {f"index_{name}": f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "k_norm", "weights_proj")}
LATENT = {role: f"self_attn.{role}" for role in LATENT_ROLES if role != "q_proj"}
INSIDE = LATENT | INDEXER
INDEXED_BLOCK: dict[str, Any] = BLOCK | {
    "modules": {
        "input_norm": MODULES["input_norm"],
        **{f"{INDEXED}.{role}": path for role, path in INSIDE.items()},
        **{role: MODULES[role] for role in ("mlp_norm", "gate", "up", "down")},
    },
    "biases": {f"{INDEXED}.{role}": field for role, field in LATENT_BIASES.items()},
    "foreign": {INDEXED: "self_attn"},
}


def attention_of_type(sizes: Mapping[str, Any], layer_type: str) -> ForeignBlock:
    """Return latent attention that is copied, with an indexer in layers of type INDEXED."""
    hidden, heads, width = sizes["hidden_size"], sizes["index_n_heads"], sizes["index_head_dim"]
    biased = LATENT_BIASES if sizes["attention_bias"] else ()
    latent = latent_attention({**sizes, "model_type": "deepseek_v3"}, hidden, sizes["num_attention_heads"], biased)
    indexer: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
        "index_wq_b": (("weight", (heads * width, sizes["q_lora_rank"])),),
        "index_wk": (("weight", (width, hidden)),),
        "index_k_norm": (("weight", (width,)), ("bias", (width,))),
        "index_weights_proj": (("weight", (heads, hidden)),),
    }
    own = indexer.items() if layer_type == INDEXED else ()
    copied = (*latent.copied, *(Copied(role, shapes) for role, shapes in own))
    return replace(
        latent,
        block=None,
        copied=tuple(replace(each, role=f"{layer_type}.{each.role}", reads="") for each in copied),
        scores=tuple(f"{layer_type}.{role}" for role in latent.scores),
        cache_numbers=SHARING_LAYERS[layer_type].cache_numbers(sizes),
    )


def _faults(fields: Mapping[str, Any]) -> list[str]:
    sizes = ("q_lora_rank", "index_topk", "index_head_dim", "index_n_heads")
    faults = latent_faults({name: fields[name] for name in fields if name != "q_lora_rank"} | {"q_lora_rank": None})
    faults += size_faults(fields, sizes)
    kinds = fields.get("indexer_types") or ["full"]
    if {*kinds} - {"full", SHARED} or kinds[0] != "full":
        faults.append(f"indexer_types: {kinds!r:.80}; known are full and {SHARED}, of which the first layer is full")
    if not faults and fields["index_head_dim"] < fields["qk_rope_head_dim"]:
        faults.append(f"index_head_dim: {fields['index_head_dim']} is below qk_rope_head_dim")
    return faults


def indexed_family(model_type: str) -> Family:
    """Return a family with V3's mixtures and latent attention with an indexer."""
    mixture = deepseek_v3.FAMILY.mixture
    layers = {INDEXED: partial(attention_of_type, layer_type=INDEXED)}
    assert isinstance(mixture, MixtureFamily)
    return replace(
        deepseek_v3.FAMILY,
        model_type=model_type,
        block=INDEXED_BLOCK,
        requires={**deepseek_v3.FAMILY.requires, "mlp_bias": False},
        unread={
            "attention_dropout": TRAINING,
            "output_router_logits": "the outputs of a call",
            "head_dim": "qk_rope_head_dim replaces it",
            "layer_types": "all layers have an indexer",
        },
        foreign=ForeignFamily(model_type, None, "qk_rope_head_dim", _faults, layers),
        mixture=replace(mixture, dense_layers=LISTED),
    )


FAMILY = indexed_family("deepseek_v32")
