"""Tensors of a source that hold several matrices or biases."""

from __future__ import annotations

from itertools import chain

from manifests.parts import Fused, by_groups, stacked
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.mixture import FusedExperts
from pipeline.families.registry import FAMILIES


def fused_tensors(geometry: Geometry) -> dict[str, Fused]:
    """Map each fused tensor of a source to its parts, by their names in Lamina's checkpoints."""
    family = FAMILIES[geometry.model_type]
    fused: dict[str, Fused] = {}
    for layer in geometry.layers:
        for path, roles in family.fused.items():
            for part in layer.role_shapes(roles[0]) if roles[0] in layer.roles else ():
                shapes = {f"{layer.path(role)}.{part}": layer.role_shapes(role)[part] for role in roles}
                rows = sum(shape[0] for shape in shapes.values())
                inner = layer.role_shapes(roles[0])[part][1:]
                parts = by_groups(shapes, layer.attention.kv_heads) if family.fused_by_heads else stacked(shapes)
                fused[f"{layer.prefix}{path}.{part}"] = Fused((rows, *inner), parts)
        if family.mixture is not None and layer.routing:
            for name, kind in family.mixture.fused.items():
                fused[layer.prefix + name] = _experts(layer, kind)
    return fused


def _experts(layer: LayerGeometry, kind: FusedExperts) -> Fused:
    """Return a tensor whose first axis counts the routed experts of a layer."""
    experts = [block for block in layer.mlps if block.roles[0] in layer.routed_roles]
    by_expert = []
    for block in experts:
        roles = (f"{block.name}.{role}" for role in kind.roles)
        by_expert.append({f"{layer.path(role)}.{kind.part}": layer.role_shapes(role)[kind.part] for role in roles})
    rows, inner = sum(shape[0] for shape in by_expert[0].values()), next(iter(by_expert[0].values()))[1:]
    shape = (*inner, rows) if kind.transposed else (rows, *inner)
    size = rows * (inner[0] if inner else 1)
    parts = (
        stacked(shapes, number * size, kind.interleaved, kind.transposed) for number, shapes in enumerate(by_expert)
    )
    return Fused((len(experts), *shape), tuple(chain.from_iterable(parts)))
