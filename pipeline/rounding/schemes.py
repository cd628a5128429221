"""How a checkpoint says which matrices are rounded: the pack-quantized layout of compressed-tensors, both ways.

docs/formats.md#rounded-tensors. A module PATH that is rounded holds `PATH.weight_packed`, `PATH.weight_scale` and
`PATH.weight_shape` in place of `PATH.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from manifests.records import Scheme
from pipeline.kernels.packing import pack, scaled, unpack, words_of

FIELD = "quantization_config"  # of config.json
WEIGHT = ".weight"
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
LAYOUT = "pack-quantized"
EVERY = "Linear"  # a target that means each module of the class that is not ignored


def packed_tensors(path: str, codes_OI: Tensor, scales_OS: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """What stands for `PATH.weight`."""
    return {
        path + PACKED: pack(codes_OI, scheme.bits),
        path + SCALE: scales_OS,
        path + SHAPE: torch.tensor(codes_OI.shape, dtype=torch.int64),
    }


def unpacked(tensors: Mapping[str, Tensor], rounded: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """The tensors with `PATH.weight` in place of what stands for it, in the dtype that the scales have here.

    `rounded`: by the path of a module. Raises KeyError for packed tensors of a module that it does not know, or for a
    part that is missing, and ValueError for words that do not fit their shape.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith((PACKED, SCALE, SHAPE))}
    for name, words_OW in tensors.items():
        if name.endswith(PACKED):
            path = name.removesuffix(PACKED)
            codes_OI = unpack(words_OW, rounded[path].bits, int(tensors[path + SHAPE][1]))
            found[path + WEIGHT] = scaled(codes_OI, tensors[path + SCALE])
    return found


def packed_shapes(shapes: Mapping[str, tuple[int, ...]], rounded: Mapping[str, Scheme]) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape, with what stands for each rounded weight in its place."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        path = name.removesuffix(WEIGHT)
        if path == name or path not in rounded:
            found[name] = shape
            continue
        rows, columns = shape
        bits, group = rounded[path].bits, rounded[path].group
        found[path + PACKED] = (rows, words_of(columns, bits))
        found[path + SCALE] = (rows, 1 if group is None else columns // group)
        found[path + SHAPE] = (2,)
    return found


def quantization_config(rounded: Mapping[str, Scheme], linears: Iterable[str]) -> dict[str, Any]:
    """The field of config.json. `linears`: the paths of all modules that are `torch.nn.Linear`.

    One scheme for all that are rounded is that of each Linear but those ignored; several name their modules. A table of
    embeddings is named.
    """
    linears = set(linears)
    schemes = sorted({(scheme.bits, scheme.group) for scheme in rounded.values()}, key=str)
    groups = {}
    for number, (bits, group) in enumerate(schemes):
        paths = sorted(path for path, scheme in rounded.items() if (scheme.bits, scheme.group) == (bits, group))
        groups[f"group_{number}"] = {
            "format": LAYOUT,  # or compressed-tensors before 0.20 leaves a group with a table of embeddings unpacked
            "targets": [EVERY, *sorted({*paths} - linears)] if len(schemes) == 1 else paths,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": True,
                "strategy": "channel" if group is None else "group",
                "group_size": group,
            },
        }
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(linears - rounded.keys()),
    }


def rounded_modules(config: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Scheme]:
    """The schemes of those of some modules that config.json, as `quantization_config` writes it, says are rounded."""
    found: dict[str, Scheme] = {}
    field = config.get(FIELD) or {}
    for group in field.get("config_groups", {}).values():
        scheme = Scheme(bits=group["weights"]["num_bits"], group=group["weights"]["group_size"])
        chosen = set(group["targets"])
        every = EVERY in chosen
        found |= {path: scheme for path in paths if path in chosen or (every and path not in field["ignore"])}
    return found


def named_modules(config: Mapping[str, Any]) -> set[str]:
    """The paths that config.json names as rounded, whatever they hold."""
    groups = (config.get(FIELD) or {}).get("config_groups", {}).values()
    return {target for group in groups for target in group["targets"]} - {EVERY}


def packed_names(name: str) -> set[str]:
    """The tensors that stand for the weight `name` where it is rounded; another tensor stands for itself."""
    path = name.removesuffix(WEIGHT)
    return {path + part for part in (PACKED, SCALE, SHAPE)} if path != name else {name}


def packed_dtype(name: str) -> torch.dtype:
    """Of a tensor that stands for a part of a rounded weight; scales may be of any floating type."""
    return {PACKED: torch.int32, SHAPE: torch.int64}.get(f".{name.rpartition('.')[2]}", torch.float32)


def packed_modules(names: Iterable[str]) -> set[str]:
    """The paths of the modules whose packed tensors are among these names."""
    return {name.removesuffix(PACKED) for name in names if name.endswith(PACKED)}
