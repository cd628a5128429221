"""Checks OUTPUT alone: that index, headers, compression record, config and numbers agree."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import LayersConfig
from lamina.factored_lamina import stored_state
from pipeline.checkpoint.compression_record import index_arguments
from pipeline.checkpoint.counting import compressed_cache, dense_cache, source_sizes, stored_sizes
from pipeline.families.latent_config import latent_form
from pipeline.families.registry import geometry_of
from pipeline.inputs.checkpoints import build_on_meta, expected_tensors
from pipeline.kernels.checks import all_finite
from pipeline.rounding.schemes import packed_dtype
from stores.checkpoint import index_content
from stores.headers import read_header
from stores.source import INDEX_FILE, SourceCheckpoint
from stores.storage import Storage

NOT_OF_FORM = ("dtype", "shape", "sha256", "origin", "shard", "healed")  # fields of an entry beside its form


@dataclass(frozen=True)
class Finding:
    """The result of one check; `faults` is empty when it passed."""

    check: str
    detail: str
    faults: tuple[str, ...] = ()


def check_output_files(output: Storage, compression: Mapping[str, Any]) -> Finding:
    """Check that headers and index have exactly the tensors of the record, with its dtypes and shapes."""
    faults = []
    for shard in sorted({*compression["shards"], *(entry["shard"] for entry in compression["tensors"].values())}):
        path = output.at(shard)
        if shard not in compression["shards"]:
            faults.append(f"{path}: named by tensors, but not among the shards of compression.json")
        recorded = {
            name: (entry["dtype"], entry["shape"])
            for name, entry in compression["tensors"].items()
            if entry["shard"] == shard
        }
        stored = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in read_header(output, shard).items()}
        faults += [f"{path}: {name}: in compression.json only" for name in sorted(recorded.keys() - stored.keys())]
        faults += [f"{path}: {name}: not in compression.json" for name in sorted(stored.keys() - recorded.keys())]
        for name in sorted(recorded.keys() & stored.keys()):
            (dtype, shape), (said_dtype, said_shape) = stored[name], recorded[name]
            if stored[name] != recorded[name]:
                faults.append(f"{path}: {name}: {dtype} {shape}, compression.json says {said_dtype} {said_shape}")
    if output.read(INDEX_FILE) != index_content(*index_arguments(compression)):
        faults.append(f"{output.at(INDEX_FILE)}: differs from the index that compression.json describes")
    return Finding("contents", f"{len(compression['tensors'])} tensors in headers, index and record", tuple(faults))


def check_forms(checkpoint: SourceCheckpoint, config: Mapping[str, Any], compression: Mapping[str, Any]) -> Finding:
    """Check that the checkpoint has the tensors, shapes and dtypes that the forms in config.json require."""
    faults, forms = [], recorded_forms(compression)
    if not latent_form(forms) and config["forms"] != forms:
        faults.append("config.json: its forms differ from those of compression.json's layers")
    model = build_on_meta(config)
    dtypes = {name: tensor.dtype for name, tensor in stored_state(model).items()}
    expected = {
        name: (shape, dtypes.get(name) or packed_dtype(name)) for name, shape in expected_tensors(config).items()
    }
    tensors = checkpoint.tensors
    for name, (shape, dtype) in expected.items():
        if name not in tensors:
            faults.append(f"{name}: missing, though the config's forms require it")
        elif tensors[name].shape != shape:
            faults.append(f"{name}: shape {list(tensors[name].shape)}, the config's forms require {list(shape)}")
        elif tensors[name].torch_dtype != dtype and not (dtype.is_floating_point and _is_plain_float(tensors[name])):
            faults.append(f"{name}: {tensors[name].dtype} numbers, the config's forms require {dtype}")
    for name in sorted(tensors.keys() - expected.keys()):
        if compression["tensors"][name]["origin"] != "copied":  # old checkpoints have buffers that no model uses
            faults.append(f"{name}: belongs to no form in the config")
    faults += _form_faults(config["block"]["layers"], forms, compression)
    faults += _bitmap_faults(checkpoint, model)
    return Finding("forms", f"names, shapes and kinds of {len(expected)} tensors of the model", tuple(faults))


def check_values(checkpoint: SourceCheckpoint, compression: Mapping[str, Any]) -> Finding:
    """Check that every number is finite and that each tensor has its digest. Needs a few megabytes of memory."""
    faults = []
    for name, record in checkpoint.stored.items():
        digest, finite = hashlib.sha256(), True
        for piece in checkpoint.copy_bytes(name):
            digest.update(piece)
            finite = finite and _is_finite(piece, record.torch_dtype)
        if not finite:
            faults.append(f"{record.file}: {name}: holds NaN or infinity")
        if digest.hexdigest() != compression["tensors"][name]["sha256"]:
            faults.append(f"{record.file}: {name}: sha256 differs from what compression.json says")
    return Finding("values", f"{len(checkpoint.stored)} tensors finite, each with its sha256", tuple(faults))


def check_counts(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    compression: Mapping[str, Any],
    original: SourceCheckpoint | None,
    standard: Mapping[str, Any],
) -> Finding:
    """Check numbers, bytes and cache sizes, also those of the dense model if `original` is its checkpoint.

    `standard`: the dense model's config, if `original` is given.
    """
    itemsize, layers = getattr(torch, config["dtype"]).itemsize, config["block"]["layers"]
    compressed = source_sizes(checkpoint, layers, itemsize) | compressed_cache(LayersConfig(**config), itemsize)
    dense = {} if original is None else source_sizes(original, layers, itemsize)
    if standard or not latent_form(recorded_forms(compression)):
        dense |= dense_cache(geometry_of(standard or config), itemsize)
    detail = f"{compressed['parameters']:,} numbers, {compressed['bytes']:,} bytes"
    faults = _count_faults(compressed, dense, compression)
    if faults:  # records of earlier versions count the codes of storage formats by their bytes
        by_bytes = [_sizes_by_bytes(each, layers, itemsize) if each else {} for each in (checkpoint, original)]
        if not _count_faults(compressed | by_bytes[0], dense | by_bytes[1], compression):
            return Finding("counts", f"{detail}; compression.json counts weights in storage formats by their bytes")
    return Finding("counts", detail, faults)


def _count_faults(
    compressed: Mapping[str, int], dense: Mapping[str, int], compression: Mapping[str, Any]
) -> tuple[str, ...]:
    return tuple(
        f"{name}.{side}: counted {size:,}, compression.json says {compression['counts'][name][side]:,}"
        for side, sizes in (("compressed", compressed), ("dense", dense))
        for name, size in sizes.items()
        if size != compression["counts"][name][side]
    )


def _sizes_by_bytes(counted: SourceCheckpoint, layers: str, itemsize: int) -> dict[str, int]:
    tensors = [(name, record.dtype, record.shape) for name, record in counted.stored.items()]
    return stored_sizes(tensors, layers, itemsize)


def _is_plain_float(record: Any) -> bool:
    return bool(record.torch_dtype.is_floating_point and record.torch_dtype.itemsize > 1)


def recorded_forms(compression: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return role -> form of each layer, as compression.json has them."""
    return [layer["forms"] for layer in compression["layers"]]


