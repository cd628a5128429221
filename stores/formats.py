"""Detects weights that a checkpoint stores in formats of other tools, and decodes them.

docs/formats.md#stored-formats. `lamina.stored_lamina` has the formats; `SourceCheckpoint.read` decodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lamina.stored_lamina import WORD_BITS, StoredFormat
from manifests.errors import InputError, NumericsError
from stores.headers import DTYPES, TensorRecord

FIELD = "quantization_config"  # of a source's config.json
WEIGHT, PACKED, CODES = ".weight", ".weight_packed", ".qweight"
BLOCKS, SCALES = "_blocks", "_scales"  # of fused experts, and behind WEIGHT of a matrix
BYTE_CODES = ("F8_E4M3", "F8_E5M2", "I8")
MXFP4_GROUP, E8M0_NAN = 32, 255
LOGICAL_DTYPES = ("bfloat16", "float16", "float32")
Tensors = Mapping[str, TensorRecord]


def known_formats() -> str:
    """Return the formats that can be read, for messages."""
    return "fp8, compressed-tensors (float-quantized, int-quantized, pack-quantized), mxfp4, gptq, awq"


def stored_weights(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, TensorRecord], list[str]]:
    """Return the tensors with each stored weight in place of its parts, and a list of faults.

    `config`: config.json of a source. Raises InputError for a method of quantization that is not known.
    """
    field = config.get(FIELD)
    if not field:
        return dict(tensors), []
    method = field.get("quant_method") if isinstance(field, dict) else None
    if method not in METHODS:
        raise InputError(
            f"config.json: {FIELD}: weights of format {method or 'unnamed'!r} cannot be read; known are "
            f"{known_formats()}; or give the unquantised model, in float32, bfloat16 or float16"
        )
    ends, described = METHODS[method]
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    form_of = described(field, tensors, dtype if dtype in LOGICAL_DTYPES else LOGICAL_DTYPES[0])
    paths = _paths(tensors, ends)
    if not paths:
        raise InputError(
            f"config.json: {FIELD}: no weight is stored in format {method}, which it names; remove the field"
        )
    return _decoded(dict.fromkeys(paths, form_of), tensors)


def with_formats(modules: Mapping[str, StoredFormat], tensors: Tensors) -> tuple[dict[str, TensorRecord], list[str]]:
    """Return what `stored_weights` returns, for modules of known formats."""
    return _decoded({path: lambda _, form=form: form for path, form in modules.items()}, tensors)  # type: ignore[misc]


def _decoded(
    forms: Mapping[str, Callable[[str], StoredFormat]], tensors: Tensors
) -> tuple[dict[str, TensorRecord], list[str]]:
    weights, used, faults = {}, set(), []
    for path, form_of in forms.items():
        try:
            record = weight_record(path, form_of(path), tensors)
        except _FormatError as error:
            faults.append(str(error))
            continue
        weights[record.name] = record
        used |= {part.name for part in record.stored}
    return {name: record for name, record in tensors.items() if name not in used} | weights, faults


class _FormatError(ValueError):
    """The tensors of a weight do not fit together."""


def _paths(tensors: Tensors, ends: tuple[str, ...]) -> list[str]:
    """Return the modules whose weights are codes, in tensors that end in one of `ends` or hold numbers of a byte."""
    paths = [name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)]
    plain = (name for name, record in tensors.items() if name.endswith(WEIGHT) and record.dtype in BYTE_CODES)
    return [*paths, *(name.removesuffix(WEIGHT) for name in plain)]


def weight_record(path: str, form: StoredFormat, tensors: Tensors) -> TensorRecord:
    """Return the record of the weight of the module at `path`, by the names of its parts in `tensors`.

    Raises ValueError for parts that are missing, or do not fit the format.
    """
    if form.kind == "mxfp4" and f"{path}{WEIGHT}{BLOCKS}" not in tensors:
        return _experts_record(path, form, tensors)
    shape = _shape(path, form, tensors)
    parts = {}
    for part, (size, dtype) in form.parts(*shape).items():
        record = _part(tensors, f"{path}.{part}", form.kind)
        if record.shape != size:
            raise _FormatError(f"{record.name}: shape {list(record.shape)}, its weight {list(shape)} has {list(size)}")
        if _name(record) != dtype and not (part == "weight_shape" and record.dtype in ("I32", "I64")):
            raise _FormatError(f"{record.name}: {record.dtype} numbers, by its format {dtype}")
        parts[part] = record
    return _with_parts(f"{path}{WEIGHT}", shape, form, parts)


def _experts_record(path: str, form: StoredFormat, tensors: Tensors) -> TensorRecord:
    """Return the record of fused experts (E, I, O): blocks (E, O, G, 16) and scales (E, O, G)."""
    blocks, scales = (_part(tensors, path + end, form.kind) for end in (BLOCKS, SCALES))
    if (
        len(blocks.shape) != 4
        or blocks.shape[3] != MXFP4_GROUP // 2
        or scales.shape != blocks.shape[:3]
        or {blocks.dtype, scales.dtype} != {"U8"}
    ):
        raise _FormatError(
            f"{blocks.name}: {blocks.dtype} {list(blocks.shape)} beside {scales.dtype} {list(scales.shape)}, expected "
            "bytes (experts, rows, groups, 16) and (experts, rows, groups)"
        )
    experts, rows, groups, _ = blocks.shape
    parts = {"weight_blocks": blocks, "weight_scales": scales}
    return _with_parts(path, (experts, groups * MXFP4_GROUP, rows), form, parts)


def _with_parts(
    name: str, shape: tuple[int, ...], form: StoredFormat, parts: Mapping[str, TensorRecord]
) -> TensorRecord:
    first, dtype = next(iter(parts.values())), {_dtype_name(each): each for each in DTYPES}[form.dtype]
    return TensorRecord(name, dtype, shape, first.file, first.begin, first.end, form=form, parts=tuple(parts.items()))


def _shape(path: str, form: StoredFormat, tensors: Tensors) -> tuple[int, int]:
    """Return the shape (O, I) of a weight."""
    names = {"packed": PACKED, "gptq": CODES, "awq": CODES, "mxfp4": f"{WEIGHT}{SCALES}"}
    codes = _part(tensors, path + names.get(form.kind, WEIGHT), form.kind)
    if len(codes.shape) != 2:
        raise _FormatError(f"{codes.name}: shape {list(codes.shape)}, expected a matrix")
    rows, columns = codes.shape
    if form.kind == "packed":
        scales = _part(tensors, f"{path}.weight_scale", form.kind)
        group = form.block[1]
        return rows, scales.shape[-1] * group if group and scales.shape else columns * WORD_BITS // form.bits
    if form.kind == "gptq":
        return columns, rows * WORD_BITS // form.bits
    if form.kind == "mxfp4":
        return rows, columns * MXFP4_GROUP
    return (columns * WORD_BITS // form.bits, rows) if form.kind == "awq" else (rows, columns)


def _part(tensors: Tensors, name: str, kind: str) -> TensorRecord:
    if name not in tensors:
        raise _FormatError(f"{name}: missing; a weight in format {kind} has it")
    return tensors[name]


def _name(record: TensorRecord) -> str:
    return _dtype_name(record.dtype)


def _dtype_name(dtype: str) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.")


def keeps(record: TensorRecord) -> bool:
    """Return True for a weight in a format that a Lamina checkpoint keeps: its parts are whole, with its own names."""
    path = record.name.removesuffix(WEIGHT)
    return bool(record.parts) and record.part is None and all(at.name == f"{path}.{part}" for part, at in record.parts)


def holds_parts(record: TensorRecord, tensors: Mapping[str, Tensor]) -> bool:
    """Return True if `tensors` hold the parts of a weight in the format of its record.

    Codes that Lamina rounded itself have a table of levels, or other shapes; where they have neither, both formats
    decode them alike.
    """
    if f"{record.name.removesuffix(WEIGHT)}.weight_levels" in tensors:
        return False
    present = ((at, tensors.get(at.name)) for at in record.stored)
    return all(
        tensor is not None and (tensor.dtype, tuple(tensor.shape)) == (at.torch_dtype, at.shape)
        for at, tensor in present
    )


def decode(record: TensorRecord, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight of the record's shape and dtype, decoded from its stored parts.

    Raises NumericsError for scales that are not finite, or zero where codes are not, and InputError for parts that
    contradict each other.
    """
    form, path = record.form, record.name
    assert form is not None
    name = next(part for part in parts if "scale" in part)
    scales = parts[name]
    if form.kind == "mxfp4" or scales.dtype == torch.float8_e8m0fnu:
        if bool((scales.view(torch.uint8) == E8M0_NAN).any()):
            raise NumericsError(f"source: {path}: its {name} hold NaN; the checkpoint is damaged")
    elif not bool(torch.isfinite(scales.float()).all()):
        raise NumericsError(f"source: {path}: its {name} hold NaN or infinity; the checkpoint is damaged")
    elif bool((zero := scales == 0).any()) and bool(form.decode({**parts, name: zero.to(scales.dtype)}).any()):
        raise NumericsError(f"source: {path}: its {name} hold zeros for codes that are not; the checkpoint is damaged")
    if "weight_shape" in parts and record.part is None and int(parts["weight_shape"][1]) != record.shape[1]:
        raise InputError(f"source: {path}: weight_shape {parts['weight_shape'].tolist()}, expected {record.shape}")
    if "g_idx" in parts and not 0 <= int(parts["g_idx"].min()) <= int(parts["g_idx"].max()) < scales.shape[0]:
        raise InputError(f"source: {path}: g_idx names groups beyond the {scales.shape[0]} that have scales")
    weight = form.decode(parts)
    if record.part is None:
        return weight
    block = weight.flatten()[record.part.begin : record.part.end].view(record.part.block)
    return record.part.within(block).clone(memory_format=torch.contiguous_format).view(record.shape)  # type: ignore[no-any-return]


