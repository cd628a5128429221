"""Nemotron-H: each layer is a norm and one block: Mamba 2, attention, an MLP, or a mixture of experts.

Mamba 2 (arXiv 2405.21060) and attention, without rotation, are copied and run by transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lamina.block_lamina import ATTENTION, FULL, MLP, RECURRENT
from pipeline.families.blocks import Copied
from pipeline.families.dense import BLOCK
from pipeline.families.family import Family
from pipeline.families.foreign import (
    ATTENTION_MODULES,
    ForeignBlock,
    ForeignFamily,
    copied_attention,
    copied_modules,
    size_faults,
    switch_faults,
)
from pipeline.families.mixture import BY_TYPE, MixtureFamily
from pipeline.families.moe import DEEPSEEK_SIZES, GROUPS, RENORMALISE, SIGMOID

PROJECTIONS = {"up": "up_proj", "down": "down_proj"}
MAMBA = ("in_proj", "conv1d", "norm", "out_proj")
COUNTS = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size")
SWITCHES = ("use_conv_bias", "use_bias")
PATTERN = {RECURRENT: "M", FULL: "*", "mlp": "-", "moe": "E"}  # letters of layer types
INITIAL = "only initial values"


def _mamba(sizes: Mapping[str, Any]) -> ForeignBlock:
    """Return Mamba 2, which has a state (head width, state width) for each head."""
    heads, hidden = sizes["mamba_num_heads"], sizes["hidden_size"]
    inner = heads * sizes["mamba_head_dim"]
    channels = inner + 2 * sizes["n_groups"] * sizes["ssm_state_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj": (inner + channels + heads, hidden),
        "conv1d": (channels, 1, sizes["conv_kernel"]),
        "norm": (inner,),
        "out_proj": (hidden, inner),
    }
    biased = (*(("in_proj", "out_proj") if sizes["use_bias"] else ()), *(("conv1d",) if sizes["use_conv_bias"] else ()))
    decay = Copied(f"{RECURRENT}.decay", tuple((name, (heads,)) for name in ("A_log", "D", "dt_bias")))
    return ForeignBlock(None, (*copied_modules(RECURRENT, shapes, biased), decay), (), heads, inner)


def _faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module can be built."""
    faults = size_faults(fields, COUNTS)
    if not faults and fields["mamba_num_heads"] % fields["n_groups"]:
        faults.append(
            f"mamba_num_heads: {fields['mamba_num_heads']} is not a multiple of n_groups: {fields['n_groups']}"
        )
    return faults + switch_faults(fields, SWITCHES)


def _engine_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that other engines read instead of the list of layer types."""
    types = fields["layers_block_type"]
    return {"num_hidden_layers": len(types), "hybrid_override_pattern": "".join(PATTERN[each] for each in types)}


NEMOTRON = Family(
    "nemotron_h",
    "Nemotron-H",
    BLOCK
    | {
        "embed": "backbone.embeddings",
        "layers": "backbone.layers",
        "final_norm": "backbone.norm_f",
        "modules": {
            "input_norm": "norm",
            **{f"{RECURRENT}.{name}": f"mixer.{name}" for name in MAMBA},
            f"{RECURRENT}.decay": "mixer",
            **{f"{FULL}.{name}": f"mixer.{name}" for name in ATTENTION_MODULES},
            "mlp_norm": "norm",
            **{role: f"mixer.{name}" for role, name in PROJECTIONS.items()},
        },
        "foreign": {RECURRENT: "mixer", FULL: "mixer"},
        "alone": {RECURRENT: ATTENTION, FULL: ATTENTION, "mlp": MLP, "moe": MLP},
        "rotary": None,
    },
    fields={"norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
    requires={"mlp_bias": False, "moe_latent_size": None, "n_shared_experts": 1, "residual_in_fp32": False},
    windows=("layer_types",),
    engine_fields=_engine_fields,
    foreign=ForeignFamily(
        "nemotron_h", None, "", _faults, {RECURRENT: _mamba, FULL: partial(copied_attention, layer_type=FULL)}
    ),
    mixture=MixtureFamily(
        {
            "router": "mixer.gate",
            "score_bias": "mixer.gate.e_score_correction_bias",
            "experts": "mixer.experts",
            "modules": PROJECTIONS,
            "shared": "mixer.shared_experts",
        },
        DEEPSEEK_SIZES,
        shared=("moe_shared_expert_intermediate_size",),
        routing=SIGMOID,
        fields=GROUPS | RENORMALISE,
        dense_layers=BY_TYPE,
    ),
    unread={
        "attention_bias": "the module has none",
        "sliding_window": "the module has none",
        "mamba_proj_bias": "use_bias determines it",
        "expand": "mamba_num_heads and mamba_head_dim determine the width",
        "mamba_ssm_cache_dtype": "the dtype of states in other engines",
        "moe_shared_expert_overlap": "speed in other engines",
        "num_logits_to_keep": "the outputs of a call",
        "time_step_limit": "the module uses time_step_min, and no upper limit",
        **dict.fromkeys(("time_step_max", "time_step_floor", "rescale_prenorm_residual"), INITIAL),
        **dict.fromkeys(
            ("num_nextn_predict_layers", "mtp_layers_block_type"), "the number of further predicted tokens"
        ),
    },
)

FAMILIES = (NEMOTRON,)
