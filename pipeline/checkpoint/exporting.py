"""A compressed checkpoint as an ordinary one of its source's family, for engines that know nothing of Lamina.

`dense`: multiplied back, in the source's shapes. `stock`: with narrower MLPs where all layers have one width, and so
really smaller; value heads of another width are multiplied back. Rounded weights are multiplied out in `dense`; `stock`
keeps their codes where the projection is whole, or has fewer channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lamina import MODELLING_FILES, LayersConfig
from manifests.errors import InputError, StorageError
from manifests.records import Scheme
from pipeline.checkpoint.assembling import SHARD_SUFFIX
from pipeline.checkpoint.compression_record import encode_json
from pipeline.checkpoint.dense_weights import dense_weights, pad_mlp
from pipeline.checkpoint.listing import OUR_FILES
from pipeline.checkpoint.targets import Target, mlp_widths, refuse_faults, written_config
from pipeline.families.blocks import roles_of
from pipeline.families.family import Geometry, LayerGeometry
from pipeline.families.registry import geometry_of
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.inputs.source_dtypes import source_dtype
from pipeline.rounding.schemes import (
    FIELD,
    WEIGHT,
    packed_modules,
    packed_names,
    quantization_config,
    rounded_modules,
)
from stores.checkpoint import copy_shard, write_index, write_shard
from stores.model_files import CODE, copy_companions
from stores.source import CONFIG_FILE, INDEX_FILE, SourceCheckpoint
from stores.storage import Place, Storage, contains, matching, open_storage
from workers.layers import cpu_reader


def export_checkpoint(output: Place, target: Target, destination: Place, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes OUTPUT as an ordinary checkpoint, a layer in memory at a time, the index last. Returns what it stores.

    Raises:
        InputError: no Lamina checkpoint, a destination that holds something or cannot be written to, or forms that the
            target cannot have.
        StorageError: a file cannot be read or written.
    """
    checkpoint, config = compressed_checkpoint(output, destination)
    written_to = open_storage(destination)
    if written_to.fault() or written_to.children():
        raise InputError(f"{written_to.at()}: holds something; give a directory that does not, or is not there yet")
    refuse_faults(config, target)
    with all_or_nothing(written_to):
        try_destination(written_to)
        return _write(checkpoint, config, target, written_to, say)


