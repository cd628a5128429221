"""Reads the rotation of queries and keys from a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lamina.block_lamina import LAYER_TYPES, rotary_width
from manifests.errors import InputError
from pipeline.families.family import Family


def rope_parameters(family: Family, source: PreTrainedConfig, head_dim: int) -> dict[str, Any] | None:
    """Return the rope parameters of a model, or those of each layer type; None without rotation.

    Raises InputError for impossible values, and for values that the family's model would ignore.
    """
    if family.block["rotary"] is None:
        return None
    if family.rotary_field == "rotary_dim":
        rotary_dim = source.rotary_dim
        if not 1 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise InputError(f"config.json: rotary_dim: {rotary_dim} is not even and within 2 to {head_dim}")
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary_dim / head_dim}
    width = getattr(source, "head_dim", None)
    if family.foreign is None and width and width != head_dim:  # read for the rotation alone
        raise InputError(
            f"config.json: head_dim: {width!r:.80} is not the width of the heads, {head_dim}, so that the model of "
            f"{family.model_type} in transformers would rotate another part of them; remove the field or correct it"
        )
    rope = source.rope_parameters
    if own := [name for name in LAYER_TYPES if name in rope]:
        for name in {*own} & {*source.layer_types}:
            _check_rope(family, rope[name], head_dim)
        return {name: dict(rope[name]) for name in own}
    _check_rope(family, rope, head_dim)
    return dict(rope)


def _check_rope(family: Family, rope: Mapping[str, Any], head_dim: int) -> None:
    if rope.get("rope_type") not in ("default", *ROPE_INIT_FUNCTIONS):
        raise InputError(
            f"config.json: rope_type: {rope.get('rope_type')!r} is not one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    theta, share = rope.get("rope_theta"), rope.get("partial_rotary_factor", 1.0)
    if not isinstance(theta, float | int) or not 0.0 < theta < math.inf:
        raise InputError(f"config.json: rope_theta: {theta!r} is not a positive number")
    if share != 1.0:
        _check_share(family, share, head_dim)
    if rope["rope_type"] == "longrope" and family.foreign is None:
        _check_factors(rope, rotary_width(rope, head_dim) // 2)


def _check_share(family: Family, share: Any, head_dim: int) -> None:
    if not family.partial_rotary:  # transformers' own models of these families disagree on it
        raise InputError(f"config.json: partial_rotary_factor is not supported for {family.model_type}")
    width = head_dim * share if isinstance(share, float | int) and not isinstance(share, bool) else 0.0
    if not 2 <= width <= head_dim or width % 2:
        raise InputError(
            f"config.json: partial_rotary_factor: {share!r} of {head_dim} is not an even number within 2 to {head_dim}"
        )


def _check_factors(rope: Mapping[str, Any], pairs: int) -> None:
    """Check the factors of a longrope, one for each pair of rotated numbers."""
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        if not isinstance(factors, list) or len(factors) != pairs:
            shown = f"a list of {len(factors)}" if isinstance(factors, list) else repr(factors)
            raise InputError(
                f"config.json: rope_parameters.{name}: {shown:.80} is not a list of {pairs} numbers, one for each "
                "rotated pair"
            )
