"""Sizes of a checkpoint: stored numbers and bytes, and the cache per token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lamina import LayersConfig
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import layer_key
from pipeline.families.geometry import Geometry
from pipeline.families.latent_config import described_config
from pipeline.inputs.job_inputs import Inputs
from stores.formats import keeps
from stores.headers import DTYPES


def count_sizes(inputs: Inputs, tensors: Mapping[str, Any], forms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count stored numbers and bytes and the cache per token, dense and compressed.

    `tensors`: name -> dtype and shape of all written tensors. `forms`: those of each layer.
    """
    geometry, itemsize = inputs.geometry, inputs.dtype.itemsize
    written = [(name, entry["dtype"], entry["shape"]) for name, entry in tensors.items()]
    source = [(name, record.dtype, record.shape) for name, record in inputs.source.stored.items()]
    config = LayersConfig(**described_config(inputs.config, forms))
    dense = stored_sizes(source, geometry.layers_path, itemsize) | dense_cache(geometry, itemsize)
    compressed = stored_sizes(written, geometry.layers_path, itemsize) | compressed_cache(config, itemsize)
    return {name: {"dense": dense[name], "compressed": compressed[name]} for name in dense}


def stored_sizes(tensors: Iterable[tuple[str, str, Sequence[int]]], layers_path: str, itemsize: int) -> dict[str, int]:
    """Count the numbers of tensors (name, dtype, shape), those in decoder layers, and the bytes."""
    prefix = f"{layers_path}."
    counted = [
        (name, stored_numbers(dtype, shape, itemsize), math.prod(shape) * DTYPES[dtype].itemsize)
        for name, dtype, shape in tensors
    ]
    return {
        "parameters": sum(numbers for _, numbers, _ in counted),
        "decoder_parameters": sum(numbers for name, numbers, _ in counted if name.startswith(prefix)),
        "bytes": sum(num_bytes for _, _, num_bytes in counted),
    }


def dense_cache(geometry: Geometry, itemsize: int) -> dict[str, int]:
    """Count the cached bytes per token of the dense model."""
    return {"cache_bytes_per_token": itemsize * sum(layer.cache_numbers for layer in geometry.layers)}


def compressed_cache(config: LayersConfig, itemsize: int) -> dict[str, int]:
    """Count the cached bytes per token of the model that a checkpoint's config describes."""
    numbers = sum(config.cache_numbers(layer) for layer in range(config.num_hidden_layers))
    return {"cache_bytes_per_token": itemsize * numbers}


def claimed_tensors(inputs: Inputs) -> dict[str, str]:
    """Map each claimed source tensor to the name of its method, even if the method leaves it unchanged."""
    layers = inputs.geometry.layers
    return {
        name: inputs.methods[task.method].name
        for task in inputs.tasks
        for name, _ in layers[task.layer].tensors(task.roles).values()
    }


def stored_tensors(inputs: Inputs, journal: Journal) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the dtypes and shapes of a checkpoint's tensors from the committed layers, and the forms of each layer."""
    entries = [journal.get(layer_key(layer)) for layer in range(inputs.geometry.num_layers)]
    staged = tuple(layer.prefix for layer, entry in zip(inputs.geometry.layers, entries, strict=True) if entry)
    claimed = claimed_tensors(inputs)
    tensors: dict[str, Any] = {
        part.name: {"dtype": part.dtype, "shape": list(part.shape)}
        for name, record in inputs.source.tensors.items()
        if not name.startswith(staged) and name not in claimed
        for part in (record.stored if keeps(record) else (record,))
    }
    layers = [entry.as_json() if entry else {"staged": {"tensors": {}}, "forms": {}} for entry in entries]
    for layer in layers:
        tensors |= layer["staged"]["tensors"]
    return tensors, [layer["forms"] for layer in layers]


def stored_numbers(dtype: str, shape: Sequence[int], itemsize: int) -> int:
    """Count the numbers of a tensor. Integers are counted as their bytes in numbers of the checkpoint's dtype."""
    size = int(math.prod(shape))
    return size if DTYPES[dtype].is_floating_point else math.ceil(size * DTYPES[dtype].itemsize / itemsize)
