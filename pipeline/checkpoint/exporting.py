"""Export a compressed checkpoint as an ordinary one of its source's family, for engines without Lamina's code.

`dense` multiplies out all factors, so that tensors have the source's shapes. `stock` keeps narrower MLPs, whose width
must be the same in all layers, and is therefore smaller than the source. `dense` dequantizes rounded weights; `stock`
keeps their codes if the projection is not factored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina import MODELLING_FILES, LayersConfig
from lamina.decoder_layer_lamina import DecoderLayer
from lamina.foreign_lamina import VALUE_WIDTH
from manifests.errors import InputError, StorageError
from manifests.parts import Fused, names_of
from manifests.records import Scheme
from pipeline.checkpoint.assembling import shard_name
from pipeline.checkpoint.compression_record import encode_json
from pipeline.checkpoint.dense_weights import dense_weights, pad_latent, pad_mlp, pad_values
from pipeline.checkpoint.expert_codes import (
    code_faults,
    common_group,
    described_codes,
    expert_paths,
    in_groups_of,
    whole_roles,
)
from pipeline.checkpoint.listing import OUR_FILES
from pipeline.checkpoint.nf4 import is_nf4, nf4_config, nf4_tensors
from pipeline.checkpoint.targets import (
    ExportTarget,
    counted,
    is_mixture,
    mlp_widths,
    refuse_faults,
    stock_widths,
    written_config,
)
from pipeline.families.blocks import roles_of
from pipeline.families.fused import fused_tensors
from pipeline.families.geometry import Geometry
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import geometry_of, standard_config
from pipeline.families.wrapper import TOWERS, is_tower
from pipeline.inputs.checkpoints import read_checkpoint
from pipeline.inputs.source_dtypes import source_dtype
from pipeline.rounding.schemes import (
    FIELD,
    WEIGHT,
    packed_modules,
    packed_names,
    rounded_modules,
)
from stores.checkpoint import copy_shard, write_index, write_shard
from stores.model_files import CODE, copy_companions
from stores.source import CONFIG_FILE, INDEX_FILE, SourceCheckpoint
from stores.storage import Place, Storage, contains, matching, open_storage
from workers.checkpoint_reader import cpu_reader

HEAD = "lm_head"  # a model's head in transformers
ALIGNED = 16  # bytes: torch's grouped product needs rows of a multiple


def export_checkpoint(
    output: Place, target: ExportTarget, destination: Place, say: Callable[[str], None], multiply_out: bool = False
) -> dict[str, Any]:
    """Write OUTPUT as an ordinary checkpoint, a layer at a time, the index last. Return its sizes.

    `multiply_out`: store matrices with tables of levels unrounded, and all matrices where the class cannot hold codes.
    Without it, `stock` keeps normal levels of 4 bits as NF4 weights of bitsandbytes, and other tables are refused.

    Raises:
        InputError: OUTPUT is not a Lamina checkpoint, the destination is not empty or not writable, or the target
            cannot express OUTPUT's forms.
        StorageError: a file cannot be read or written.
    """
    checkpoint, config = compressed_checkpoint(output, destination)
    config = counted(config)
    storage = open_storage(destination)
    if storage.fault() or storage.children():
        raise InputError(f"{storage.at()}: not empty; give an empty or new directory")
    refuse_faults(config, target, multiply_out)
    with all_or_nothing(storage):
        try_destination(storage)
        return _write(checkpoint, config, target, storage, say, multiply_out)


def _write(
    checkpoint: SourceCheckpoint,
    config: Mapping[str, Any],
    target: ExportTarget,
    storage: Storage,
    say: Callable[[str], None],
    multiply_out: bool,
) -> dict[str, Any]:
    geometry, dtype_of = geometry_of(config), partial(source_dtype, tensors=checkpoint.tensors, config=config)
    exported_config = written_config(config, target)
    widths: Mapping[str, int] = {}
    if target == "stock":
        widths = stock_widths(config) if is_mixture(config) else {"mlp": mlp_widths(LayersConfig(**config))[0]}
    if is_mixture(config):
        note_uneven_experts(config, widths.get("width"), say)
    reader = cpu_reader(checkpoint, config, torch.float64, whole=True)
    towers = [name for name in checkpoint.tensors if config.get("wrapper") and is_tower(name)]
    total, numbers = geometry.num_layers + 1 + bool(towers), 0
    nf4, fused = is_nf4(config) and not multiply_out, fused_tensors(geometry_of(standard_config(exported_config)))
    packed = _packed(checkpoint, config, nf4, fused) if target == "stock" else {}
    if multiply_out and code_faults(config):
        packed = {}
    experts = {*expert_paths(config)}
    group = common_group(scheme for path, scheme in packed.items() if path in experts)
    packed |= {path: scheme.model_copy(update={"group": group}) for path, scheme in packed.items() if path in experts}
    rounded: dict[str, Scheme] = {}
    weight_map: dict[str, str] = {}
    for layer in geometry.layers:
        reader.read_ahead(layer.index + 1)
        module = reader.block(layer.index, None).module
        weights = layer_weights(module, layer, coarsest(layer, dtype_of), widths, exported_config)
        names = {key: name for key, (name, _) in layer.tensors().items()}
        tensors = {names[key]: tensor.to(dtype_of(names[key])) for key, tensor in weights.items()}
        for path in map(layer.path, whole_roles(config, layer)):
            if path in packed:
                del tensors[path + WEIGHT]
                parts = checkpoint.read(sorted(packed_names(path + WEIGHT, checkpoint.tensors)))
                parts = in_groups_of(packed[path].group, path, parts)
                tensors |= nf4_tensors(path, parts, packed[path].group or 0) if nf4 else parts
                rounded[path] = packed[path]
        tensors = fuse(tensors, fused)
        file = shard_name(layer.index + 1, total)
        write_shard(storage, file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
        numbers += sum(tensor.numel() for tensor in tensors.values())
        say(f"layer {layer.index} written")
    if towers:
        file = shard_name(total, total)
        copy_shard(storage, file, checkpoint, towers)
        weight_map |= dict.fromkeys(towers, file)
    outer, file = [name for name, _ in geometry.outer], shard_name(geometry.num_layers + 1, total)
    if all(name in checkpoint.tensors for name in outer):
        copy_shard(storage, file, checkpoint, outer)
    else:  # an embedding or a head is rounded, but few engines read codes outside of layers
        write_shard(storage, file, {name: tensor.to(dtype_of(name)) for name, tensor in reader.outer(*outer).items()})
    weight_map |= dict.fromkeys(outer, file)
    numbers += sum(math.prod(shape) for _, shape in geometry.outer)
    numbers += sum(math.prod(checkpoint.tensors[name].shape) for name in towers)
    copy_companions(storage, checkpoint.storage, _has_source_code(checkpoint.storage), OUR_FILES)
    if rounded:
        linears = [*_linear_modules(config, geometry), *([TOWERS] if towers else [])]
        described = nf4_config(rounded, linears, config["dtype"]) if nf4 else None
        exported_config[FIELD] = described or described_codes(rounded, linears, experts)
    storage.replace(CONFIG_FILE, encode_json(exported_config))
    size = sum(storage.size(file) for file in set(weight_map.values()))
    write_index(storage, weight_map, size, numbers)
    before = sum(record.num_bytes for record in checkpoint.tensors.values())
    return {"parameters": numbers, "bytes": size, "bytes_before": before, "index": storage.at(INDEX_FILE)}


def note_uneven_experts(config: Mapping[str, Any], width: int | None, say: Callable[[str], None]) -> None:
    """Say how to load experts whose rows are not a multiple of ALIGNED bytes, as transformers' grouped product needs.

    `width`: of each expert in the export; None: the source's.
    """
    itemsize = getattr(torch, config["dtype"]).itemsize
    if width is not None and width * itemsize % ALIGNED:
        say(
            f"experts are {width} channels wide, and transformers' default product of experts needs rows of a multiple "
            f'of {ALIGNED} bytes: load with experts_implementation="eager", or compress with budget.multiple: '
            f"{ALIGNED // itemsize}"
        )


def _packed(
    checkpoint: SourceCheckpoint, config: Mapping[str, Any], nf4: bool, fused: Mapping[str, Fused]
) -> dict[str, Scheme]:
    """Map the paths of modules that keep their codes to their schemes.

    Codes of weights that the target fuses into one tensor, and codes with a table unless `nf4`, are multiplied out.
    """
    stored = rounded_modules(config, packed_modules(checkpoint.tensors))
    parts_of_fused = names_of(fused.values())
    return {
        path: scheme
        for path, scheme in stored.items()
        if (nf4 or not scheme.has_table) and path + WEIGHT not in parts_of_fused
    }


def layer_weights(
    module: DecoderLayer,
    layer: LayerGeometry,
    stored: torch.dtype,
    widths: Mapping[str, int],
    exported: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Return `dense_weights` of a layer with MLPs, latents and value heads padded to the sizes of an export.

    `widths`: `mlp` for a dense model's MLPs, `width` and `shared_width` for experts; other widths are the family's.
    `exported`: the config of the export.
    """
    weights = dense_weights(module, layer, stored)
    for block in layer.mlps:
        kind = "width" if block.roles[0] in layer.routed_roles else "shared_width"
        size = widths.get(kind if layer.routing else "mlp")
        weights = pad_mlp(weights, block, size or block.width)
    if (attention := layer.latent_attention) is not None:
        for latent in attention.latents:
            weights = pad_latent(weights, latent, exported[latent.field])
        weights = pad_values(weights, attention, exported[VALUE_WIDTH])
    return weights


