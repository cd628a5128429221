"""Granite-MoE: Granite with Mixtral's mixtures, whose experts are stored in one tensor."""

from pipeline.families import granite
from pipeline.families.family import TRAINING, Family
from pipeline.families.llama import ATTENTION_BIAS, BLOCK
from pipeline.families.mixtral import SIZES
from pipeline.families.mixture import GATE_UP, ROUTING, FusedExperts, MixtureFamily
from pipeline.families.qwen3_moe import PROJECTIONS

FAMILY = Family(
    model_type="granitemoe",
    block=BLOCK | {"biases": ATTENTION_BIAS},
    settings=granite.FAMILY.settings,
    mixture=MixtureFamily(
        paths={
            "router": "block_sparse_moe.router.layer",
            "experts": "block_sparse_moe.experts",
            "modules": PROJECTIONS,
        },
        sizes=SIZES,
        fused={
            "block_sparse_moe.input_linear.weight": FusedExperts(GATE_UP),
            "block_sparse_moe.output_linear.weight": FusedExperts(("down",)),
        },
    ),
    unread={"attention_dropout": TRAINING, **ROUTING},
    unlisted=("head_dim",),
)
