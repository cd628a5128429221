"""Reads a config.json into a family and a geometry, and builds the config of Lamina's checkpoints."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import transformers  # its Auto classes and activations are slow to import, and are looked up on use
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from lamina.activation_lamina import Channels
from lamina.block_lamina import (
    COUNTS,
    LAYER_FIELDS,
    MAX_LAYERS,
    SINKS,
    LayerShape,
    clamp_of,
    foreign_roles,
    has_norm_bias,
    modules_of_type,
    sizes_of_layer,
)
from lamina.mixture_lamina import layer_modules, mixture_of
from manifests.errors import InputError
from pipeline.families import deepseek, delta, dense, kimi_linear, llama4, moe, nemotron_h, older
from pipeline.families.blocks import Copied, MLPBlock, dense_blocks, mixture_blocks
from pipeline.families.config_fields import (
    COPIED_FIELDS,
    RENAMED_FIELDS,
    check_config_fields,
    kept_fields,
    own_name,
    refuse_other_values,
)
from pipeline.families.family import Family
from pipeline.families.geometry import Geometry
from pipeline.families.latent import latent_class_faults, rope_frequencies
from pipeline.families.layer_geometry import LayerGeometry, norms_of
from pipeline.families.mixture import ROUTING_FIELDS
from pipeline.families.rotation import rope_parameters
from pipeline.families.wrapper import inside_wrapper, is_wrapper, text_config, wrapper_fault

TABLES = (dense, older, deepseek, moe, llama4, delta, kimi_linear, nemotron_h)
# Of families that call a block's modules alike, the description of an unknown model names the first.
FAMILIES: dict[str, Family] = {family.model_type: family for table in TABLES for family in table.FAMILIES}
SAME_AS = {"kimi_k2": "deepseek_v3"}  # model type on the hub -> the equivalent one in transformers
BY_LAYER = "per_layer_config"  # field of a source's config.json in transformers: layer -> its differing fields


def supported_families() -> tuple[str, ...]:
    """Return the `model_type`s that can be compressed."""
    return tuple(sorted(FAMILIES))


def is_known(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json names a family, or a multimodal model around one."""
    model_type = config.get("model_type")
    return is_wrapper(config) or (isinstance(model_type, str) and SAME_AS.get(model_type, model_type) in FAMILIES)


def standard_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a source model under standard names, as a Lamina checkpoint stores it, with dense forms.

    Raises:
        InputError: unsupported `model_type`, a value of the wrong type, or an unsupported variant of the family.
    """
    if is_wrapper(config):
        return inside_wrapper(standard_config(text_config(config)), config)
    family, source = _load(config)
    standard = {name: getattr(source, name) for name in COPIED_FIELDS}
    for name in RENAMED_FIELDS:
        own = own_name(family, name)
        standard[name] = getattr(source, own) if isinstance(own, str) else own
    standard["attention_dropout"] = 0.0
    standard["head_dim"] = _head_dim(family, source) or source.hidden_size // max(1, source.num_attention_heads)
    if family.foreign is not None:
        standard["foreign"] = family.foreign.standard(source)
        if family.foreign.rotary_width:
            standard["head_dim"] = standard["foreign"][family.foreign.rotary_width]
    if standard["intermediate_size"] is None:  # GPT-J writes null for four times the hidden size
        standard["intermediate_size"] = 4 * source.hidden_size
    if sizes := _layer_sizes(family, source, config.get(BY_LAYER) or {}, standard):
        standard["layer_sizes"] = sizes
    for name in ("sliding_window", "layer_types"):
        standard[name] = getattr(source, name, None) if name in family.windows else None
    check_config_fields(standard)
    standard["rope_parameters"] = rope_parameters(family, source, standard["head_dim"])
    if family.foreign is not None:
        standard["layer_types"] = family.foreign.layer_types(standard) or standard["layer_types"]
    if family.mixture is not None:
        standard["mixture"] = family.mixture.standard(source)
    standard["source_model_type"] = family.model_type
    standard["block"] = _block(family, source, standard)
    standard["forms"] = [{} for _ in range(source.num_hidden_layers)]
    return standard


def transformers_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config that transformers builds from a config.json of a known family. Raises InputError."""
    return _load(config)[1]


