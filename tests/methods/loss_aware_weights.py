"""Creates statistics and weights for loss_aware without a model, and rebuilds dense weights from solutions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.families.geometry import Geometry
from pipeline.kernels.heads import diagonal_blocks
from pipeline.kernels.pivoted import PivotedFactors, expand
from pipeline.methods.base import Group
from pipeline.methods.method import Moment, Solution, Statistics

TOKENS = 300


def make_weights(where: Geometry, roles: tuple[str, ...], seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shape, generator=source, dtype=torch.float64) / math.sqrt(shape[-1])
        for key, (_, shape) in where.layers[0].tensors().items()
        if key.partition(".")[0] in roles
    }


def make_statistics(where: Geometry, group: Group[Any], seed: int = 0) -> Statistics:
    """Return moments of random values with a decaying spectrum; those of gradients are means."""
    moments = {}
    for moment in group.moments:
        source = torch.Generator().manual_seed(zlib.crc32(moment.point.encode()) + seed)
        width = features(where, moment)
        values_TF = torch.randn(TOKENS, width, generator=source, dtype=torch.float64) * torch.logspace(0, -2, width)
        values_TF = values_TF @ torch.randn(width, width, generator=source, dtype=torch.float64)
        if moment.kind == "sample":
            moments[moment] = values_TF[None]
            continue
        scale = 1.0 / TOKENS if moment.kind == "gradient" else 1.0
        whole = values_TF.T @ values_TF * scale
        if moment.heads > 1:
            moments[moment] = diagonal_blocks(whole, moment.heads, moment.groups)
            continue
        moments[moment] = whole.diagonal()[None] if moment.diagonal else whole[None]
    return Statistics(moments, TOKENS)


def features(where: Geometry, moment: Moment) -> int:
    role, _, side = moment.point.partition(".")
    if not side or role in ("attention", "mlp"):
        return where.hidden
    return where.layers[0].weight_shape(role)[1 if side == "in" else 0]


def counted(solution: Solution, bits: int) -> int:
    """Count the stored numbers; each stack's 32-bit indices are rounded up to whole numbers."""
    return sum(
        tensor.numel() if tensor.is_floating_point() else math.ceil(32 * tensor.numel() / bits)
        for tensor in solution.tensors.values()
    )


def rebuild(solution: Solution, where: Geometry, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return role -> the weight of the dense shape that computes the same: removed channels and directions are zeros.

    Kept channels, and directions of a value basis, come first, in both weights alike.
    """
    forms, tensors = {role: form.as_json() for role, form in solution.forms.items()}, solution.tensors
    width = next((f["rank"] if f["form"] == "pruned" else f["width"] for f in forms.values() if _pruned(f)), 0)
    value = next((f["rank"] if f["form"] == "head_pca" else f["value_rank"] for f in forms.values() if _basis(f)), 0)
    small: dict[str, Tensor] = {}
    for name in {form["group"] for form in forms.values() if form["form"] == "pivoted"}:
        members = [role for role in weight_roles(weights) if forms.get(role, {}).get("group") == name]
        path = f"{name}.pivoted"
        whole = expand(
            PivotedFactors(
                tensors[f"{path}.rows.weight"],
                tensors[f"{path}.coefficients.weight"],
                tensors[f"{path}.indices"].to(torch.int64),
            )
        )
        sizes = [width if width and role in ("gate", "up") else len(weights[f"{role}.weight"]) for role in members]
        small |= dict(zip(members, whole.split(sizes), strict=True))
    for role in weight_roles(weights):
        form = forms.get(role, {"form": "dense"})
        if form["form"] in ("low_rank", "joint_low_rank"):
            owner = next(other for other in weight_roles(weights) if forms.get(other, {}) == form or other == role)
            owner = role if form["form"] == "low_rank" else owner
            small[role] = tensors[f"{role}.second.weight"] @ tensors[f"{owner}.first.weight"]
        elif role not in small:
            small[role] = tensors[f"{role}.weight"]
    return {role: _padded(role, part, where, weights[f"{role}.weight"], width, value) for role, part in small.items()}


def weight_roles(weights: Mapping[str, Tensor]) -> list[str]:
    return [key.partition(".")[0] for key in weights if key.endswith(".weight")]


def _pruned(form: Mapping[str, object]) -> bool:
    return form["form"] == "pruned" or "width" in form


def _basis(form: Mapping[str, object]) -> bool:
    return form["form"] == "head_pca" or "value_rank" in form


def _padded(role: str, part: Tensor, where: Geometry, dense: Tensor, width: int, value: int) -> Tensor:
    if part.shape == dense.shape:
        return part
    whole = torch.zeros_like(dense)
    if role == "v":
        whole.view(where.layers[0].attention.kv_heads, where.layers[0].attention.head_dim, -1)[:, :value] = part.view(
            where.layers[0].attention.kv_heads, value, -1
        )
    elif role == "o":
        whole.view(-1, where.layers[0].attention.heads, where.layers[0].attention.head_dim)[..., :value] = part.view(
            -1, where.layers[0].attention.heads, value
        )
    elif role == "down":
        whole[:, :width] = part
    else:
        whole[:width] = part
    return whole
