"""Reads config.json, the index and the headers of a checkpoint, and tensors of its files. Collects all faults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manifests.errors import InputError, StorageError
from stores.headers import TensorRecord, read_header
from stores.json_files import MAX_JSON_BYTES, parse_json
from stores.model_files import CONFIG_FILE, INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE
from stores.storage import Readable, Storage

MAX_FAULTS = 20


def raise_faults(what: str, faults: Sequence[str]) -> None:
    """Raise an InputError that lists the first 20 faults, if there are any."""
    if faults:
        more = [f"... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise InputError("\n  ".join([f"{what}:", *faults[:MAX_FAULTS], *more]))


def read_object(storage: Storage, name: str, faults: list[str]) -> dict[str, Any]:
    """Return the object of a JSON file. If it is damaged, add the faults to `faults` and return an empty object."""
    path = storage.at(name)
    if not storage.has(name):
        faults.append(f"{path}: missing; the directory of a transformers model has it")
        return {}
    try:
        content = parse_json(storage.read_whole(name, MAX_JSON_BYTES), infinite=name == CONFIG_FILE)
    except (ValueError, RecursionError) as error:
        faults.append(f"{path}: not JSON: {error or type(error).__name__}")
        return {}
    if not isinstance(content, dict):
        faults.append(f"{path}: a JSON {type(content).__name__}, expected an object")
        return {}
    return content


def indexed_names(storage: Storage, present: frozenset[str], faults: list[str]) -> dict[str, list[str] | None]:
    """Return file -> its tensors' names in the index; files ascending."""
    path = storage.at(INDEX_FILE)
    if INDEX_FILE not in present:
        faults.append(_why_no_weights(storage.at(), present))
        return {}
    before = len(faults)
    weight_map = read_object(storage, INDEX_FILE, faults).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if len(faults) == before:
            faults.append(f"{path}: weight_map is {type(weight_map).__name__}, expected an object of tensor name: file")
        return {}
    grouped: dict[str, list[str]] = {}
    for name, owner in weight_map.items():
        grouped.setdefault(str(owner), []).append(name)
    names_of: dict[str, list[str] | None] = {}
    for file, names in sorted(grouped.items()):
        if _is_plain_file_name(file) and all(isinstance(weight_map[name], str) for name in names):
            names_of[file] = names
        else:
            faults.append(
                f"{path}: {names[0]!r} is assigned to {file!r}: not a safetensors file name in this directory"
            )
    return names_of


def _is_plain_file_name(file: str) -> bool:
    return file.endswith(".safetensors") and file == os.path.basename(file) and "\\" not in file and "\0" not in file


def _why_no_weights(place: str, present: frozenset[str]) -> str:
    pickles = sorted(name for name in present if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        return (
            f"{place}: only pickled weights ({', '.join(pickles[:3])}): refused, because "
            "loading a pickle runs code of its author; convert them to safetensors "
            "(save_pretrained of transformers writes it) where you trust them"
        )
    return f"{place}: neither {SINGLE_FILE} nor {INDEX_FILE}"


def named_tensors(
    storage: Storage, names_of: Mapping[str, list[str] | None], faults: list[str]
) -> dict[str, TensorRecord]:
    """Return the records of the named tensors of each file; None: all of them."""
    tensors: dict[str, TensorRecord] = {}
    holders: dict[str, str] = {}
    for file, names in names_of.items():
        try:
            records = read_header(storage, file)
        except InputError as error:
            faults.append(str(error))
            continue
        # transformers ignores the index and loads the last of them.
        faults += [_held_twice(storage, name, holders[name], file) for name in records if name in holders]
        holders |= dict.fromkeys(records, file)
        path, names = storage.at(file), list(records) if names is None else names
        faults += [f"{path}: tensor {name!r} is in the index, not in the file" for name in names if name not in records]
        tensors |= {name: records[name] for name in names if name in records}
    return tensors


def _held_twice(storage: Storage, name: str, first: str, second: str) -> str:
    return (
        f"{storage.at(second)}: tensor {name!r} is in {first}, too, and loaders differ in which they take; "
        "write the model again with one of them (save_pretrained of transformers)"
    )


def read_tensors(file: Readable, records: Sequence[TensorRecord]) -> dict[TensorRecord, torch.Tensor]:
    """Return tensors of one file, each in its own memory; `records` ascend. Raises StorageError on a short file."""
    # The file is not mapped: its offsets need not be aligned, while torch's allocator aligns to 64 bytes.
    spans = {(record.begin, record.end): record for record in records}  # parts of one block are read together
    buffers = {span: torch.empty(span[1] - span[0], dtype=torch.uint8) for span in spans}
    counts = file.read_spans([(begin, buffer.numpy().data) for (begin, _), buffer in buffers.items()])
    for record, num_bytes in zip(spans.values(), counts, strict=True):
        if num_bytes < record.end - record.begin:
            raise short_read(record, num_bytes)
    tensors: dict[TensorRecord, torch.Tensor] = {}
    for record in records:
        numbers = buffers[record.begin, record.end].view(record.torch_dtype)
        if record.part is None:
            tensors[record] = numbers.reshape(record.shape)
        else:
            part = record.part.within(numbers.reshape(record.part.block))
            tensors[record] = part.clone(memory_format=torch.contiguous_format).view(record.shape)
    return tensors


def short_read(record: TensorRecord, num_bytes: int) -> StorageError:
    """Return the error of a tensor of which the file holds only `num_bytes` bytes."""
    return StorageError(
        f"{record.file}: tensor {record.name!r} ends after {num_bytes} of {record.end - record.begin} bytes: the file "
        "was truncated after the job opened it; restore it, then run the same command again"
    )
