"""Codes of experts in a checkpoint of the source's own class, as transformers reads them.

transformers 5.23 holds the experts of a layer in one tensor, and decodes the codes of each expert while it loads them.
It takes the scheme of the group whose target is a pattern that contains `experts`, or of the first group
(`get_experts_scheme`). In a checkpoint that has codes, it loses experts without codes. It reads no NF4 weights of
experts. `code_faults` also reports dense models that cannot have codes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from manifests.parts import names_of
from manifests.records import Scheme
from pipeline.checkpoint.nf4 import is_nf4
from pipeline.families.fused import fused_tensors
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of
from pipeline.rounding.schemes import FIELD, SCALE, SHAPE, WEIGHT, quantization_config, rounded_modules

EXPERTS = r"re:.*\.experts\.\d+\..*"  # a target: the modules of experts by their names in a checkpoint
PLAIN_LINEARS = ("falcon",)  # types whose linears multiply by `weight`; a module with codes has no such tensor
APART = ("llama4_text",)  # types whose experts transformers holds one by one if the checkpoint has codes


def whole_roles(config: Mapping[str, Any], layer: LayerGeometry) -> list[str]:
    """Return the roles that are stored as one matrix, of the family's shape or with fewer channels of an MLP."""
    forms = config["forms"][layer.index]
    return [role for role in layer.matrices if forms.get(role, {"form": "dense"})["form"] in ("dense", "pruned")]


def expert_paths(config: Mapping[str, Any], whole: bool = False) -> list[str]:
    """Return the module paths of the matrices of routed experts that the family stores one by one.

    `config`: that of a checkpoint, with as many experts as it has. `whole`: only those that are stored as one matrix.
    """
    geometry = geometry_of(config)
    fused = names_of(fused_tensors(geometry).values())
    return [
        layer.path(role)
        for layer in geometry.layers
        for role in (whole_roles(config, layer) if whole else layer.matrices)
        if role in layer.routed_roles and layer.path(role) + WEIGHT not in fused
    ]


def code_faults(config: Mapping[str, Any]) -> list[str]:
    """Return why transformers could not read the codes of a checkpoint in a stock export. `config`: as in
    `expert_paths`."""
    geometry, nf4 = geometry_of(config), is_nf4(config)
    if config.get(FIELD) and not nf4 and geometry.model_type in PLAIN_LINEARS:
        return [f"codes: transformers' linears of {geometry.model_type} multiply by unrounded weights"]
    routed = any(layer.routed_roles for layer in geometry.layers)
    if not routed or not (nf4 or config.get(FIELD)):
        return []
    if geometry.model_type in APART:
        return [f"codes beside experts of {geometry.model_type}, which transformers then expects one by one"]
    rounded = rounded_modules(config, expert_paths(config, whole=True))
    if nf4:
        return [f"NF4 codes of {len(rounded)} matrices of experts, which transformers does not read"] if rounded else []
    plain = len(expert_paths(config)) - len(rounded)
    if plain:
        return [
            f"codes, and {plain} matrices of experts without (quantize.skip): transformers reads codes of all matrices "
            "of experts, or of none"
        ]
    if len(bits := sorted({scheme.bits for scheme in rounded.values()})) > 1:
        return [f"codes of {' and '.join(map(str, bits))} bits of experts, which transformers decodes by one scheme"]
    return []


def common_group(schemes: Iterable[Scheme]) -> int | None:
    """Return the columns that share a scale in every one of these schemes; None: whole rows.

    Groups are powers of two, and the smallest divides the others.
    """
    return min((scheme.group for scheme in schemes if scheme.group is not None), default=None)


def in_groups_of(group: int | None, path: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's packed tensors with the same numbers in groups that may be smaller: scales are repeated."""
    groups = 1 if group is None else int(parts[path + SHAPE][1]) // group
    return {**parts, path + SCALE: parts[path + SCALE].repeat_interleave(groups // parts[path + SCALE].shape[1], dim=1)}


def described_codes(rounded: Mapping[str, Scheme], linears: Iterable[str], experts: Collection[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json, in which a pattern stands for the experts if others have another
    scheme. `experts`: the paths of their matrices."""
    described = quantization_config(rounded, linears)
    groups = described["config_groups"].values()
    for group in groups if len(groups) > 1 else ():
        others = [path for path in group["targets"] if path not in experts]
        if len(others) < len(group["targets"]):
            group["targets"] = [EXPERTS, *others]
    return described
