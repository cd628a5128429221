"""Writes the config.json of a dense model under its family's own names: the inverse of `standard_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.configuration_utils import PreTrainedConfig

from lamina.block_lamina import SLIDING, rotary_width
from lamina.mixture_lamina import SHARED
from manifests.errors import InputError
from pipeline.families.config_fields import PRETRAINED_LENGTH, listed_fields, standard_fields, window_switches
from pipeline.families.family import Family
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.families.registry import FAMILIES, standard_config
from pipeline.families.wrapper import towers, wrapped_config


def source_config(standard: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config.json of the dense model with this standard config.

    Raises:
        InputError: the family's config cannot express the model.
    """
    kind = standard["source_model_type"]
    if standard.get("layer_sizes"):
        differing = ", ".join(sorted({name for sizes in standard["layer_sizes"] for name in sizes}))
        raise InputError(
            f"the layers of this {kind} model differ in {differing}; a dense model whose layers differ is not written"
        )
    family = FAMILIES[kind]
    kinds = [(variant.of(family), variant.written) for variant in family.variants] or [(family, {})]
    candidates = [_config_of(standard, dtype, *each) for each in kinds]
    config, faults = min(candidates, key=lambda candidate: len(candidate[1]))
    if faults:
        raise InputError(f"no {kind} config expresses this:\n  " + "\n  ".join(faults))
    return config


def _config_of(
    standard: Mapping[str, Any], dtype: str, family: Family, own: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the config.json for one kind of the family's layers, and the properties that it cannot express."""
    kind = family.model_type
    fields = {**{name: standard[other] for name, other in standard_fields(family).items()}, **own}
    if family.rotary_field == "rotary_dim":
        fields["rotary_dim"] = rotary_width(standard["rope_parameters"], standard["head_dim"])
    elif family.block["rotary"]:
        fields["rope_parameters"] = standard["rope_parameters"]
        if PRETRAINED_LENGTH in listed_fields(family) and PRETRAINED_LENGTH in standard["rope_parameters"]:
            fields[PRETRAINED_LENGTH] = standard["rope_parameters"][PRETRAINED_LENGTH]
    switches = _window_switches(standard)
    fields |= {name: switches[name] for name in window_switches(family) if name in switches}
    fields |= {field: standard["block"][key] for key, field in family.settings.items()}
    fields |= {name: fields[other] for name, other in family.equal.items()}
    if family.foreign is not None:
        fields |= {name: standard["foreign"][name] for name in family.foreign.own_fields}
    biases = family.block["biases"]
    fields |= {field: role in standard["block"]["biases"] for role, field in biases.items() if isinstance(field, str)}
    fields |= {field: role in standard["block"]["modules"] for role, field in family.optional.items()}
    # Fields that engines read, but that the config class may not list.
    named: dict[str, Any] = {name: value for name, value in family.requires.items() if value is not None}
    if family.mixture is not None:
        sizes = family.mixture.source_fields(standard["mixture"])
        named, fields = named | sizes, fields | sizes
    if family.engine_fields is not None:
        named |= family.engine_fields(fields)
    modeling_auto: Any = transformers.models.auto.modeling_auto
    written = transformers.AutoConfig.for_model(kind, **fields).to_dict()
    config = {**named, **PreTrainedConfig._encode_special_floats(written), "dtype": dtype}
    config["architectures"] = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    if standard.get("wrapper"):
        config = wrapped_config(standard["wrapper"], config)
    try:
        back = standard_config(config)
    except InputError as error:
        return config, [str(error)]
    lost = [name for name in back if name not in ("forms", "wrapper") and back[name] != standard[name]]
    lost += ["wrapper"] if towers(back) != towers(standard) else []
    return config, [f"{name}: {standard[name]!r} would be read as {back[name]!r}" for name in lost]


def _window_switches(standard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the switch and the first sliding layer, which some engines read instead of `layer_types`."""
    types = standard["layer_types"]
    if standard["sliding_window"] is None or types is None:
        return {"use_sliding_window": False}
    first = types.index(SLIDING) if SLIDING in types else len(types)
    return {"use_sliding_window": True, "max_window_layers": first}


def shares_width(layer: LayerGeometry) -> bool:
    """Return True if a dense model's config has one width for a layer's shared expert and the routed ones."""
    family = FAMILIES[layer.model_type].mixture
    return family is not None and family.shared == (family.sizes["width"],)


def shared_padding(layer: LayerGeometry, width: int) -> float:
    """Count the zeros that pad a layer's shared expert in a dense model with routed experts of `width`."""
    family = FAMILIES[layer.model_type].mixture
    shared = next((block for block in layer.mlps if block.name == SHARED), None)
    if family is None or shared is None:
        return 0
    return shared.numbers(family.padded_shared(shared.width, width)) - shared.numbers(shared.width)
