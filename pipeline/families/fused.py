"""Tensors of a source that hold the rows of several matrices."""

from __future__ import annotations

from pipeline.families.family import Geometry
from pipeline.families.registry import FAMILIES


def fused_tensors(geometry: Geometry) -> dict[str, dict[str, int]]:
    """Map each fused tensor of a source to the tensors that its rows are, in order, and their numbers of rows."""
    fused: dict[str, dict[str, int]] = {}
    for layer in geometry.layers:
        for path, roles in FAMILIES[geometry.model_type].fused.items():
            for part in layer.role_shapes(roles[0]):
                rows = {f"{layer.path(role)}.{part}": layer.role_shapes(role)[part][0] for role in roles}
                fused[f"{layer.prefix}{path}.{part}"] = rows
    return fused
