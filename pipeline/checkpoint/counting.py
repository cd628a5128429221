"""What a checkpoint stores, counted from what was written, and what its cache holds per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lamina import LayersConfig
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import layer_key
from pipeline.inputs.job_inputs import Inputs
from stores.headers import DTYPES


def count_sizes(inputs: Inputs, tensors: Mapping[str, Any], forms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stored numbers and bytes, dense and compressed, from what was written; and the cache per token."""
    geometry, itemsize = inputs.geometry, inputs.dtype.itemsize
    described = LayersConfig(**{**inputs.config, "forms": [dict(layer) for layer in forms]})
    written = {name: stored_numbers(entry["dtype"], entry["shape"], itemsize) for name, entry in tensors.items()}
    prefix = f"{geometry.layers_path}."
    dense_bytes = sum(record.end - record.begin for record in inputs.source.tensors.values())
    sources = {
        name: stored_numbers(record.dtype, record.shape, itemsize) for name, record in inputs.source.tensors.items()
    }
    return {
        "parameters": {"dense": sum(sources.values()), "compressed": sum(written.values())},
        "decoder_parameters": {
            "dense": sum(number for name, number in sources.items() if name.startswith(prefix)),
            "compressed": sum(number for name, number in written.items() if name.startswith(prefix)),
        },
        "bytes": {
            "dense": dense_bytes,
            "compressed": sum(math.prod(e["shape"]) * DTYPES[e["dtype"]].itemsize for e in tensors.values()),
        },
        "cache_bytes_per_token": {
            "dense": itemsize * sum(layer.attention.cache_numbers for layer in geometry.layers),
            "compressed": itemsize * sum(described.cache_numbers(layer) for layer in range(geometry.num_layers)),
        },
    }


def claimed_tensors(inputs: Inputs) -> dict[str, str]:
    """Source tensor -> the method that stores it in another form, or looked and left it."""
    layers = inputs.geometry.layers
    return {
        name: inputs.methods[task.method].name
        for task in inputs.tasks
        for name, _ in layers[task.layer].tensors(task.roles).values()
    }


def stored_tensors(inputs: Inputs, journal: Journal) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a checkpoint of the committed layers would hold: tensor -> dtype and shape, and the forms of each layer."""
    entries = [journal.get(layer_key(layer)) for layer in range(inputs.geometry.num_layers)]
    staged = tuple(layer.prefix for layer, entry in zip(inputs.geometry.layers, entries, strict=True) if entry)
    claimed = claimed_tensors(inputs)
    copied = {
        name: {"dtype": record.dtype, "shape": list(record.shape)}
        for name, record in inputs.source.tensors.items()
        if not name.startswith(staged) and name not in claimed
    }
    found = [entry.as_json() if entry else {"staged": {"tensors": {}}, "forms": {}} for entry in entries]
    written = {name: tensor for layer in found for name, tensor in layer["staged"]["tensors"].items()}
    return copied | written, [layer["forms"] for layer in found]


def stored_numbers(dtype: str, shape: Sequence[int], itemsize: int) -> int:
    """What a tensor counts for: its numbers, or for an index its bytes in numbers of the checkpoint's dtype."""
    size = int(math.prod(shape))
    return size if DTYPES[dtype].is_floating_point else math.ceil(size * DTYPES[dtype].itemsize / itemsize)
