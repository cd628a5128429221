"""The norms of a layer, from the block of a standard config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.block_lamina import HEAD_NORM_ROLES, INPUT_NORM_ROLES, OUTPUT_NORM_ROLES, LayerShape, has_norm_bias
from pipeline.families.layer_geometry import Norm

NORM_ROLES = (*INPUT_NORM_ROLES, *OUTPUT_NORM_ROLES, *HEAD_NORM_ROLES)


def norms_of(block: Mapping[str, Any], shape: LayerShape) -> tuple[Norm, ...]:
    """Return the norms of a layer: of the blocks' inputs and outputs, and of query and key heads."""
    biased = has_norm_bias(block)
    return tuple(
        Norm(role, shape.norm_width(role, block), biased and role not in HEAD_NORM_ROLES)
        for role in shape.modules
        if role in NORM_ROLES
    )
