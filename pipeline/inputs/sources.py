"""Opens the dense model of a job as transformers would load it, and refuses other models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers

from lamina import LayersConfig
from lamina.decoder_layer_lamina import DecoderLayer
from lamina.rotary_lamina import make_rotary
from manifests.errors import InputError
from pipeline.families.fused import fused_tensors
from pipeline.families.registry import FAMILIES, family_names, geometry_of, is_known, standard_config
from pipeline.families.wrapper import architecture, is_tower, is_wrapper, module_names, wrapper_config
from pipeline.inputs.loaded_names import Loading, foreign_prefix, loaded_names
from pipeline.inputs.unknown import describe_unknown
from pipeline.inputs.unread_tensors import refuse_unread
from stores.source import CONFIG_FILE, SourceCheckpoint, open_source, raise_faults

CAUSAL_SUFFIX = "ForCausalLM"


def open_dense(
    source: str, revision: str | None = None, *, weights: bool = True, code: bool = False
) -> tuple[SourceCheckpoint, dict[str, Any]]:
    """Open a dense checkpoint. Return it, and its config under standard names.

    `weights`: allow reading the weights. `code`: see `open_source`.

    Raises:
        InputError: the model does not exist, is of another kind, or its config and weights do not fit together.
        StorageError: a file cannot be read.
    """
    return describe_dense(open_source(source, revision, code=code), weights)


def describe_dense(opened: SourceCheckpoint, weights: bool = True) -> tuple[SourceCheckpoint, dict[str, Any]]:
    """Check an open checkpoint. Return it with its config, and raise errors, as `open_dense` does.

    Raises InputError also for a model of an unknown family, with a description of it.
    """
    where = opened.storage.at(CONFIG_FILE)
    refuse_other_models(opened.config, where)
    if not is_known(opened.config):
        try:
            standard_config(opened.config)
        except InputError as error:
            raise InputError(f"{error}\n  {describe_unknown(opened)}") from error
    config = standard_config(opened.config)
    _refuse_other_heads(opened.config, where)
    check_buildable(config, where)
    if is_wrapper(opened.config):
        opened = opened.renamed(module_names(opened.tensors, opened.config["model_type"]))
        check_towers(opened, opened.config)
    opened = opened.renamed(family_names(config, opened.tensors))
    opened = with_family_names(opened, config)
    source, config = as_loaded(without_further_layers(opened, config), config, weights)
    expected, hint = geometry_of(config).expected_tensors(), foreign_prefix(source.tensors, config["block"]["layers"])
    source.require(expected, hint)
    refuse_unread(source, {*expected, f"{config['block']['head']}.weight"}, bool(config.get("wrapper")), weights)
    return source, config


def with_family_names(source: SourceCheckpoint, standard: Mapping[str, Any]) -> SourceCheckpoint:
    """Return the source with the family's tensors under the family's names, if transformers loads them under others.

    `standard`: its standard config. Raises InputError for parts that do not fit their tensors.
    """
    geometry = geometry_of(standard)
    fused = fused_tensors(geometry)
    loaded = loaded_names(source.config, standard, source.tensors, geometry.expected_tensors(), fused)
    return (
        source.renamed(loaded.names)
        .with_weights(embedding=standard["block"]["embed"])
        .with_parts({**fused, **loaded.fused})
    )


def describe_model(source: str) -> str:
    """Return the family and the size of a model in words. Raises the errors of `open_dense`."""
    _, config = open_dense(source, weights=False)
    geometry, wrapper = geometry_of(config), config.get("wrapper")
    inside = f", the decoder of a {wrapper['model_type']} model" if wrapper else ""
    return f"{geometry.model_type}{inside}: {geometry.num_layers} layers, {geometry.model_numbers():,} numbers"


def refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a checkpoint that Lamina wrote, and for quantised weights."""
    if config.get("model_type") == "lamina":
        raise InputError(
            f"{where}: a checkpoint that Lamina wrote, from a {config.get('source_model_type')} model; "
            "a job compresses dense models: give the source of this one (compression.json beside it names it under "
            "`source`), with all methods in one manifest; or multiply the factors out first: "
            "`python -m pipeline.export OUTPUT --to dense DIR`"
        )