def _write(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    target: Target,
    written_to: Storage,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`export_checkpoint`, once nothing speaks against it."""
    geometry, dtype_of = geometry_of(config), partial(source_dtype, tensors=checkpoint.tensors, config=config)
    width = config["intermediate_size"] if target == "dense" else mlp_widths(LayersConfig(**config))[0]
    written = written_config(config, width)
    reader = cpu_reader(checkpoint, config, torch.float64)
    total, numbers = geometry.num_layers + 1, 0
    packed = rounded_modules(config, packed_modules(checkpoint.tensors)) if target == "stock" else {}
    rounded: dict[str, Scheme] = {}
    weight_map: dict[str, str] = {}
    for layer in range(geometry.num_layers):
        reader.read_ahead(layer + 1)
        mine = geometry.layers[layer]
        weights = pad_mlp(dense_weights(reader.block(layer, None).module, mine, coarsest(mine, dtype_of)), width)
        names = {key: name for key, (name, _) in mine.tensors().items()}
        named = {names[key]: tensor.to(dtype_of(names[key])) for key, tensor in weights.items()}
        for path in map(mine.path, whole_roles(config, mine)):
            if path in packed:
                del named[path + WEIGHT]
                named |= checkpoint.read(sorted(packed_names(path + WEIGHT)))
                rounded[path] = packed[path]
        file = f"model-{layer + 1:05d}-of-{total:05d}{SHARD_SUFFIX}"
        write_shard(written_to, file, named)
        weight_map |= dict.fromkeys(named, file)
        numbers += sum(tensor.numel() for tensor in named.values())
        say(f"layer {layer} written")
    outside = [name for name, _ in geometry.outer]
    file = f"model-{total:05d}-of-{total:05d}{SHARD_SUFFIX}"
    if all(name in checkpoint.tensors for name in outside):
        copy_shard(written_to, file, checkpoint, outside)
    else:  # rounded: engines take codes of linears in layers, few of them a table's or a head's
        write_shard(
            written_to, file, {name: tensor.to(dtype_of(name)) for name, tensor in reader.outer(*outside).items()}
        )
    weight_map |= dict.fromkeys(outside, file)
    numbers += sum(math.prod(shape) for _, shape in geometry.outer)
    copy_companions(written_to, checkpoint.storage, _brings_code(checkpoint.storage), OUR_FILES)
    if rounded:
        written[FIELD] = quantization_config(rounded, _linear_modules(config, geometry))
    written_to.replace(CONFIG_FILE, encode_json(written))
    size = sum(written_to.size(file) for file in set(weight_map.values()))
    write_index(written_to, weight_map, size, numbers)
    before = sum(record.num_bytes for record in checkpoint.tensors.values())
    return {"parameters": numbers, "bytes": size, "bytes_before": before, "index": written_to.at(INDEX_FILE)}


def try_destination(folder: Storage) -> None:
    """Tries a write where an export goes, before anything is computed for it. Raises InputError."""
    try:
        folder.prepare()
    except StorageError as error:
        raise InputError(f"{folder.at()}: cannot be used as a destination: {error}") from error


@contextmanager
def all_or_nothing(place: Storage) -> Iterator[None]:
    """A block that writes to an empty place: if it ends by an error, it leaves nothing there, nor folders it made."""
    folders = [] if place.folder is None else [Path(place.folder), *Path(place.folder).parents]
    missing = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # the error that ended the block is the one to show
            place.delete(place.names())
            place.sweep()
        for folder in missing:
            with suppress(OSError):  # it was never made, or another put something there
                folder.rmdir()
        raise


def _brings_code(output: Storage) -> bool:
    """Whether OUTPUT has Python of the source, as it has where its manifest trusted that."""
    return bool({*matching(output, CODE)} - {*MODELLING_FILES})


def coarsest(layer: LayerGeometry, dtype_of: Callable[[str], torch.dtype]) -> torch.dtype:
    """The dtype with the largest rounding errors of the weights of v and o."""
    return max(
        (dtype_of(f"{layer.path(role)}{WEIGHT}") for role in roles_of(layer.attention.value_output)),
        key=lambda each: torch.finfo(each).eps,
    )


def whole_roles(config: Mapping[str, Any], layer: LayerGeometry) -> list[str]:
    """What is stored as one matrix of the family's own shape, but for the channels of an MLP."""
    forms = config["forms"][layer.index]
    return [role for role in layer.matrices if forms.get(role, {"form": "dense"})["form"] in ("dense", "pruned")]


def _linear_modules(config: Mapping[str, Any], geometry: Geometry) -> list[str]:
    """The paths of all linear modules of the family's model."""
    paths = [layer.path(role) for layer in geometry.layers for role in layer.matrices]
    return [*paths, config["block"]["head"]]


def compressed_checkpoint(output: Place, destination: Place) -> tuple[SourceCheckpoint, Mapping[str, Any]]:
    """OUTPUT and its config. Raises InputError where it is no Lamina checkpoint, or is what would be written into."""
    checkpoint, config = read_checkpoint(open_storage(output).at())
    if config.get("model_type") != "lamina":
        raise InputError(
            f"{checkpoint.place}: not compressed by Lamina, but an ordinary checkpoint ({config.get('model_type')}), "
            "which engines read without an export; give the `output` of a job's manifest"
        )
    if contains(checkpoint.storage.address, open_storage(destination).address):
        raise InputError(f"{destination}: in {checkpoint.place}, which would no longer verify; give another place")
    return checkpoint, {**config, "core": "dense"}
