"""Every field of a family's config class in transformers, and its treatment by Lamina.

A field is *kept* (the standard config holds it, and `source_config` writes it back), *fixed* (only one value is
supported) or *unread* (it changes no logits). Any other field of the class, which a newer transformers may have, is
refused if config.json sets it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.configuration_utils import PreTrainedConfig

from lamina.block_lamina import value_faults
from manifests.errors import InputError
from pipeline.families.family import Family

COPIED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
RENAMED_FIELDS = ("intermediate_size", "num_key_value_heads", "hidden_act", "norm_eps", "initializer_range")
SWITCH_FIELDS = ("use_sliding_window", "max_window_layers")  # transformers derives window and layer types from them
PRETRAINED_LENGTH = "original_max_position_embeddings"  # some classes have it outside of `rope_parameters`
FIXED_FIELDS: Mapping[str, Any] = {"is_encoder_decoder": False}
TRAINING, OUTPUTS = "training alone", "the outputs of a call"
UNREAD_FIELDS: Mapping[str, str] = {  # they change logits in no family
    "transformers_version": "the version that wrote the file",
    "architectures": "checked elsewhere; exports name the family's",
    "dtype": "the tensors' own dtypes count; exports write theirs",
    **dict.fromkeys(("output_hidden_states", "output_router_logits", "return_dict"), OUTPUTS),
    "use_cache": "speed of generation",
    "chunk_size_feed_forward": "no supported model reads it",
    "id2label": "labels of a classifier",
    "label2id": "labels of a classifier",
    "problem_type": "the loss of a classifier",
    "classifier_dropout": "a setting of a classifier",
    "pretraining_tp": "an unused setting of parallel products",
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "embedding_dropout"), TRAINING),
    **dict.fromkeys(("hidden_dropout", "layerdrop", "resid_pdrop", "residual_dropout"), TRAINING),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise"), TRAINING),
}


def check_config_fields(standard: Mapping[str, Any]) -> None:
    """Check the values of a standard config. Raises InputError with every fault."""
    if faults := value_faults(standard):
        raise InputError("config.json:\n  " + "\n  ".join(faults))


def config_class(family: Family) -> type[PreTrainedConfig]:
    """Return the family's config class in transformers."""
    classes: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    config_type: type[PreTrainedConfig] = classes[family.model_type]
    return config_type


def listed_fields(family: Family) -> dict[str, Any]:
    """Map each field of the config class to its default."""
    fields = dataclasses.fields(config_class(family))
    return {field.name: field.default for field in fields}


def standard_fields(family: Family) -> dict[str, str]:
    """Map the family's own name of each field to the standard name of the same value."""
    listed = listed_fields(family)
    mapped = {name: config_class(family).attribute_map.get(name, name) for name in (*COPIED_FIELDS, *family.windows)}
    copied = {own if own in listed else name: name for name, own in mapped.items()}
    renamed = {own_name(family, name): name for name in RENAMED_FIELDS}
    fields = copied | {own: name for own, name in renamed.items() if isinstance(own, str) and own not in COPIED_FIELDS}
    by_heads = family.foreign is None or not family.foreign.rotary_width
    if by_heads and family.own_head_dim:
        fields["head_dim"] = "head_dim"
    return fields


def kept_fields(family: Family) -> dict[str, str]:
    """Map each kept field, by the family's own name, to the standard field that holds it.

    A field with the kind of layers (`kind`) follows from all of them.
    """
    biases = [name for name in family.block["biases"].values() if isinstance(name, str)]
    in_block = [*biases, *family.optional.values(), *family.settings.values()]
    kinds = dict.fromkeys([name for variant in family.variants for name in variant.when], "kind")
    rotary = [family.rotary_field] if family.block["rotary"] else []
    rotary += [PRETRAINED_LENGTH] if PRETRAINED_LENGTH in listed_fields(family) else []
    fields = {
        **kinds,
        **standard_fields(family),
        **dict.fromkeys(window_switches(family), "layer_types"),
        **dict.fromkeys(in_block, "block"),
    }
    if family.mixture is not None:
        fields |= {name: fields.get(name, "mixture") for name in family.mixture.own_fields}
    if family.foreign is not None:
        fields |= dict.fromkeys(family.foreign.own_fields, "foreign")
    return fields | dict.fromkeys(rotary, "rope_parameters")


def window_switches(family: Family) -> tuple[str, ...]:
    """Return the SWITCH_FIELDS of the family's config class."""
    listed = listed_fields(family) if "layer_types" in family.windows else {}
    return tuple(name for name in SWITCH_FIELDS if name in listed)


def fixed_fields(family: Family) -> dict[str, Any]:
    """Map each field to its only supported value or, for fields of `family.equal`, to the name of the equal field."""
    return {**FIXED_FIELDS, **family.requires, **family.equal}


def unread_fields(family: Family) -> dict[str, str]:
    """Map each field to the reason why its value changes no logits."""
    return {**UNREAD_FIELDS, **family.unread}


def own_name(family: Family, standard_name: str) -> Any:
    """Return the family's own name of a standard field, or a constant that is not a string."""
    return family.fields.get(standard_name, "rms_norm_eps" if standard_name == "norm_eps" else standard_name)


def refuse_other_values(family: Family, source: PreTrainedConfig, config: Mapping[str, Any]) -> None:
    """Raise InputError if a fixed field has another value, or if an unknown field of the class is set.

    `config`: the content of config.json. `source`: the config that transformers builds from it.
    """
    for name, needed in {**FIXED_FIELDS, **family.requires}.items():
        if (value := getattr(source, name, needed)) != needed:
            raise InputError(f"config.json: {name} is {value!r}; for {family.model_type} only {needed!r} is supported")
    for name, other in family.equal.items():
        if (value := getattr(source, name)) != (needed := getattr(source, other)):
            raise InputError(f"config.json: {name}: {value} differs from {other}: {needed}, which is not supported")
    supported = {*kept_fields(family), *fixed_fields(family), *unread_fields(family)}
    for name, default in listed_fields(family).items():
        if name not in supported and config.get(name, default) != default:
            raise InputError(
                f"config.json: {name} is {config[name]!r:.80}, a field of {family.model_type} in transformers "
                f"{transformers.__version__} that this version of Lamina does not know; a newer Lamina may"
            )
