"""Kimi-Linear: Kimi delta attention in most layers, latent attention without rotation in the others.

Both are copied, and run by transformers' own modules. arXiv 2510.26692.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lamina.block_lamina import FULL, RECURRENT
from pipeline.families.blocks import Copied
from pipeline.families.deepseek import ALL_HEADS
from pipeline.families.dense import BLOCK, MLP_HALF, MODULES
from pipeline.families.family import Family
from pipeline.families.foreign import (
    LATENT_BIASES,
    LATENT_ROLES,
    ForeignBlock,
    ForeignFamily,
    copied_latent_attention,
    copied_modules,
    latent_faults,
    size_faults,
)
from pipeline.families.mixture import LISTED
from pipeline.families.moe import MIXTRAL_PATHS, PROJECTIONS, SIZES, V3_MIXTURE

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
DELTA = ("q_proj", "k_proj", "v_proj", *CONVOLUTIONS, "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj",
         "o_norm", "o_proj")  # fmt: skip
MOE = "block_sparse_moe"
DELTA_SIZES = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")


def _delta_attention(sizes: Mapping[str, Any]) -> ForeignBlock:
    """Return Kimi delta attention, which has a state (head width, head width) for each head."""
    width, heads, hidden = sizes["linear_head_dim"], sizes["linear_num_heads"], sizes["hidden_size"]
    channels = width * heads
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (channels, hidden))
    shapes |= dict.fromkeys(CONVOLUTIONS, (channels, 1, sizes["linear_conv_kernel_dim"]))
    shapes |= {"f_a_proj": (width, hidden), "f_b_proj": (channels, width), "b_proj": (heads, hidden)}
    shapes |= {"g_a_proj": (width, hidden), "g_b_proj": (channels, width)}
    shapes |= {"o_norm": (width,), "o_proj": (hidden, channels)}
    decay = Copied(f"{RECURRENT}.decay", (("A_log", (1, 1, heads, 1)), ("dt_bias", (channels,))))
    return ForeignBlock(None, (*copied_modules(RECURRENT, shapes), decay), (), heads, 3 * channels)


def _faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module can be built."""
    return latent_faults(fields) + size_faults(fields, DELTA_SIZES)


def _hub_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that other engines read instead of `layer_types` and the sizes of linear attention."""
    layers: dict[str, list[int]] = {FULL: [], RECURRENT: []}
    for number, layer_type in enumerate(fields["layer_types"], start=1):
        layers[layer_type].append(number)
    width, heads, kernel = (fields[name] for name in DELTA_SIZES)
    sizes = {"head_dim": width, "num_heads": heads, "short_conv_kernel_size": kernel}
    return {"linear_attn_config": {**sizes, "full_attn_layers": layers[FULL], "kda_layers": layers[RECURRENT]}}


KIMI = Family(
    "kimi_linear",
    "Kimi-Linear",
    BLOCK
    | {
        "modules": {
            "input_norm": MODULES["input_norm"],
            **{f"{RECURRENT}.{name}": f"self_attn.{name}" for name in DELTA},
            f"{RECURRENT}.decay": "self_attn",
            **{f"{FULL}.{name}": f"self_attn.{name}" for name in LATENT_ROLES},
            **MLP_HALF,
        },
        "biases": {f"{FULL}.{role}": field for role, field in LATENT_BIASES.items()},
        "foreign": {RECURRENT: "self_attn", FULL: "self_attn"},
        "rotary": None,
    },
    # transformers writes dense MLPs under these names, and reads both.
    other_names={f"{MOE}.{name}": f"mlp.{name}" for name in PROJECTIONS.values()},
    engine_fields=_hub_fields,
    fields=ALL_HEADS,
    equal=ALL_HEADS,
    requires={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    windows=("layer_types",),
    foreign=ForeignFamily(
        "kimi_linear",
        None,
        "qk_rope_head_dim",
        _faults,
        layers={RECURRENT: _delta_attention, FULL: partial(copied_latent_attention, layer_type=FULL)},
    ),
    mixture=replace(
        V3_MIXTURE,
        paths={
            "router": f"{MOE}.gate",
            "score_bias": f"{MOE}.gate.e_score_correction_bias",
            "experts": f"{MOE}.experts",
            "modules": MIXTRAL_PATHS["modules"],
            "shared": f"{MOE}.shared_experts",
            "shared_modules": PROJECTIONS,
        },
        sizes=SIZES | {"experts": "num_local_experts"},
        dense_layers=LISTED,
    ),
)

FAMILIES = (KIMI,)
