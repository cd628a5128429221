"""Reads a source's `quantization_config`: for each method of quantization, the format of each module's weight.

docs/formats.md#stored-formats. `stores.format_fields` lists the fields of each method.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.stored_lamina import StoredFormat
from manifests.errors import InputError
from stores.format_fields import (
    ARGUMENTS,
    AWQ,
    COMPRESSED,
    FIELD,
    FP8,
    GPTQ,
    GPTQ_MODULE,
    MXFP4,
    SCHEME,
    SPARSITY,
    check_format_fields,
)
from stores.headers import DTYPES, TensorRecord

WEIGHT, PACKED, CODES = ".weight", ".weight_packed", ".qweight"
BLOCKS, SCALES = "_blocks", "_scales"  # of fused experts, and behind WEIGHT of a matrix
BYTE_CODES = ("F8_E4M3", "F8_E5M2", "I8")
MXFP4_GROUP = 32
GPTQ_BITS = (2, 4, 8)
PATTERN, SKIPPED, CHANGED = "re:", "-:", "+:"  # prefixes of targets, and of the keys of GPTQ's `dynamic`
LINEAR_CLASSES, EMBEDDING_CLASSES = ("Linear", "Module"), ("Embedding", "Module")  # as targets of compressed-tensors
Tensors = Mapping[str, TensorRecord]
Formats = Callable[[str], StoredFormat]  # a module's path -> the format of its weight


class FormatError(ValueError):
    """The tensors of a weight do not fit together."""


@dataclass(frozen=True)
class Stored:
    """A source as the methods read it.

    Attributes:
        tensors: of the files, by name.
        dtype: of decoded weights.
        embedding: the path of the table of token embeddings.
        modules: the paths in the files of modules that have others here.
    """

    tensors: Tensors
    dtype: str
    embedding: str
    modules: Mapping[str, str]

    def named(self, path: str) -> str:
        """Return the path by which a config names a module."""
        return self.modules.get(path, path)

    def part(self, name: str, kind: str) -> TensorRecord:
        """Return a tensor. Raises FormatError if it is missing."""
        return part_of(self.tensors, name, kind)

    def scales(self, name: str, kind: str) -> TensorRecord:
        """Return a tensor of scales. Raises FormatError if it is missing or holds integers."""
        scales = self.part(name, kind)
        if not scales.torch_dtype.is_floating_point:
            raise FormatError(f"{name}: {scales.dtype} numbers; only floating-point scales are read in format {kind}")
        return scales


def known_formats() -> str:
    """Return the formats that can be read, for messages."""
    return "fp8, compressed-tensors (float-quantized, int-quantized, pack-quantized), mxfp4, gptq, awq"


def part_of(tensors: Tensors, name: str, kind: str) -> TensorRecord:
    """Return a part of a weight. Raises FormatError if it is missing."""
    if name not in tensors:
        raise FormatError(f"{name}: missing; a weight in format {kind} has it")
    return tensors[name]


def dtype_name(dtype: str) -> str:
    """Return torch's name of a dtype of safetensors."""
    return str(DTYPES[dtype]).removeprefix("torch.")


def _name(record: TensorRecord) -> str:
    return dtype_name(record.dtype)


# -- fp8 -------------------------------------------------------------------------------------------------------------


def _fp8(field: Mapping[str, Any], stored: Stored) -> Formats:
    check_format_fields(FP8, field)
    block = _pair(field.get("weight_block_size"), "weight_block_size")

    def form(path: str) -> StoredFormat:
        codes = stored.part(f"{path}.weight", "fp8")
        if not codes.torch_dtype.is_floating_point:
            raise FormatError(f"{codes.name}: {codes.dtype} numbers, in format fp8")
        inverse, plain = (f"{path}.{part}" for part in ("weight_scale_inv", "weight_scale"))
        if not {plain, inverse} & stored.tensors.keys():
            raise FormatError(f"{inverse}: missing; a weight in format fp8 has it, or weight_scale")
        if inverse in stored.tensors:
            scales = stored.scales(inverse, "fp8")
            return StoredFormat("fp8", stored.dtype, _name(codes), _name(scales), block=block, dims=len(scales.shape))
        scales = stored.scales(plain, "fp8")
        by_rows = 0 if scales.shape in ((), (1,), (1, 1)) else 1
        shared = block if any(block) else (by_rows, 0)
        return StoredFormat("float", stored.dtype, _name(codes), _name(scales), block=shared, dims=len(scales.shape))

    return form


# -- compressed-tensors ----------------------------------------------------------------------------------------------