def fuse(tensors: Mapping[str, Tensor], fused: Mapping[str, Fused]) -> dict[str, Tensor]:
    """Fuse the tensors that the family's checkpoints store as one. `fused`: see `fused_tensors`."""
    wholes = {name: whole for name, whole in fused.items() if whole.parts[0].name in tensors}
    inside = names_of(wholes.values())
    together = {name: tensor for name, tensor in tensors.items() if name not in inside}
    for name, whole in wholes.items():
        together[name] = tensors[whole.parts[0].name].new_empty(whole.shape)
        numbers = together[name].flatten()
        for part in whole.parts:
            place = part.within(numbers[part.begin : part.end].view(part.block))
            place.copy_(tensors[part.name].view_as(place))
    return together


def try_destination(folder: Storage) -> None:
    """Try a write in the destination before any computation. Raises InputError."""
    try:
        folder.prepare()
    except StorageError as error:
        raise InputError(f"{folder.at()}: cannot be used as a destination: {error}") from error


@contextmanager
def all_or_nothing(place: Storage) -> Iterator[None]:
    """If the block raises, delete all files that it wrote to an empty place, and the folders that it created."""
    folders = [] if place.folder is None else [Path(place.folder), *Path(place.folder).parents]
    missing = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # must not hide the block's error
            place.delete(place.names())
            place.sweep()
        for folder in missing:
            with suppress(OSError):  # the block did not create it, or another process uses it
                folder.rmdir()
        raise