# -- methods: each returns a function from a module's path to its format ---------------------------------------------

Formats = Callable[[str], StoredFormat]


def _fp8(field: Mapping[str, Any], tensors: Tensors, dtype: str) -> Formats:
    block = _pair(field.get("weight_block_size"), "weight_block_size")

    def form(path: str) -> StoredFormat:
        codes, scales = (_part(tensors, f"{path}.{part}", "fp8") for part in ("weight", "weight_scale_inv"))
        return StoredFormat("fp8", dtype, _name(codes), _name(scales), block=block, dims=len(scales.shape))

    return form


def _compressed(field: Mapping[str, Any], tensors: Tensors, dtype: str) -> Formats:
    groups = list((field.get("config_groups") or {}).values())

    def form(path: str) -> StoredFormat:
        group = _group_of(path, groups)
        weights = group.get("weights") or {}
        kind = _kind(group.get("format") or field.get("format"), weights)
        codes = _part(tensors, path + (PACKED if kind == "packed" else WEIGHT), kind)
        scales, zeros = _part(tensors, f"{path}.weight_scale", kind), tensors.get(f"{path}.weight_zero_point")
        if f"{path}.weight_g_idx" in tensors:
            raise _FormatError(f"{path}.weight_g_idx: columns out of order are not read in compressed-tensors")
        names = _name(codes), _name(scales)
        block, dims = _block(weights, path), len(scales.shape)
        return StoredFormat(kind, dtype, *names, weights["num_bits"], block, dims, _name(zeros) if zeros else "")

    return form


