"""Decoders with DeepSeek's latent attention, most of them with its mixtures of experts.

In DeepSeek-V3.2 and GLM-5 an indexer chooses the tokens to attend to. Both it and their latent attention are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lamina.block_lamina import FULL, INDEXED
from pipeline.families.dense import BLOCK, MLP_HALF, MODULES
from pipeline.families.family import Family
from pipeline.families.foreign import (
    LATENT_BIASES,
    LATENT_MODULES,
    LATENT_ROLES,
    SHARED,
    ForeignBlock,
    ForeignFamily,
    copied_latent_attention,
    copied_modules,
    latent_family,
    latent_faults,
    size_faults,
)
from pipeline.families.mixture import FIRST_DENSE, LISTED, MixtureFamily
from pipeline.families.moe import (
    DEEPSEEK_PATHS,
    DEEPSEEK_SHARED,
    DEEPSEEK_SIZES,
    FURTHER_TOKENS,
    GROUPS,
    V3_MIXTURE,
)

LATENT_BLOCK: dict[str, Any] = BLOCK | {
    "modules": {"input_norm": MODULES["input_norm"], **LATENT_MODULES, **MLP_HALF},
    "biases": LATENT_BIASES,
    "foreign": "self_attn",
}
ALL_HEADS = {"num_key_value_heads": "num_attention_heads"}
OTHER_HEAD_DIM = {"head_dim": "qk_rope_head_dim replaces it"}
V3_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
V2_ROUTER = {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1}

INDEXER = {f"index_{name}": f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "k_norm", "weights_proj")}
LATENT = {role: f"self_attn.{role}" for role in LATENT_ROLES if role != "q_proj"}
INDEXED_BLOCK: dict[str, Any] = BLOCK | {
    "modules": {
        "input_norm": MODULES["input_norm"],
        **{f"{INDEXED}.{role}": path for role, path in (LATENT | INDEXER).items()},
        **MLP_HALF,
    },
    "biases": {f"{INDEXED}.{role}": field for role, field in LATENT_BIASES.items()},
    "foreign": {INDEXED: "self_attn"},
}
SHARING_BLOCK = INDEXED_BLOCK | {
    "modules": INDEXED_BLOCK["modules"] | {f"{FULL}.{role}": path for role, path in LATENT.items()},
    "biases": INDEXED_BLOCK["biases"] | {f"{FULL}.{role}": field for role, field in LATENT_BIASES.items()},
    "foreign": {INDEXED: "self_attn", FULL: "self_attn"},
}


def _attention_of_type(sizes: Mapping[str, Any], layer_type: str) -> ForeignBlock:
    """Return latent attention that is copied, with an indexer in layers of type INDEXED."""
    latent = copied_latent_attention(sizes, layer_type)
    hidden, heads, width = sizes["hidden_size"], sizes["index_n_heads"], sizes["index_head_dim"]
    indexer: dict[str, tuple[int, ...]] = {
        "index_wq_b": (heads * width, sizes["q_lora_rank"]),
        "index_wk": (width, hidden),
        "index_k_norm": (width,),
        "index_weights_proj": (heads, hidden),
    }
    own = copied_modules(layer_type, indexer, ("index_k_norm",)) if layer_type == INDEXED else ()
    return replace(latent, copied=(*latent.copied, *own))


def _index_faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no latent attention with an indexer can be built."""
    sizes = ("q_lora_rank", "index_topk", "index_head_dim", "index_n_heads")
    faults = latent_faults({name: fields[name] for name in fields if name != "q_lora_rank"} | {"q_lora_rank": None})
    faults += size_faults(fields, sizes)
    kinds = fields.get("indexer_types") or ["full"]
    if {*kinds} - {"full", SHARED} or kinds[0] != "full":
        faults.append(f"indexer_types: {kinds!r:.80}; known are full and {SHARED}, of which the first layer is full")
    if not faults and fields["index_head_dim"] < fields["qk_rope_head_dim"]:
        faults.append(f"index_head_dim: {fields['index_head_dim']} is below qk_rope_head_dim")
    return faults


V3 = Family(
    "deepseek_v3",  # also R1 and Kimi-K2
    "DeepSeek-V3",
    LATENT_BLOCK,
    fields=ALL_HEADS,
    equal=ALL_HEADS,
    requires=V3_ROUTER,
    unread=FURTHER_TOKENS,
    foreign=latent_family("deepseek_v3"),
    further_layers=True,
    mixture=V3_MIXTURE,
)
V32 = replace(
    V3,
    model_type="deepseek_v32",
    name="DeepSeek-V3.2",
    block=INDEXED_BLOCK,
    requires=V3_ROUTER | {"mlp_bias": False},
    unread=OTHER_HEAD_DIM | {"layer_types": "all layers have an indexer"},
    foreign=ForeignFamily(
        "deepseek_v32",
        None,
        "qk_rope_head_dim",
        _index_faults,
        layers={INDEXED: partial(_attention_of_type, layer_type=INDEXED)},
    ),
    mixture=replace(V3_MIXTURE, dense_layers=LISTED),
)

FAMILIES = (
    # V3 with a different rotation and a different router.
    Family(
        "deepseek_v2",
        "DeepSeek-V2",
        LATENT_BLOCK,
        fields=ALL_HEADS,
        equal=ALL_HEADS,
        requires=V2_ROUTER | {"mlp_bias": False},
        unread=OTHER_HEAD_DIM,
        foreign=latent_family("deepseek_v2", even=True),
        mixture=MixtureFamily(
            DEEPSEEK_PATHS,
            DEEPSEEK_SIZES,
            shared=DEEPSEEK_SHARED,
            routing={"float_logits": True, "renormalise": False},
            fields=GROUPS,
            group_methods=("topk_method", "greedy", "group_limited_greedy"),
            dense_layers=FIRST_DENSE,
        ),
    ),
    V3,
    V32,
    # V3.2 with another rotation in the indexer, which later layers may share.
    replace(
        V32,
        model_type="glm_moe_dsa",
        name="GLM-5",
        block=SHARING_BLOCK,
        foreign=ForeignFamily(
            "glm_moe_dsa",
            None,
            "qk_rope_head_dim",
            _index_faults,
            layers={kind: partial(_attention_of_type, layer_type=kind) for kind in (INDEXED, FULL)},
            kinds=("indexer_types", {"full": INDEXED, SHARED: FULL}),
        ),
    ),
    # V3 with a list of the layers that have a dense MLP.
    replace(
        V3,
        model_type="glm4_moe_lite",
        name="GLM-4.7-Flash",
        foreign=latent_family("glm4_moe_lite"),
        mixture=replace(V3_MIXTURE, dense_layers=LISTED),
    ),
)
