"""Creates entries and weights for LeSTD, and rebuilds weights from stored tensors by config.json's forms alone.

Legend: D hidden, H query heads, G key/value heads, R1 R2 R3 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifests.loading import parse_manifest
from pipeline.families.geometry import Geometry
from pipeline.methods.base import Group
from pipeline.methods.lestd import LeSTDMethod
from pipeline.methods.method import Solution
from tests.families.geometries import llama, other

GEOMETRIES: dict[str, Geometry] = {
    "mha": llama("mha"),
    "gqa": llama("gqa"),
    "mqa": llama("mqa"),
    "biased": llama("biased"),
    "wide-heads": llama("wide-heads"),
    "opt": other("opt"),
    "gptj": other("gptj"),
    "qwen3, float32": other("qwen3", bits=32),
}
Json = dict[str, Any]


def lestd(**entry: Any) -> LeSTDMethod:
    return LeSTDMethod(parse_manifest(document(entry)).methods[0])


def document(*entries: Mapping[str, Any], **fields: Any) -> Json:
    methods = [{"method": "lestd", **entry} for entry in entries]
    places = {"model": {"source": "m"}, "output": "o", "run_dir": "r"}
    return {"version": 1, **places, "methods": methods, **fields}


def group_of(method: LeSTDMethod, where: Geometry, name: str, layer: int = 0) -> Group[Any]:
    return next(group for group in method.claims(where) if (group.layer, group.name) == (layer, name))


def make_weights(where: Geometry, roles: Sequence[str], seed: int = 0, decay: float = 0.93) -> dict[str, Tensor]:
    """Return random weights that share a decaying spectrum along D; a flat one for `decay` 1."""
    generator = torch.Generator().manual_seed(seed)
    D = where.hidden
    basis = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64)).Q
    shape_DD = basis * decay ** torch.arange(D) @ basis.T
    weights = {}
    for role in roles:
        for part, shape in where.layers[0].role_shapes(role).items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            if part == "weight":
                weight = shape_DD @ weight if role in ("o", "down") else weight @ shape_DD
            weights[f"{role}.{part}"] = weight
    return weights


def read_core(tensors: Mapping[str, Tensor], form: Json, end: str, shape: tuple[int, ...]) -> Tensor:
    """Return a core (R1, R2, R3, h) from its stored tensors."""
    if not form["sparse"]:
        assert tensors[f"core{end}"].shape == shape
        return tensors[f"core{end}"]
    values, mask = tensors[f"core{end}.values"], tensors[f"core{end}.mask"]
    assert values.shape == (form[f"nnz{end}"],)
    assert mask.dtype == torch.uint8
    assert mask.shape == (math.ceil(math.prod(shape) / 8),)
    bits = np.unpackbits(mask.numpy(), bitorder="little").astype(bool)
    assert not bits[math.prod(shape) :].any()
    flat = np.zeros(math.prod(shape))
    flat[bits[: len(flat)]] = values.double().numpy()
    return torch.from_numpy(flat).reshape(shape)


def rebuild(solution: Solution, where: Geometry, group: Group[Any]) -> dict[str, Tensor]:
    """Return the weights as `role.weight`, from tensors and forms alone; fail if a tensor is not used."""
    (form,) = {str(form): form.as_json() for form in solution.forms.values()}.values()
    assert tuple(solution.forms) == group.roles
    prefix = f"{group.name}.tucker."
    stored = {name.removeprefix(prefix): t for name, t in solution.tensors.items() if name.startswith(prefix)}
    R1, R2, R3 = form["ranks"]
    H, G = where.layers[0].attention.heads, where.layers[0].attention.kv_heads
    own = form.get("own_output", False)
    if group.name == "mlp":
        cores = [("", group.roles, 1)]
    elif H == G:
        cores = [("", group.roles[: 3 if own else 4], H)]
    else:
        cores = [("_q" if own else "_qo", ("q",) if own else ("q", "o"), H), ("_kv", ("k", "v"), G)]
    used, weights = {"first", "second"}, {}
    for end, roles, heads in cores:
        shape = (R1, R2, min(R3, len(roles)), heads)
        assert stored[f"third{end}"].shape == (len(roles), shape[2])
        core = read_core(stored, form, end, shape)
        full = torch.einsum("abch,xa,yb,tc->txyh", core, stored["first"], stored["second"], stored[f"third{end}"])
        weights |= {role: part for role, part in zip(roles, full, strict=True)}
        used |= {name for name in stored if name.startswith(f"core{end}") or name == f"third{end}"}
    if own:
        shape = (*form["ranks_o"], 1, H)
        core = read_core(stored, form, "_o", shape)
        weights["o"] = torch.einsum("abch,xa,yb->xyh", core, stored["first_o"], stored["second_o"])
        used |= {name for name in stored if name.endswith("_o") or name.startswith("core_o")}
    assert used == set(stored)
    turned = {  # (D, width, heads) -> (out, in)
        role: part.permute(0, 2, 1).flatten(1) if role in ("o", "down") else part.permute(2, 1, 0).flatten(0, 1)
        for role, part in weights.items()
    }
    return {f"{role}.weight": weight for role, weight in turned.items()}


def squared_error(weights: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> float:
    return sum(float((weights[name] - again[name]).square().sum()) for name in again)


def stored_numbers(solution: Solution, bits: int) -> int:
    """Count the stored numbers without biases; a bitmap counts by its bytes."""
    return sum(
        tensor.numel() if tensor.is_floating_point() else math.ceil(tensor.numel() * 8 / bits)
        for name, tensor in solution.tensors.items()
        if ".tucker." in name
    )