def _compressed(field: Mapping[str, Any], stored: Stored) -> Formats:
    check_format_fields(COMPRESSED, field)
    check_format_fields(SPARSITY, field.get("sparsity_config") or {}, "sparsity_config")
    groups, ignored = _groups(field), _texts(field.get("ignore") or [], "ignore")

    def form(path: str) -> StoredFormat:
        classes = EMBEDDING_CLASSES if path == stored.embedding else LINEAR_CLASSES
        if target := target_of(stored.named(path), ignored, classes):
            raise FormatError(f"{path}: its weight is stored in codes, but {FIELD}.ignore has {target!r}")
        target = target_of(stored.named(path), [*groups], classes)
        if target is None:
            raise FormatError(f"{path}: its weight is stored in codes, but no group of {FIELD} names it")
        group = groups[target]
        weights = group.get("weights") or {}
        kind = _kind(group.get("format") or field.get("format"), weights)
        if f"{path}.weight_g_idx" in stored.tensors:
            raise FormatError(f"{path}.weight_g_idx: columns out of order are not read in compressed-tensors")
        codes = stored.part(path + (PACKED if kind == "packed" else WEIGHT), kind)
        scales = stored.scales(f"{path}.weight_scale", kind)
        zeros = "" if weights.get("symmetric", True) else _name(stored.part(f"{path}.weight_zero_point", kind))
        names, dims = (_name(codes), _name(scales)), len(scales.shape)
        return StoredFormat(kind, stored.dtype, *names, weights["num_bits"], _block(weights, path), dims, zeros)

    return form


