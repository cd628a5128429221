"""Sizes of a checkpoint: stored numbers and bytes, and the cache per token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lamina import LayersConfig
from pipeline.driver.interfaces import Journal
from pipeline.driver.ledger_keys import layer_key
from pipeline.families.geometry import Geometry
from pipeline.families.latent_config import described_config
from pipeline.inputs.job_inputs import Inputs
from pipeline.rounding.schemes import WEIGHT
from stores.formats import keeps
from stores.headers import DTYPES, TensorRecord
from stores.source import SourceCheckpoint


def count_sizes(
    inputs: Inputs, tensors: Mapping[str, Any], forms: Sequence[Mapping[str, Any]], rounded: Collection[str]
) -> dict[str, Any]:
    """Count stored numbers and bytes and the cache per token, dense and compressed.

    `tensors`: name -> dtype and shape of all written tensors. `forms`: those of each layer. `rounded`: the paths of the
    modules whose codes the job computed.
    """
    geometry, itemsize = inputs.geometry, inputs.dtype.itemsize
    written = [(name, entry["dtype"], entry["shape"]) for name, entry in tensors.items()]
    kept = [
        record
        for name, record in inputs.source.tensors.items()
        if keeps(record)
        and name.removesuffix(WEIGHT) not in rounded
        and all(at.name in tensors for at in record.stored)
    ]
    config = LayersConfig(**described_config(inputs.config, forms))
    dense = source_sizes(inputs.source, geometry.layers_path, itemsize) | dense_cache(geometry, itemsize)
    compressed = stored_sizes(written, geometry.layers_path, itemsize, decoded_numbers(kept))
    compressed |= compressed_cache(config, itemsize)
    return {name: {"dense": dense[name], "compressed": compressed[name]} for name in dense}


def source_sizes(source: SourceCheckpoint, layers_path: str, itemsize: int) -> dict[str, int]:
    """Count what `stored_sizes` counts, of an open checkpoint."""
    tensors = [(name, record.dtype, record.shape) for name, record in source.stored.items()]
    return stored_sizes(tensors, layers_path, itemsize, decoded_numbers(source.tensors.values()))


def decoded_numbers(records: Iterable[TensorRecord]) -> dict[str, int]:
    """Map the parts of weights in storage formats to the numbers that they count as: the first of a weight's parts as
    those of the decoded weight, the others as none."""
    numbers: Counter[str] = Counter()
    for record in records:
        if record.parts:
            numbers.update({part.name: 0 for part in record.stored})
            numbers[record.stored[0].name] += math.prod(record.shape)
    return dict(numbers)


def stored_sizes(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    layers_path: str,
    itemsize: int,
    decoded: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Count the numbers of tensors (name, dtype, shape), those in decoder layers, and the bytes.

    `decoded`: see `decoded_numbers`.
    """
    prefix = f"{layers_path}."
    counted = [
        (name, decoded.get(name, numbers_of_tensor(dtype, shape, itemsize)), math.prod(shape) * DTYPES[dtype].itemsize)
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


def committed_sizes(inputs: Inputs, journal: Journal) -> dict[str, Any]:
    """Return what `count_sizes` returns, of the checkpoint that the committed layers make."""
    entries = [journal.get(layer_key(layer)) for layer in range(inputs.geometry.num_layers)]
    rounded = {path for entry in entries if entry for path in entry.rounded}
    return count_sizes(inputs, *stored_tensors(inputs, journal), rounded)


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


def numbers_of_tensor(dtype: str, shape: Sequence[int], itemsize: int) -> int:
    """Count the numbers of a tensor. Integers are counted as their bytes in numbers of the checkpoint's dtype."""
    size = int(math.prod(shape))
    return size if DTYPES[dtype].is_floating_point else math.ceil(size * DTYPES[dtype].itemsize / itemsize)