def _kind(layout: Any, weights: Mapping[str, Any]) -> str:
    """Return the kind of a scheme of compressed-tensors. Raises InputError for others."""
    known = {"float-quantized": "float", "int-quantized": "int", "pack-quantized": "packed"}
    kind = {"float": "float", "int": "int"}.get(weights.get("type", "")) if layout == "naive-quantized" else None
    bits = weights.get("num_bits")
    kind = kind or known.get(str(layout))
    if kind is None or type(bits) is not int or not 1 <= bits <= 8 or (kind != "packed" and bits != 8):
        raise InputError(
            f"config.json: {FIELD}: weights of {bits} bits in compressed-tensors' format {layout} cannot be read; "
            f"known are {known_formats()}"
        )
    return kind


def _group_of(path: str, groups: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the group of a config that a module belongs to. A group that names the module comes before one that names
    its class."""
    matching = [
        (target, group) for group in groups for target in group.get("targets", ()) if _matches(str(target), path)
    ]
    if not matching:
        raise _FormatError(f"{path}: its weight is stored in codes, but no group of {FIELD} names it")
    return min(matching, key=lambda match: match[0] == "Linear")[1]


def _matches(target: str, path: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), path) is not None
    return target in ("Linear", path)


def _block(weights: Mapping[str, Any], path: str) -> tuple[int, int]:
    strategy = weights.get("strategy")
    if strategy == "block":
        return _pair(weights.get("block_structure"), "block_structure")
    if strategy == "group":
        return 1, int(weights["group_size"])
    if strategy in ("channel", "tensor"):
        return (1, 0) if strategy == "channel" else (0, 0)
    raise _FormatError(f"{path}: scales by {strategy!r}; known are tensor, channel, group and block")


def _mxfp4(field: Mapping[str, Any], tensors: Tensors, dtype: str) -> Formats:
    return lambda path: StoredFormat("mxfp4", dtype, "uint8", "uint8", 4, (1, MXFP4_GROUP))


def _gptq(field: Mapping[str, Any], tensors: Tensors, dtype: str) -> Formats:
    bits, group = field.get("bits"), field.get("group_size")
    if bits not in (2, 4, 8) or type(group) is not int:
        raise InputError(f"config.json: {FIELD}: GPTQ with bits {bits} and group_size {group}; known are 2, 4, 8 bits")
    offset = 0 if field.get("checkpoint_format") == "gptq_v2" else 1

    def form(path: str) -> StoredFormat:
        scales = _part(tensors, f"{path}.scales", "gptq")
        block = (1, group) if group > 0 else (1, 0)
        ordered = f"{path}.g_idx" in tensors
        return StoredFormat("gptq", dtype, "int32", _name(scales), bits, block, 2, "int32", offset, ordered)

    return form


def _awq(field: Mapping[str, Any], tensors: Tensors, dtype: str) -> Formats:
    bits, group, version = field.get("bits"), field.get("group_size"), str(field.get("version", "gemm")).lower()
    if bits != 4 or type(group) is not int or version != "gemm":
        raise InputError(
            f"config.json: {FIELD}: AWQ of version {version} with bits {bits} and group_size {group}; known is gemm "
            "with 4 bits"
        )

    def form(path: str) -> StoredFormat:
        scales = _part(tensors, f"{path}.scales", "awq")
        return StoredFormat("awq", dtype, "int32", _name(scales), bits, (1, max(group, 0)), 2, "int32")

    return form


def _pair(value: Any, name: str) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int and each > 0 for each in value):
        return value[0], value[1]
    raise InputError(f"config.json: {FIELD}: {name}: {value!r:.80} is not a pair of sizes")


METHODS: dict[Any, tuple[tuple[str, ...], Callable[[Mapping[str, Any], Tensors, str], Formats]]] = {
    "fp8": ((), _fp8),
    "compressed-tensors": ((PACKED,), _compressed),
    "mxfp4": ((BLOCKS,), _mxfp4),
    "gptq": ((CODES,), _gptq),
    "awq": ((CODES,), _awq),
}
