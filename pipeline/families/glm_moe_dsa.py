"""GLM-5: DeepSeek-V3.2 with another rotation in the indexer, which later layers may share."""

from dataclasses import replace
from functools import partial

from pipeline.families.deepseek_v32 import INDEXED, INDEXED_BLOCK, LATENT, attention_of_type, indexed_family
from pipeline.families.delta import FULL
from pipeline.families.foreign import LATENT_BIASES, SHARED

family = indexed_family("glm_moe_dsa")
assert family.foreign is not None

FAMILY = replace(
    family,
    block=INDEXED_BLOCK
    | {
        "modules": INDEXED_BLOCK["modules"] | {f"{FULL}.{role}": path for role, path in LATENT.items()},
        "biases": INDEXED_BLOCK["biases"] | {f"{FULL}.{role}": field for role, field in LATENT_BIASES.items()},
        "foreign": {INDEXED: "self_attn", FULL: "self_attn"},
    },
    foreign=replace(
        family.foreign,
        layers={kind: partial(attention_of_type, layer_type=kind) for kind in (INDEXED, FULL)},
        kinds=("indexer_types", {"full": INDEXED, SHARED: FULL}),
    ),
)
