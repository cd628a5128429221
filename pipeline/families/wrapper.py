"""Multimodal models: a text decoder of a supported family inside a class of transformers with towers for images.

The decoder is compressed. Towers and projectors are copied, and run by the source's own class.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig

from manifests.errors import InputError

# Model type of the wrapper -> model types of its text decoder. Tests compare these with transformers: the wrapper's
# class must pass embeddings to a decoder, and must not change logits.
WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "llama4": ("llama4_text",),
    "llava": ("llama", "mistral", "qwen2"),
    "mistral3": ("mistral",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
WITH_HEAD = ("llama4",)  # wrappers whose class has a decoder with a head, under the names of older files
# The modules of towers in a `quantization_config`.
TOWERS = "re:^(model\\.(?!language_model\\.)|vision_model\\.|multi_modal_projector\\.)"
BASE, TEXT, HEAD = "model", "model.language_model", "lm_head"  # modules of the wrapper's class
OLDER_TEXT, OLDER_HEAD = "language_model.model", "language_model.lm_head"  # their names in most files on the hub
FURTHER = "mtp."  # prefix of layers that predict further tokens, which no class reads
OF_FILE = ("_name_or_path", "architectures", "dtype", "tie_word_embeddings", "transformers_version")
IGNORED_BY_WRAPPERS = ("logit_scale", "logit_divisor", "logit_softcap")


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes a multimodal model with a text decoder."""
    return config.get("model_type") in [*WRAPPERS]


def wrapper_fault(config: Mapping[str, Any]) -> str:
    """Return why a multimodal model of an unknown type is not supported; empty without a text decoder."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return ""
    supported = ", ".join(f"{kind} around {' or '.join(texts)}" for kind, texts in WRAPPERS.items())
    return f"; multimodal models (its text_config is of {text.get('model_type')!r}): {supported}"


def wrapper_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config that transformers builds from a wrapper's config.json. Raises InputError."""
    fields = copy.deepcopy({name: value for name, value in config.items() if name != "model_type"})
    try:
        return transformers.AutoConfig.for_model(config["model_type"], **fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise InputError(f"config.json: not a valid {config['model_type']} config: {error}") from error


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a wrapper's text decoder as a separate model.

    The wrapper's own field determines whether embeddings are tied. Raises InputError for an unsupported decoder.
    """
    whole, kind = wrapper_config(config), config["model_type"]
    text: dict[str, Any] = whole.get_text_config().to_dict()
    if text["model_type"] not in WRAPPERS[kind]:
        raise InputError(
            f"config.json: text_config: model_type {text['model_type']!r} inside of {kind} is not supported; "
            f"supported: {', '.join(WRAPPERS[kind])}"
        )
    tied = bool(whole.tie_word_embeddings)
    if kind in WITH_HEAD and (tied or text["tie_word_embeddings"]):
        raise InputError(f"config.json: tie_word_embeddings: true inside of {kind} is not supported")
    return {**text, "tie_word_embeddings": tied}


def decoder_places(kind: str) -> tuple[str, str]:
    """Return the paths of the text decoder and of its head in the class of a wrapper."""
    return (OLDER_TEXT, OLDER_HEAD) if kind in WITH_HEAD else (TEXT, HEAD)


def inside_wrapper(standard: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the standard config of a wrapper's text decoder, with the names of the wrapper's modules.

    `standard`: that of the decoder as a separate model. Raises InputError for fields that the wrapper's class ignores.
    """
    block = dict(standard["block"])
    if ignored := [key for key in IGNORED_BY_WRAPPERS if block.get(key) is not None]:
        raise InputError(
            f"config.json: text_config: {', '.join(ignored)}: the text model changes its logits, but the class of "
            f"{config['model_type']} does not, which is not supported"
        )
    path, head = decoder_places(config["model_type"])
    for key in ("embed", "layers", "final_norm"):
        block[key] = f"{path}.{block[key].partition('.')[2]}"
    fields = {name: value for name, value in config.items() if name not in OF_FILE}
    text = json.loads(json.dumps(text_config(config)))
    return {**standard, "block": {**block, "head": head}, "wrapper": {**fields, "text_config": text}}


def towers(standard: Mapping[str, Any]) -> dict[str, Any]:
    """Return a standard config's wrapper without its text decoder, whose fields `standard` itself has."""
    return {name: value for name, value in (standard.get("wrapper") or {}).items() if name != "text_config"}


def wrapped_config(wrapper: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the multimodal model around a dense text decoder with the config.json `text`."""
    own = {name: value for name, value in text.items() if name not in ("architectures", "transformers_version")}
    tied, dtype = text["tie_word_embeddings"], text["dtype"]
    whole = {**wrapper, "text_config": own, "tie_word_embeddings": tied, "dtype": dtype}
    return {**whole, "architectures": [architecture(wrapper["model_type"])]}


def architecture(model_type: str) -> str:
    """Return the name of the wrapper's class in transformers."""
    modeling_auto: Any = transformers.models.auto.modeling_auto
    name: str = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    return name


def module_names(names: Iterable[str], kind: str) -> dict[str, str]:
    """Map the stored names of a wrapper's tensors to the names in its class.

    Older files hold the decoder as a separate causal model, `language_model.model` and `language_model.lm_head`, with
    all towers beside it.
    """
    return {name: name if kind in WITH_HEAD else _module_name(name) for name in names}


def _module_name(name: str) -> str:
    for older, path in ((OLDER_TEXT, TEXT), (OLDER_HEAD, HEAD)):
        if name.startswith(f"{older}."):
            return path + name.removeprefix(older)
    return name if name.startswith((f"{BASE}.", f"{HEAD}.", FURTHER)) else f"{BASE}.{name}"


def is_tower(name: str) -> bool:
    """Return True if a tensor of a wrapper belongs to a tower or a projector, judged by its name."""
    return not name.startswith((f"{TEXT}.", f"{HEAD}.", f"{OLDER_TEXT}.", f"{OLDER_HEAD}."))