def _form_faults(
    layers_path: str, layers: Sequence[Mapping[str, Any]], compression: Mapping[str, Any]
) -> Iterator[str]:
    """Check that the recorded form of each tensor is a form of its layer."""
    prefix = f"{layers_path}."
    for name, entry in compression["tensors"].items():
        form = {key: value for key, value in entry.items() if key not in NOT_OF_FORM}
        if form == {"form": "dense"}:
            continue
        layer = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        forms = layers[int(layer)] if layer.isdecimal() and int(layer) < len(layers) else {}
        if form not in forms.values():
            yield f"{name}: compression.json says {form}, which is not a form of its layer"


def _bitmap_faults(checkpoint: SourceCheckpoint, model: nn.Module) -> Iterator[str]:
    """Check that the bitmap of a sparse core marks as many positions as there are values, and none beyond its end."""
    for path, module in model.named_modules():
        name = f"{path}.mask"
        if not hasattr(module, "nnz") or name not in checkpoint.tensors:
            continue
        content = b"".join(checkpoint.copy_bytes(name))
        marked = int.from_bytes(content, "little")
        if marked.bit_count() != module.nnz or marked.bit_length() > math.prod(module.shape):
            yield f"{name}: marks {marked.bit_count()} positions, the config's form has {module.nnz} values"


def _is_finite(piece: bytes, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point:
        return True
    numbers = torch.frombuffer(bytearray(piece), dtype=dtype)
    return bool(all_finite(numbers if dtype.itemsize > 1 else numbers.float()))