def family_names(standard: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Map names of a source's tensors to the family's names, if they differ."""
    others, block = FAMILIES[standard["source_model_type"]].other_names, standard["block"]
    inside = re.compile(rf"({re.escape(block['layers'])}\.\d+)\.(.+)\.(\w+)")
    matches = [(name, match) for name in names if others and (match := inside.fullmatch(name)) and match[2] in others]
    return {name: f"{match[1]}.{others[match[2]]}.{match[3]}" for name, match in matches}


def geometry_of(
    standard: Mapping[str, Any],
    bits: int = 16,
    stored_bits: Mapping[str, int] = MappingProxyType({}),
    stored_bytes: Mapping[str, tuple[int, bool]] = MappingProxyType({}),
) -> Geometry:
    """Return the geometry of a model from its standard config (of a dense model or of a Lamina checkpoint).

    `bits`: the bits of most numbers. `stored_bits`: tensor -> the bits of its numbers, for existing tensors.
    `stored_bytes`: for weights in a storage format: weight -> its bytes, and whether OUTPUT may keep the format.
    """
    block = standard["block"]
    hidden, vocab = standard["hidden_size"], standard["vocab_size"]
    norm_bias = has_norm_bias(block)
    outer: list[tuple[str, tuple[int, ...]]] = [(f"{block['embed']}.weight", (vocab, hidden))]
    if block["positions"]:
        rows = standard["max_position_embeddings"] + block["positions"]["offset"]
        outer.append((f"{block['positions']['module']}.weight", (rows, hidden)))
    outer.append((f"{block['final_norm']}.weight", (hidden,)))
    if norm_bias:
        outer.append((f"{block['final_norm']}.bias", (hidden,)))
    if not standard["tie_word_embeddings"]:
        outer.append((f"{block['head']}.weight", (vocab, hidden)))
    if block["head_bias"]:
        outer.append((f"{block['head']}.bias", (vocab,)))
    layers = tuple(_layer_geometry(standard, index, bits) for index in range(standard["num_hidden_layers"]))
    return Geometry(
        model_type=standard["source_model_type"],
        hidden=hidden,
        vocab=vocab,
        tied=standard["tie_word_embeddings"],
        layers_path=block["layers"],
        layers=tuple(
            replace(layer, own_bits=_own_bits(layer, stored_bits), own_bytes=_own_bytes(layer, stored_bytes))
            for layer in layers
        ),
        outer=tuple(outer),
        outer_bits=tuple((name, own) for name, _ in outer if (own := stored_bits.get(name, bits)) != bits),
        outer_bytes=tuple((name, *stored_bytes[name]) for name, _ in outer if name in stored_bytes),
        latent_faults=latent_class_faults(standard),
    )


def _layer_geometry(standard: Mapping[str, Any], index: int, bits: int) -> LayerGeometry:
    block, mixture, hidden = standard["block"], standard.get("mixture"), standard["hidden_size"]
    family = FAMILIES[standard["source_model_type"]].foreign
    foreign = None if family is None else family.block_of(standard, index)
    modules = modules_of_type(block, standard["layer_types"][index] if standard["layer_types"] else "")
    scaled = block.get("residual_scale") is not None
    activation, clamp = standard["hidden_act"], clamp_of(block)
    shape = LayerShape(hidden, **sizes_of_layer(standard, index), modules=modules, biases=frozenset(block["biases"]))
    blocks = dense_blocks(shape, activation, clamp, scaled)
    experts, copied = mixture_blocks(mixture, index, hidden, activation, clamp) if mixture else ((), ())
    sinks = (Copied(SINKS, ((SINKS, (shape.num_attention_heads,)),)),) if SINKS in modules else ()
    return LayerGeometry(
        model_type=standard["source_model_type"],
        index=index,
        prefix=f"{block['layers']}.{index}.",
        hidden=hidden,
        blocks=(*(block for block in blocks if block.name != "mlp"), *experts) if experts else blocks,
        norms=norms_of(block, shape),
        modules=tuple(layer_modules(modules, mixture, mixture_of(mixture, index)).items()),
        bits=bits,
        outer=_outer_matrices(standard, index),
        foreign=foreign,
        copied=(*(foreign.copied if foreign else ()), *sinks, *copied),
        routing=_routing(mixture, index),
        frequencies=rope_frequencies(standard),
        parallel=block["parallel"],
    )


def _routing(mixture: Mapping[str, Any] | None, layer: int) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a layer's routing rule; empty for a dense MLP."""
    sizes = mixture_of(mixture, layer)
    if mixture is None or sizes is None:
        return ()
    return (*((name, mixture[name]) for name in ROUTING_FIELDS), ("top_k", sizes.top_k))


def _own_bits(layer: LayerGeometry, stored_bits: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return `LayerGeometry.own_bits`."""
    roles = (*layer.roles, *(role for role, _, _ in layer.outer))
    named = layer.tensors(roles) if stored_bits else {}
    bits = {key: stored_bits.get(name, layer.bits) for key, (name, _) in named.items()}
    return tuple((key, own) for key, own in bits.items() if own != layer.bits)


def _own_bytes(layer: LayerGeometry, stored_bytes: Mapping[str, tuple[int, bool]]) -> tuple[tuple[str, int, bool], ...]:
    """Return `LayerGeometry.own_bytes`."""
    named = layer.tensors() if stored_bytes else {}
    return tuple((key, *stored_bytes[name]) for key, (name, _) in named.items() if name in stored_bytes)


def _outer_matrices(standard: Mapping[str, Any], layer: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return `LayerGeometry.outer`; empty for tied embeddings."""
    shape = (standard["vocab_size"], standard["hidden_size"])
    owners = {"embed": 0, "head": standard["num_hidden_layers"] - 1}
    if standard["tie_word_embeddings"]:
        return ()
    return tuple((role, standard["block"][role], shape) for role, owner in owners.items() if owner == layer)


def channels_of(block: MLPBlock) -> Callable[..., Tensor]:
    """Return the function that computes an MLP's channels from the outputs of its readers."""
    channels: Callable[..., Tensor] = Channels(block.activation, block.clamp)
    return channels


def checkpoint_config(standard: Mapping[str, Any], forms: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
    """Return the config.json of a compressed checkpoint: the standard config with the forms of every layer."""
    whole = {"AutoModelForImageTextToText": "wrapper_lamina.LaminaForImageTextToText"}
    return {
        **standard,
        "model_type": "lamina",
        "architectures": ["LaminaForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_lamina.LaminaConfig",
            "AutoModel": "modeling_lamina.LaminaModel",
            "AutoModelForCausalLM": "modeling_lamina.LaminaForCausalLM",
            **(whole if standard.get("wrapper") else {}),
        },
        "forms": [dict(layer) for layer in forms],
        "dtype": dtype,
    }


def _load(config: Mapping[str, Any]) -> tuple[Family, PreTrainedConfig]:
    model_type = config.get("model_type")
    family = FAMILIES.get(SAME_AS.get(model_type, model_type)) if isinstance(model_type, str) else None
    if family is None:
        supported = f"supported: {supported_families()}{wrapper_fault(config)}"
        raise InputError(f"config.json: model_type {model_type!r} is not supported; {supported}")
    # A copy, because transformers fills in missing values in place. `_layer_sizes` reads the sizes of single layers.
    fields = copy.deepcopy({name: value for name, value in config.items() if name not in ("model_type", BY_LAYER)})
    for name in ("num_hidden_layers", "n_layer"):
        if isinstance(fields.get(name), int) and fields[name] > MAX_LAYERS:
            raise InputError(f"config.json: {name}: {fields[name]} is beyond {MAX_LAYERS}")
    fields = PreTrainedConfig._decode_special_floats(fields)  # transformers writes infinity as an object
    try:
        source = transformers.AutoConfig.for_model(family.model_type, **fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        sizes = [f"{name}: {config[name]!r}" for name in COUNTS if config.get(name) in (0, False)]
        cause = f"{error}{'; zero: ' if sizes else ''}{', '.join(sizes)}"
        raise InputError(f"config.json: not a valid {family.model_type} config: {cause}") from error
    kinds = [variant.of(family) for variant in family.variants if variant.fits(source)]
    if family.variants and not kinds:
        names = dict.fromkeys(name for variant in family.variants for name in variant.when)
        values = ", ".join(f"{name} {getattr(source, name)!r}" for name in names)
        raise InputError(f"config.json: {family.model_type} has no layers with {values}")
    family = kinds[0] if kinds else family
    refuse_other_values(family, source, config)
    return family, source


def _head_dim(family: Family, source: PreTrainedConfig) -> int | None:
    """Return the config's `head_dim`; None if it is missing or the family's model does not read it."""
    return getattr(source, "head_dim", None) if "head_dim" in kept_fields(family) else None


def _layer_sizes(
    family: Family, source: PreTrainedConfig, by_layer: Any, standard: Mapping[str, Any]
) -> list[dict[str, int]]:
    """Return each layer's differing sizes under standard names; an empty list if all layers are equal."""
    count = source.num_hidden_layers
    if not isinstance(by_layer, Mapping) or not all(isinstance(fields, Mapping) for fields in by_layer.values()):
        raise InputError(f"config.json: {BY_LAYER}: {by_layer!r:.80} is not a mapping of layers to their fields")
    differing = LAYER_FIELDS if family.foreign is None else ("intermediate_size",)
    names = {name: own for name in differing if isinstance(own := family.fields.get(name, name), str)}
    by_index: list[dict[str, int]] = [{} for _ in range(min(count, MAX_LAYERS))]
    for layer, fields in by_layer.items():
        if not str(layer).isdecimal() or int(layer) >= len(by_index):
            raise InputError(f"config.json: {BY_LAYER}: {layer!r:.80} is not one of the {count} layers")
        if unknown := sorted(set(fields) - set(names.values())):
            raise InputError(
                f"config.json: {BY_LAYER}: layer {layer} has {', '.join(unknown)} of its own, which is not supported; "
                f"supported are {', '.join(dict.fromkeys(names.values()))}"
            )
        sizes = {name: fields[own] for name, own in names.items() if own in fields}
        if "num_attention_heads" in sizes and _head_dim(family, source) is None:
            sizes["head_dim"] = source.hidden_size // max(1, sizes["num_attention_heads"])
        by_index[int(layer)] = {name: size for name, size in sizes.items() if size != standard[name]}
    return by_index if any(by_index) else []


def _block(family: Family, source: PreTrainedConfig, standard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family's block with the settings of this model, and its biases as a list of roles.

    A model may lack some modules of foreign attention.
    """
    biases = family.block["biases"]
    has_bias = {role: bias if isinstance(bias, bool) else getattr(source, bias) for role, bias in biases.items()}
    block = copy.deepcopy(dict(family.block))
    block |= {key: copy.deepcopy(getattr(source, name)) for key, name in family.settings.items()}
    for key, name in family.settings.items():
        value = block[key]
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if is_number and not 0.0 < value < math.inf:
            raise InputError(f"config.json: {name}: {value!r} is not a positive number")
    if family.foreign is not None:
        absent = {*foreign_roles(block)} - family.foreign.roles(standard)
        block["modules"] = {role: path for role, path in block["modules"].items() if role not in absent}
    missing = {role for role, name in family.optional.items() if not getattr(source, name)}
    block["modules"] = {role: path for role, path in block["modules"].items() if role not in missing}
    return {**block, "biases": [role for role in block["modules"] if has_bias.get(role, False)]}
