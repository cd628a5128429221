"""What `verify` proves from OUTPUT alone: that index, headers, compression, config and numbers agree."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import LayersConfig
from lamina.factored_lamina import stored_state
from pipeline.checkpoint.compression_record import index_arguments
from pipeline.checkpoint.counting import stored_numbers
from pipeline.families.registry import geometry_of
from pipeline.inputs.checkpoints import build_on_meta, expected_tensors
from pipeline.kernels.checks import all_finite
from pipeline.rounding.schemes import packed_dtype
from stores.checkpoint import index_content
from stores.headers import read_header
from stores.source import INDEX_FILE, SourceCheckpoint
from stores.storage import Storage

PLACED = ("dtype", "shape", "sha256", "origin", "shard")  # of a tensor's entry; the rest is its form


@dataclass(frozen=True)
class Finding:
    """The result of one check; `faults` is empty when it passed."""

    check: str
    detail: str
    faults: tuple[str, ...] = ()


def check_output_files(output: Storage, compression: Mapping[str, Any]) -> Finding:
    """The headers hold exactly the tensors that the record names, where and as it says; the index says the same."""
    faults = []
    for shard in sorted({*compression["shards"], *(entry["shard"] for entry in compression["tensors"].values())}):
        if shard not in compression["shards"]:
            faults.append(f"{output.at(shard)}: named by tensors, but not among the shards of compression.json")
        promised = {name: entry for name, entry in compression["tensors"].items() if entry["shard"] == shard}
        found = read_header(output, shard)
        faults += [f"{output.at(shard)}: {name}: in compression.json only" for name in sorted(promised - found.keys())]
        faults += [f"{output.at(shard)}: {name}: not in compression.json" for name in sorted(found.keys() - promised)]
        for name in sorted(promised.keys() & found.keys()):
            said = (promised[name]["dtype"], promised[name]["shape"])
            if (found[name].dtype, list(found[name].shape)) != said:
                faults.append(
                    f"{output.at(shard)}: {name}: {found[name].dtype} {list(found[name].shape)}, "
                    f"compression.json says {said[0]} {said[1]}"
                )
    if output.read(INDEX_FILE) != index_content(*index_arguments(compression)):
        faults.append(f"{output.at(INDEX_FILE)}: not what compression.json's tensors and counts give")
    return Finding("contents", f"{len(compression['tensors'])} tensors in headers, index and record", tuple(faults))


def check_forms(checkpoint: SourceCheckpoint, config: Mapping[str, Any], compression: Mapping[str, Any]) -> Finding:
    """Forms and ranks of config.json: each asks for tensors of certain names, shapes and kinds, and these are there."""
    faults = []
    if config["forms"] != [layer["forms"] for layer in compression["layers"]]:
        faults.append("config.json: its forms differ from those of compression.json's layers")
    model = build_on_meta(config)
    kinds = {name: tensor.dtype for name, tensor in stored_state(model).items()}
    expected = {
        name: (shape, kinds.get(name) or packed_dtype(name)) for name, shape in expected_tensors(config).items()
    }
    tensors = checkpoint.tensors
    for name, (shape, dtype) in expected.items():
        if name not in tensors:
            faults.append(f"{name}: missing, though the config's forms ask for it")
        elif tensors[name].shape != shape:
            faults.append(f"{name}: shape {list(tensors[name].shape)}, the config's forms ask for {list(shape)}")
        elif tensors[name].torch_dtype != dtype and not (dtype.is_floating_point and _is_plain_float(tensors[name])):
            faults.append(f"{name}: {tensors[name].dtype} numbers, the config's forms ask for {dtype}")
    for name in sorted(tensors.keys() - expected.keys()):
        if compression["tensors"][name]["origin"] != "copied":  # old checkpoints hold buffers that no model asks for
            faults.append(f"{name}: of no form in the config")
    faults += _form_faults(config, compression)
    faults += _bitmap_faults(checkpoint, model)
    return Finding("forms", f"names, shapes and kinds of {len(expected)} tensors of the model", tuple(faults))


def check_values(checkpoint: SourceCheckpoint, compression: Mapping[str, Any]) -> Finding:
    """Every number is finite; each tensor has its digest. Holds a few megabytes."""
    faults = []
    for name, record in checkpoint.tensors.items():
        digest, finite = hashlib.sha256(), True
        for piece in checkpoint.copy_bytes(name):
            digest.update(piece)
            finite = finite and _is_finite(piece, record.torch_dtype)
        if not finite:
            faults.append(f"{record.file}: {name}: holds NaN or infinity")
        if digest.hexdigest() != compression["tensors"][name]["sha256"]:
            faults.append(f"{record.file}: {name}: sha256 differs from what compression.json says")
    return Finding("values", f"{len(checkpoint.tensors)} tensors finite, each with its sha256", tuple(faults))


def check_counts(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    compression: Mapping[str, Any],
    original: SourceCheckpoint | None,
) -> Finding:
    """Numbers, bytes and cache sizes, counted again; those of the dense model with its headers at hand."""
    itemsize = getattr(torch, config["dtype"]).itemsize
    prefix = f"{config['block']['layers']}."
    written = {
        name: stored_numbers(record.dtype, record.shape, itemsize) for name, record in checkpoint.tensors.items()
    }
    described, geometry = LayersConfig(**config), geometry_of(config)
    counted: dict[tuple[str, str], int] = {
        ("parameters", "compressed"): sum(written.values()),
        ("decoder_parameters", "compressed"): sum(n for name, n in written.items() if name.startswith(prefix)),
        ("bytes", "compressed"): sum(record.num_bytes for record in checkpoint.tensors.values()),
        ("cache_bytes_per_token", "compressed"): itemsize
        * sum(described.cache_numbers(layer) for layer in range(geometry.num_layers)),
        ("cache_bytes_per_token", "dense"): itemsize * sum(layer.attention.cache_numbers for layer in geometry.layers),
    }
    if original is not None:
        dense = {
            name: stored_numbers(record.dtype, record.shape, itemsize) for name, record in original.tensors.items()
        }
        counted |= {
            ("parameters", "dense"): sum(dense.values()),
            ("decoder_parameters", "dense"): sum(n for name, n in dense.items() if name.startswith(prefix)),
            ("bytes", "dense"): sum(record.num_bytes for record in original.tensors.values()),
        }
    faults = [
        f"{name}.{side}: counted {found:,}, compression.json says {compression['counts'][name][side]:,}"
        for (name, side), found in counted.items()
        if found != compression["counts"][name][side]
    ]
    numbers, stored = counted["parameters", "compressed"], counted["bytes", "compressed"]
    return Finding("counts", f"{numbers:,} numbers, {stored:,} bytes", tuple(faults))


def _is_plain_float(record: Any) -> bool:
    return bool(record.torch_dtype.is_floating_point and record.torch_dtype.itemsize > 1)


def _form_faults(config: Mapping[str, Any], compression: Mapping[str, Any]) -> Iterator[str]:
    """What the compression says of a tensor's form is a form of its layer."""
    prefix = f"{config['block']['layers']}."
    for name, entry in compression["tensors"].items():
        form = {key: value for key, value in entry.items() if key not in PLACED}
        if form == {"form": "dense"}:
            continue
        layer = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        forms = config["forms"][int(layer)] if layer.isdecimal() and int(layer) < len(config["forms"]) else {}
        if form not in forms.values():
            yield f"{name}: compression.json says {form}, which is no form of its layer in config.json"


def _bitmap_faults(checkpoint: SourceCheckpoint, model: nn.Module) -> Iterator[str]:
    """A sparse core's bitmap marks as many positions as there are values, and none beyond its end."""
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