def _has_source_code(output: Storage) -> bool:
    """Return True if OUTPUT has Python files of the source, which its manifest trusted."""
    return bool({*matching(output, CODE)} - {*MODELLING_FILES})


def coarsest(layer: LayerGeometry, dtype_of: Callable[[str], torch.dtype]) -> torch.dtype:
    """Return the coarsest dtype of the weights of v and o; float64 if attention is foreign."""
    roles = (role for block in layer.attentions for role in roles_of(block.value_output))
    dtypes = (dtype_of(f"{layer.path(role)}{WEIGHT}") for role in roles)
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _linear_modules(config: Mapping[str, Any], geometry: Geometry) -> list[str]:
    """Return the paths of all linear modules of the family's model, fused ones in place of their parts.

    Routers and gates are among them, which are linear modules in some families, and the head by the names of its
    tensor and of transformers' module, which differ for GPT-NeoX.
    """
    paths = [
        layer.path(role)
        for layer in geometry.layers
        for role in (*layer.matrices, *layer.foreign_linears, *(each.role for each in layer.copied))
        if len(layer.role_shapes(role).get("weight", ())) == 2
    ]
    weights = {path + WEIGHT: path for path in paths}
    for name, whole in fused_tensors(geometry).items():
        if name.endswith(WEIGHT):
            weights[name] = name.removesuffix(WEIGHT)
        for part in whole.parts:
            weights.pop(part.name, None)
    return [*dict.fromkeys((*weights.values(), config["block"]["head"], HEAD))]


def compressed_checkpoint(output: Place, destination: Place) -> tuple[SourceCheckpoint, Mapping[str, Any]]:
    """Open OUTPUT. Raises InputError if it is not a Lamina checkpoint, or if the destination lies inside it."""
    checkpoint, config = read_checkpoint(open_storage(output).at())
    if config.get("model_type") != "lamina":
        raise InputError(
            f"{checkpoint.place}: not compressed by Lamina: an ordinary checkpoint ({config['source_model_type']}); "
            "engines read it without an export, and llama.cpp after its own convert_hf_to_gguf.py; give the "
            "`output` of a job's manifest"
        )
    if contains(checkpoint.storage.address, open_storage(destination).address):
        raise InputError(f"{destination}: in {checkpoint.place}, which would no longer verify; give another place")
    return checkpoint, {**config, "core": "dense"}