def _groups(field: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Map each target of `config_groups` to its group, the last one if several have it. Raises InputError."""
    groups: dict[str, Mapping[str, Any]] = {}
    schemes = field.get("config_groups") or {}
    if not isinstance(schemes, Mapping):
        raise InputError(f"config.json: {FIELD}: config_groups: {schemes!r:.80} is not an object with groups")
    for name, group in schemes.items():
        where = f"config_groups.{name}"
        checked = check_format_fields(SCHEME, group, where)
        check_format_fields(ARGUMENTS, checked.get("weights") or {}, f"{where}.weights")
        groups |= {target: checked for target in _texts(checked.get("targets") or [], f"{where}.targets")}
    return groups


def target_of(path: str, targets: Sequence[str], classes: Sequence[str]) -> str | None:
    """Return the target that a module belongs to, as the matcher of compressed-tensors chooses it, or None.

    Whole names come first, then patterns, then names of `classes`; each in alphabetical order.
    """
    ordered = sorted(targets, key=lambda target: (PATTERN in target, target))
    named = (target for target in ordered if _matches(target, path))
    return next(named, None) or next((target for target in ordered if target in classes), None)


def _matches(target: str, path: str) -> bool:
    if target.startswith(PATTERN):
        return _pattern(target.removeprefix(PATTERN)).match(path) is not None
    return target == path


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"config.json: {FIELD}: {text!r:.80} is not a regular expression: {error}") from error


def _kind(layout: Any, weights: Mapping[str, Any]) -> str:
    """Return the kind of a scheme of compressed-tensors. Raises InputError for others."""
    known = {"float-quantized": "float", "int-quantized": "int", "pack-quantized": "packed"}
    of_type = {"float": "float", "int": "int"}.get(str(weights.get("type", "")).lower())
    kind = of_type if layout == "naive-quantized" else known.get(str(layout))
    bits, fits = weights.get("num_bits"), of_type in (None, "float" if kind == "float" else "int")
    if kind is None or not fits or type(bits) is not int or not 1 <= bits <= 8 or (kind != "packed" and bits != 8):
        raise InputError(
            f"config.json: {FIELD}: {weights.get('type') or ''} weights of {bits} bits in compressed-tensors' format "
            f"{layout} cannot be read; known are {known_formats()}"
        )
    return kind


def _block(weights: Mapping[str, Any], path: str) -> tuple[int, int]:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:  # as compressed-tensors infers it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "block":
        return _pair(weights.get("block_structure"), "block_structure")
    if strategy == "group":
        if type(size) is not int or size < 1:
            raise FormatError(f"{path}: scales by group, with group_size {size!r:.80}")
        return 1, size
    if strategy in ("channel", "tensor"):
        return (1, 0) if strategy == "channel" else (0, 0)
    raise FormatError(f"{path}: scales by {strategy!r:.80}; known are tensor, channel, group and block")


# -- mxfp4, GPTQ, AWQ ------------------------------------------------------------------------------------------------


def _mxfp4(field: Mapping[str, Any], stored: Stored) -> Formats:
    check_format_fields(MXFP4, field)
    return lambda path: StoredFormat("mxfp4", stored.dtype, "uint8", "uint8", 4, (1, MXFP4_GROUP))


def _gptq(field: Mapping[str, Any], stored: Stored) -> Formats:
    check_format_fields(GPTQ, field)
    layout = _layout(field, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    offset, changes = 0 if layout == "gptq_v2" else 1, _changes(field)
    _gptq_sizes(field, "")

    def form(path: str) -> StoredFormat:
        key, changed = next(
            ((key, own) for key, own in changes.items() if _is_changed(key, stored.named(path))), ("", {})
        )
        if key.startswith(SKIPPED):
            raise FormatError(f"{path}: its weight is stored in codes, but {FIELD}.dynamic skips it by {key!r}")
        own = {**field, **changed}
        bits, group = _gptq_sizes(own, f"dynamic.{key}" if key else "")
        scales, ordered = stored.scales(f"{path}.scales", "gptq"), f"{path}.g_idx" in stored.tensors
        if own.get("desc_act") and group > 0 and not ordered:
            stored.part(f"{path}.g_idx", "gptq with desc_act")
        block = (1, max(group, 0))
        return StoredFormat("gptq", stored.dtype, "int32", _name(scales), bits, block, 2, "int32", offset, ordered)

    return form


def _gptq_sizes(field: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return bits and group size. Raises InputError for sizes that are not read."""
    bits, group = field.get("bits"), field.get("group_size")
    if type(bits) is not int or bits not in GPTQ_BITS or type(group) is not int:
        raise InputError(
            f"config.json: {FIELD}: {f'{where}: ' if where else ''}GPTQ with bits {bits!r:.80} and group_size "
            f"{group!r:.80}; known are 2, 4, 8 bits"
        )
    return bits, group


def _changes(field: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return `dynamic`: pattern -> the fields of the modules that it matches. Raises InputError."""
    changes = field.get("dynamic") or {}
    if not isinstance(changes, Mapping):
        raise InputError(f"config.json: {FIELD}: dynamic: {changes!r:.80} is not an object with patterns")
    for key, own in changes.items():
        _pattern(key.removeprefix(SKIPPED).removeprefix(CHANGED))
        if not key.startswith(SKIPPED):
            _gptq_sizes({**field, **check_format_fields(GPTQ_MODULE, own, f"dynamic.{key}")}, f"dynamic.{key}")
    return dict(changes)


def _is_changed(key: str, path: str) -> bool:
    prefix = SKIPPED if key.startswith(SKIPPED) else CHANGED
    return _pattern(key.removeprefix(prefix)).match(path) is not None


def _awq(field: Mapping[str, Any], stored: Stored) -> Formats:
    check_format_fields(AWQ, field)
    bits, group = field.get("bits"), field.get("group_size")
    _layout(field, ("version", "format"), ("gemm",))
    if type(bits) is not int or bits != 4 or type(group) is not int:
        raise InputError(
            f"config.json: {FIELD}: AWQ with bits {bits!r:.80} and group_size {group!r:.80}; known are 4 bits"
        )

    def form(path: str) -> StoredFormat:
        scales = stored.scales(f"{path}.scales", "awq")
        return StoredFormat("awq", stored.dtype, "int32", _name(scales), bits, (1, max(group, 0)), 2, "int32")

    return form


def _layout(field: Mapping[str, Any], names: Sequence[str], known: Sequence[str]) -> str:
    """Return the layout that these fields name, the first of `known` if none does. Raises InputError."""
    named = {name: str(field[name]).lower() for name in names if field.get(name) is not None}
    if len(set(named.values())) > 1:
        raise InputError(
            f"config.json: {FIELD}: {' and '.join(f'{name}: {value}' for name, value in named.items())} name two "
            "layouts; remove the wrong one"
        )
    layout = next(iter(named.values()), known[0])
    if layout not in known:
        raise InputError(
            f"config.json: {FIELD}: {next(iter(named))}: weights of {field.get('quant_method')} in layout "
            f"{layout!r:.80} cannot be read; known are {', '.join(known)}"
        )
    return layout


def _texts(values: Any, name: str) -> list[str]:
    if isinstance(values, list) and all(isinstance(each, str) for each in values):
        return values
    raise InputError(f"config.json: {FIELD}: {name}: {values!r:.80} is not a list of names")


def _pair(value: Any, name: str) -> tuple[int, int]:
    if value is None:
        return 0, 0
    sizes = value.split("x") if isinstance(value, str) else value  # "128x128" in older files
    if isinstance(sizes, list | tuple) and len(sizes) == 2 and all(str(each).isdecimal() for each in sizes):
        rows, columns = (int(each) for each in sizes)
        if rows and columns:
            return rows, columns
    raise InputError(f"config.json: {FIELD}: {name}: {value!r:.80} is not a pair of sizes")


METHODS: dict[Any, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Stored], Formats]]] = {
    "fp8": ((), _fp8),
    "compressed-tensors": ((PACKED,), _compressed),
    "mxfp4": ((BLOCKS,), _mxfp4),
    "gptq": ((CODES,), _gptq),
    "awq": ((CODES,), _awq),
}
