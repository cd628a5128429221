"""Writes and reads the pack-quantized layout of compressed-tensors, and Lamina's layout with a table of levels.

docs/formats.md#rounded-tensors. A rounded module PATH holds `PATH.weight_packed`, `PATH.weight_scale` and
`PATH.weight_shape` in place of `PATH.weight`, and `PATH.weight_levels` if it has a table of levels.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from manifests.records import Scheme
from pipeline.kernels.packing import pack, scaled, unpack, words_of

FIELD = "quantization_config"  # the field of config.json for modules with uniform levels
TABLES = "level_tables"  # the field of config.json for modules with a table of levels
WEIGHT = ".weight"
PACKED, SCALE, SHAPE, LEVELS = ".weight_packed", ".weight_scale", ".weight_shape", ".weight_levels"
LAYOUT = "pack-quantized"
EVERY = "Linear"  # the target of all Linear modules that are not ignored


def packed_tensors(
    path: str, codes_OI: Tensor, scales_OS: Tensor, scheme: Scheme, levels_n: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the packed tensors that replace `PATH.weight`. `levels_n`: the table, if codes are its indices."""
    packed = {
        path + PACKED: pack(codes_OI, scheme.bits),
        path + SCALE: scales_OS,
        path + SHAPE: torch.tensor(codes_OI.shape, dtype=torch.int64),
    }
    return packed if levels_n is None else {**packed, path + LEVELS: levels_n}


def unpacked_weights(tensors: Mapping[str, Tensor], rounded: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """Return the tensors with `PATH.weight` in place of its packed tensors, in the dtype of the scales.

    `rounded`: module path -> scheme. Raises KeyError for packed tensors of a module without a scheme or for a missing
    part, and ValueError for words that do not fit their shape.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((PACKED, SCALE, SHAPE, LEVELS))}
    for name, words_OW in tensors.items():
        if name.endswith(PACKED):
            path = name.removesuffix(PACKED)
            codes_OI = unpack(words_OW, rounded[path].bits, int(tensors[path + SHAPE][1]))
            levels_n = tensors[path + LEVELS] if rounded[path].has_table else None
            plain[path + WEIGHT] = scaled(codes_OI, tensors[path + SCALE], levels_n)
    return plain


def packed_shapes(shapes: Mapping[str, tuple[int, ...]], rounded: Mapping[str, Scheme]) -> dict[str, tuple[int, ...]]:
    """Replace the shape of each rounded weight by those of its packed tensors."""
    packed: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        path = name.removesuffix(WEIGHT)
        if path == name or path not in rounded:
            packed[name] = shape
            continue
        rows, columns = shape
        bits, group = rounded[path].bits, rounded[path].group
        packed[path + PACKED] = (rows, words_of(columns, bits))
        packed[path + SCALE] = (rows, 1 if group is None else columns // group)
        packed[path + SHAPE] = (2,)
        if rounded[path].has_table:
            packed[path + LEVELS] = (2**bits,)
    return packed


def quantization_config(rounded: Mapping[str, Scheme], linears: Iterable[str]) -> dict[str, Any]:
    """Return the field of config.json for modules with uniform levels.

    `linears`: the paths of all `torch.nn.Linear` modules. A single scheme targets every Linear that is not ignored;
    several schemes name their modules. Rounded embeddings are always named.
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


def rounding_fields(rounded: Mapping[str, Scheme], linears: Iterable[str]) -> dict[str, Any]:
    """Return the fields of config.json that describe rounded modules. `linears`: as in `quantization_config`."""
    tables = {path: scheme for path, scheme in rounded.items() if scheme.has_table}
    uniform = {path: scheme for path, scheme in rounded.items() if path not in tables}
    fields: dict[str, Any] = {FIELD: quantization_config(uniform, linears)} if uniform else {}
    return {**fields, TABLES: {path: tables[path].model_dump() for path in sorted(tables)}} if tables else fields


def rounded_modules(config: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Scheme]:
    """Map the modules among `paths` that config.json lists as rounded to their schemes."""
    paths = [*paths]
    field: Mapping[str, Any] = config.get(FIELD) or {}
    schemes: dict[str, Scheme] = {}
    for group in field.get("config_groups", {}).values():
        scheme = Scheme(bits=group["weights"]["num_bits"], group=group["weights"]["group_size"])
        chosen = set(group["targets"])
        every = EVERY in chosen
        schemes |= {path: scheme for path in paths if path in chosen or (every and path not in field["ignore"])}
    # A rounded embedding with a table is no Linear, so that `ignore` does not list it.
    return schemes | {path: Scheme(**scheme) for path, scheme in (config.get(TABLES) or {}).items() if path in paths}


def named_modules(config: Mapping[str, Any]) -> set[str]:
    """Return the paths that config.json names as rounded."""
    groups = (config.get(FIELD) or {}).get("config_groups", {}).values()
    return {target for group in groups for target in group["targets"]} - {EVERY} | {*(config.get(TABLES) or {})}


def packed_names(name: str, stored: Container[str] = ()) -> set[str]:
    """Return the names of the packed tensors of the weight `name`; for another tensor, its own name.

    The table of levels is included if it is in `stored`.
    """
    path = name.removesuffix(WEIGHT)
    if path == name:
        return {name}
    return {path + part for part in (PACKED, SCALE, SHAPE)} | ({path + LEVELS} if path + LEVELS in stored else set())


def packed_dtype(name: str) -> torch.dtype:
    """Return the dtype of a packed tensor; float32 for scales and levels, which may have any floating type."""
    return {PACKED: torch.int32, SHAPE: torch.int64}.get(f".{name.rpartition('.')[2]}", torch.float32)


def packed_modules(names: Iterable[str]) -> set[str]:
    """Return the paths of the modules whose packed tensors are among these names."""
    return {name.removesuffix(PACKED) for name in names if name.endswith(PACKED)}
