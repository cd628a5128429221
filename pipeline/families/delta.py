"""Qwen's hybrids: gated delta networks (arXiv 2412.06464) in most layers, attention with gated outputs in the others.

Both are copied, and run by transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lamina.block_lamina import FULL, RECURRENT
from lamina.foreign_lamina import DELTA_FIELDS
from pipeline.families.blocks import Copied
from pipeline.families.dense import BLOCK, MLP_HALF, MODULES
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
from pipeline.families.mixture import DOWN, EVERY_LAYER, GATE_UP, FusedExperts
from pipeline.families.moe import QWEN2_MIXTURE

PATHS = {RECURRENT: "linear_attn", FULL: "self_attn"}
Widths = tuple[int, int, int]  # of all keys, of all values, heads of values
ReaderShapes = Callable[[Widths], dict[str, int]]


def _readers_of_next(widths: Widths) -> dict[str, int]:
    """Return the outputs of Qwen3-Next's matrices that read the layer's input."""
    keys, values, heads = widths
    return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}


def _readers_apart(widths: Widths) -> dict[str, int]:
    """Return the outputs of Qwen3.5's matrices that read the layer's input."""
    keys, values, heads = widths
    return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}


def _block(readers: ReaderShapes) -> dict[str, Any]:
    """Return the block of a family, with the roles of layers of either type."""
    inside = [*readers((1, 1, 1)), "conv1d", "norm", "out_proj"]
    return BLOCK | {
        "modules": {
            "input_norm": MODULES["input_norm"],
            **{f"{RECURRENT}.{name}": f"{PATHS[RECURRENT]}.{name}" for name in inside},
            f"{RECURRENT}.decay": PATHS[RECURRENT],
            **{f"{FULL}.{name}": f"{PATHS[FULL]}.{name}" for name in (*ATTENTION_MODULES, "q_norm", "k_norm")},
            **MLP_HALF,
        },
        "biases": {f"{FULL}.{name}": "attention_bias" for name in ATTENTION_MODULES},
        "foreign": PATHS,
        "norm_offset": 1.0,
    }


def _hybrid(model_type: str, name: str, readers: ReaderShapes, **others: Any) -> Family:
    """Return a family whose delta networks have these readers."""
    layers: dict[str, Callable[[Mapping[str, Any]], ForeignBlock]] = {
        RECURRENT: partial(_delta_network, readers=readers),
        FULL: _gated_attention,
    }
    foreign = ForeignFamily(model_type, None, "", _faults, layers)
    windows = ("layer_types",)
    return Family(model_type, name, _block(readers), foreign=foreign, windows=windows, partial_rotary=True, **others)


def _delta_network(sizes: Mapping[str, Any], readers: ReaderShapes) -> ForeignBlock:
    """Return a gated delta network, which has a state (key width, value width) for each value head."""
    heads, hidden = sizes["linear_num_value_heads"], sizes["hidden_size"]
    keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    values = heads * sizes["linear_value_head_dim"]
    channels = 2 * keys + values
    shapes: dict[str, tuple[int, ...]] = {name: (rows, hidden) for name, rows in readers((keys, values, heads)).items()}
    shapes |= {
        "conv1d": (channels, 1, sizes["linear_conv_kernel_dim"]),
        "norm": (sizes["linear_value_head_dim"],),
        "out_proj": (hidden, values),
    }
    decay = Copied(f"{RECURRENT}.decay", (("A_log", (heads,)), ("dt_bias", (heads,))))
    return ForeignBlock(None, (*copied_modules(RECURRENT, shapes), decay), (), heads, channels)


def _gated_attention(sizes: Mapping[str, Any]) -> ForeignBlock:
    """Return grouped attention with gates, and norms of query and key heads."""
    plain, norms = copied_attention(sizes, FULL, gates=True), dict.fromkeys(("q_norm", "k_norm"), (sizes["head_dim"],))
    scores = tuple(f"{FULL}.{name}" for name in norms)
    return replace(plain, copied=(*plain.copied, *copied_modules(FULL, norms)), scores=scores)


def _faults(fields: Mapping[str, Any]) -> list[str]:
    """Return the faults of fields from which no module can be built."""
    sizes = {name: fields[name] for name in DELTA_FIELDS if name != "attention_bias"}
    faults = size_faults(sizes, sizes)
    if not faults and sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        faults.append(
            f"linear_num_value_heads: {sizes['linear_num_value_heads']} is not a multiple of linear_num_key_heads: "
            f"{sizes['linear_num_key_heads']}"
        )
    return faults + switch_faults(fields, ["attention_bias"])


FAMILIES = (
    _hybrid("qwen3_next", "Qwen3-Next", _readers_of_next, mixture=QWEN2_MIXTURE),
    _hybrid("qwen3_5_text", "Qwen3.5", _readers_apart),
    _hybrid(
        "qwen3_5_moe_text",
        "Qwen3.5 (experts)",
        _readers_apart,
        fields={"intermediate_size": "moe_intermediate_size"},
        mixture=replace(
            QWEN2_MIXTURE,
            fields={},
            dense_layers=EVERY_LAYER,
            fused={
                "mlp.experts.gate_up_proj": FusedExperts(GATE_UP),
                "mlp.experts.down_proj": FusedExperts(DOWN),
            },
        ),
    ),
)
