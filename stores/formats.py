"""Detects weights that a checkpoint stores in formats of other tools, and decodes them.

docs/formats.md#stored-formats. `lamina.stored_lamina` has the formats; `SourceCheckpoint.read` decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lamina.stored_lamina import WORD_BITS, StoredFormat
from manifests.errors import InputError, NumericsError
from stores.format_fields import FIELD
from stores.format_methods import (
    BLOCKS,
    BYTE_CODES,
    CODES,
    METHODS,
    MXFP4_GROUP,
    PACKED,
    SCALES,
    WEIGHT,
    FormatError,
    Stored,
    Tensors,
    dtype_name,
    known_formats,
    part_of,
)
from stores.headers import DTYPES, TensorRecord

E8M0_NAN = 255
LOGICAL_DTYPES = ("bfloat16", "float16", "float32")


def stored_weights(
    config: Mapping[str, Any],
    tensors: Tensors,
    embedding: str = "",
    file_names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, TensorRecord], list[str]]:
    """Return the tensors with each stored weight in place of its parts, and a list of faults.

    `config`: config.json of a source. `embedding`: the path of its table of token embeddings. `file_names`: the names
    in the files of tensors that have others here. Raises InputError for a method of quantization, or a field of it,
    that is not known.
    """
    field = config.get(FIELD)
    if not field:
        return dict(tensors), []
    method = field.get("quant_method") if isinstance(field, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(
            f"config.json: {FIELD}: weights of format {method or 'unnamed'!r} cannot be read; known are "
            f"{known_formats()}; or give the unquantised model, in float32, bfloat16 or float16"
        )
    ends, described = METHODS[method]
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    modules = {name.rpartition(".")[0]: other.rpartition(".")[0] for name, other in file_names.items()}
    dtype = dtype if dtype in LOGICAL_DTYPES else LOGICAL_DTYPES[0]
    form_of = described(field, Stored(tensors, dtype, embedding, modules))
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
        except FormatError as error:
            faults.append(str(error))
            continue
        weights[record.name] = record
        used |= {part.name for part in record.stored}
    return {name: record for name, record in tensors.items() if name not in used} | weights, faults


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
        record = part_of(tensors, f"{path}.{part}", form.kind)
        if record.shape != size:
            raise FormatError(f"{record.name}: shape {list(record.shape)}, its weight {list(shape)} has {list(size)}")
        if dtype_name(record.dtype) != dtype and not (part == "weight_shape" and record.dtype in ("I32", "I64")):
            raise FormatError(f"{record.name}: {record.dtype} numbers, by its format {dtype}")
        parts[part] = record
    return _with_parts(f"{path}{WEIGHT}", shape, form, parts)


def _experts_record(path: str, form: StoredFormat, tensors: Tensors) -> TensorRecord:
    """Return the record of fused experts (E, I, O): blocks (E, O, G, 16) and scales (E, O, G)."""
    blocks, scales = (part_of(tensors, path + end, form.kind) for end in (BLOCKS, SCALES))
    if (
        len(blocks.shape) != 4
        or blocks.shape[3] != MXFP4_GROUP // 2
        or scales.shape != blocks.shape[:3]
        or {blocks.dtype, scales.dtype} != {"U8"}
    ):
        raise FormatError(
            f"{blocks.name}: {blocks.dtype} {list(blocks.shape)} beside {scales.dtype} {list(scales.shape)}, expected "
            "bytes (experts, rows, groups, 16) and (experts, rows, groups)"
        )
    experts, rows, groups, _ = blocks.shape
    parts = {"weight_blocks": blocks, "weight_scales": scales}
    return _with_parts(path, (experts, groups * MXFP4_GROUP, rows), form, parts)


def _with_parts(
    name: str, shape: tuple[int, ...], form: StoredFormat, parts: Mapping[str, TensorRecord]
) -> TensorRecord:
    first, dtype = next(iter(parts.values())), {dtype_name(each): each for each in DTYPES}[form.dtype]
    return TensorRecord(name, dtype, shape, first.file, first.begin, first.end, form=form, parts=tuple(parts.items()))


def _shape(path: str, form: StoredFormat, tensors: Tensors) -> tuple[int, int]:
    """Return the shape (O, I) of a weight."""
    names = {"packed": PACKED, "gptq": CODES, "awq": CODES, "mxfp4": f"{WEIGHT}{SCALES}"}
    codes = part_of(tensors, path + names.get(form.kind, WEIGHT), form.kind)
    if len(codes.shape) != 2:
        raise FormatError(f"{codes.name}: shape {list(codes.shape)}, expected a matrix")
    rows, columns = codes.shape
    if form.kind == "packed":
        scales = part_of(tensors, f"{path}.weight_scale", form.kind)
        group = form.block[1]
        return rows, scales.shape[-1] * group if group and scales.shape else columns * WORD_BITS // form.bits
    if form.kind == "gptq":
        return columns, rows * WORD_BITS // form.bits
    if form.kind == "mxfp4":
        return rows, columns * MXFP4_GROUP
    return (columns * WORD_BITS // form.bits, rows) if form.kind == "awq" else (rows, columns)


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
