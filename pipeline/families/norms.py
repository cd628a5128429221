"""The norms of a layer, from the block of a standard config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.families.layer_geometry import Norm

NORM_ROLES = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")  # of the hidden size
HEAD_NORM_ROLES = ("q_norm", "k_norm")


def has_norm_bias(block: Mapping[str, Any]) -> bool:
    """Return True if the norms of a family's layers have biases."""
    return block["norm"] == "layer" and bool(block.get("norm_bias", True))


def norms_of(
    block: Mapping[str, Any], modules: Mapping[str, str], hidden: int, sizes: Mapping[str, int]
) -> tuple[Norm, ...]:
    """Return the norms of a layer: of the blocks' inputs and outputs, and of query and key heads."""
    together = block.get("head_norms") == "all"
    head_dim = sizes["head_dim"]
    heads = zip(HEAD_NORM_ROLES, ("num_attention_heads", "num_key_value_heads"), strict=True)
    widths = dict.fromkeys(NORM_ROLES, hidden)
    widths |= {role: sizes[count] * head_dim if together else head_dim for role, count in heads}
    return tuple(
        Norm(role, widths[role], has_norm_bias(block) and role not in HEAD_NORM_ROLES)
        for role in modules
        if role in widths
    )
