"""Records of parts of weights that a checkpoint stores in formats of other tools (`stores.formats`)."""

from __future__ import annotations

import math
from dataclasses import replace

from lamina.stored_lamina import WORD_BITS, StoredFormat
from manifests.parts import FusedPart
from stores.format_methods import WEIGHT
from stores.headers import TensorRecord


def cut(record: TensorRecord, part: FusedPart) -> TensorRecord:
    """Return the record of a part of a weight. Its stored parts are cut to its rows if the format allows it; whole rows
    in their order can then stay in the format."""
    if record.form is not None and record.form.kind == "mxfp4":
        return _cut_expert(record, part)
    row = math.prod(record.shape[1:])
    begin, end = part.begin // row, math.ceil(part.end / row)
    if part.begin % row or part.end % row or (rows := _cut_rows(record, begin, end)) is None:
        assert part.is_whole_block or part.begin == 0, part
        if part.begin or part.block != record.shape:
            part = replace(part, begin=0, block=record.shape, first=begin) if part.is_whole_block else part
        return replace(record, name=part.name, shape=part.shape, part=part)
    if part.is_whole_block:
        path = part.name.removesuffix(WEIGHT)
        rows = {key: at if key == "weight_shape" else replace(at, name=f"{path}.{key}") for key, at in rows.items()}
    first, of_rows = next(iter(rows.values())), None if part.is_whole_block else replace(part, begin=0)
    cut_record = replace(record, name=part.name, shape=part.shape, begin=first.begin, end=first.end)
    return replace(cut_record, part=of_rows, parts=tuple(rows.items()))


def _cut_expert(record: TensorRecord, part: FusedPart) -> TensorRecord:
    """Return the record of a matrix of one of the fused experts (E, I, O), whose rows are in stored order or take
    turns with those of another."""
    experts, inputs, rows = record.shape
    assert part.transposed, part
    assert part.block == (inputs, rows), part
    expert, path, cut_parts = part.begin // (inputs * rows), part.name.removesuffix(WEIGHT), {}
    for key, at in record.parts:
        size, shape = at.num_bytes // experts, (part.shape[0], *at.shape[2:])
        name, begin = f"{path}.{key}", at.begin + expert * size
        within = FusedPart(name, shape, 0, at.shape[1:], first=part.first, step=part.step)
        view = None if within.is_whole_block else within
        cut_parts[key] = replace(at, name=name, shape=shape, begin=begin, end=begin + size, part=view)
    begin, end = (getattr(cut_parts["weight_blocks"], name) for name in ("begin", "end"))
    return replace(record, name=part.name, shape=part.shape, begin=begin, end=end, parts=tuple(cut_parts.items()))


def _cut_rows(record: TensorRecord, begin: int, end: int) -> dict[str, TensorRecord] | None:
    """Return the stored parts of some rows of a weight, or None if they cannot be cut there."""
    assert record.form is not None
    steps, rows = _row_steps(record.form), {}
    if not steps:
        return None
    for part, at in record.parts:
        step = steps.get(part, 0)
        if not step or not at.shape or at.shape[0] == 1:
            rows[part] = at  # the same for all rows
            continue
        if begin % step or (end % step and end != record.shape[0]):
            return None
        first, last, size = begin // step, math.ceil(end / step), at.num_bytes // at.shape[0]
        rows[part] = replace(
            at,
            name=f"{at.name}[{first}:{last}]",
            shape=(last - first, *at.shape[1:]),
            begin=at.begin + first * size,
            end=at.begin + last * size,
        )
    return rows


def _row_steps(form: StoredFormat) -> dict[str, int]:
    """Return the number of rows of a weight for each row of a part. Missing parts are not cut. Empty for formats that
    are not stored by rows."""
    if form.kind in ("gptq", "awq"):
        return {}
    codes = dict.fromkeys(("weight", "weight_packed"), 1)
    scales = dict.fromkeys(("weight_scale_inv", "weight_scale"), form.block[0])
    return {**codes, **scales, "weight_zero_point": WORD_BITS // form.bits if form.kind == "packed" else form.block[0]}