def _refuse_other_heads(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a model of a known family without a language-modelling head."""
    architectures = config.get("architectures") or []
    suffix = architecture(config["model_type"]) if is_wrapper(config) else CAUSAL_SUFFIX
    if isinstance(architectures, list) and architectures and not any(str(n).endswith(suffix) for n in architectures):
        raise InputError(
            f"{where}: architectures: {', '.join(map(str, architectures))}: no causal language model; "
            f"supported are those whose name ends in {suffix}"
        )


def without_further_layers(source: SourceCheckpoint, config: Mapping[str, Any]) -> SourceCheckpoint:
    """Return the source without the layers that predict further tokens, which transformers ignores."""
    if not FAMILIES[config["source_model_type"]].further_layers:
        return source
    prefix, layers = f"{config['block']['layers']}.", config["num_hidden_layers"]
    numbers = {name: name.removeprefix(prefix).partition(".")[0] for name in source.tensors if name.startswith(prefix)}
    further = {name for name, number in numbers.items() if number.isdecimal() and int(number) >= layers}
    tensors = {name: record for name, record in source.tensors.items() if name not in further}
    return replace(source, tensors=tensors, left_out=tuple(sorted(further)))


def as_loaded(
    source: SourceCheckpoint, config: Mapping[str, Any], weights: bool = True
) -> tuple[SourceCheckpoint, dict[str, Any]]:
    """Return source and config with embedding and head tied or untied, as transformers loads them.

    The config may tie them although the shards also hold a head. transformers (from 5) then unties them if they differ.
    If they are equal, the head is removed from the tensors, because it repeats the embedding. Without weights they are
    assumed to be equal, as in the files that transformers writes.
    """
    block = config["block"]
    embed, head = f"{block['embed']}.weight", f"{block['head']}.weight"
    if not (config["tie_word_embeddings"] and embed in source.tensors and head in source.tensors):
        return source, dict(config)
    if weights and not source.equal(embed, head):
        return source, {**config, "tie_word_embeddings": False}
    tensors = {name: record for name, record in source.tensors.items() if name != head}
    return replace(source, tensors=tensors), dict(config)


def check_buildable(config: Mapping[str, Any], where: str) -> None:
    """Build a layer of a standard config on the meta device. Raises InputError if that fails."""
    try:
        described = LayersConfig(**config)
        with torch.device("meta"):
            DecoderLayer(described, 0)
        make_rotary(described, torch.device("cpu"))
    except Exception as error:  # transformers hardly checks rope_parameters, and only warns
        raise InputError(f"{where}: no layer can be built from it: {type(error).__name__}: {error}") from error


def check_towers(source: SourceCheckpoint, config: Mapping[str, Any]) -> None:
    """Compare the tensors of a multimodal model's towers with those of its class, by names and shapes.

    transformers would fill missing ones at random. `config`: the source's config. The source's tensors have the names
    of modules. Raises InputError with all faults (up to 20).
    """
    whole = wrapper_config(config)
    whole.get_text_config().num_hidden_layers = 1  # layers are not compared
    with torch.device("meta"):
        model: Any = getattr(transformers, architecture(config["model_type"]))(whole)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if is_tower(name)}
    loading = Loading(model)
    places = {name: loading.place(name) for name in filter(is_tower, source.tensors)}
    stored = {place.parameter: source.tensors[name].shape for name, place in places.items() if place}
    faults = [f"{name}: missing" for name in sorted(expected.keys() - stored.keys())]
    faults += [
        f"{name}: shape {list(stored[name])}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & stored.keys())
        if not loading.converters and stored[name] != expected[name]
    ]
    raise_faults(f"{source.place}: config.json and the weights of towers do not fit together", faults)
