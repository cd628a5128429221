# mypy: allow-untyped-calls
"""A compressed text decoder inside of a multimodal model: the source's own class, with its towers for images.

`LaminaForCausalLM` loads the decoder alone, for text.
"""

import copy
import dataclasses
from typing import Any

from transformers import AutoConfig, AutoModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from .configuration_lamina import LaminaConfig
from .modeling_lamina import LaminaForCausalLM, LaminaModel, LaminaPreTrainedModel, load_whole

PATHS = ("embed", "layers", "final_norm")
NOT_OF_TEXT = ("model_type", "architectures", "auto_map", "transformers_version", "quantization_config")


class LaminaForImageTextToText(LaminaPreTrainedModel):
    """Loads a checkpoint as the source's class, whose text decoder is a `LaminaModel`. It has no instances."""

    _auto_class = "AutoModelForImageTextToText"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load towers and decoder. Raises the errors of `load_whole`, and ValueError for a checkpoint without
        towers."""
        config = kwargs.pop("config", None)
        if not isinstance(config, LaminaConfig):
            names = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
            options = {name: kwargs[name] for name in names if name in kwargs}
            config = LaminaConfig.from_pretrained(pretrained_model_name_or_path, **options)
        AutoModel.register(LaminaConfig, LaminaModel, exist_ok=True)  # the source's class builds its decoder by it
        whole = whole_config(config)
        source: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(whole)]
        kinds = (_NotSaved, _WithHead, source) if _has_head(config) else (_NotSaved, source)
        whole_class: Any = type(f"Lamina{source.__name__}", kinds, {"__module__": __name__})
        return load_whole(whole_class.from_pretrained, pretrained_model_name_or_path, *args, config=whole, **kwargs)


class _NotSaved:
    """Refuses to write a config.json that the source's class alone could not read."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            "a compressed multimodal model is not saved again: copy the checkpoint's folder, or write an ordinary one "
            "with `python -m pipeline.export OUTPUT --to dense DIR`"
        )


class _WithHead:
    """Puts our decoder with its head in place of the one that the source's class builds by name."""

    def __init__(self, config: PreTrainedConfig) -> None:
        text: Any = config.text_config
        stand_in: Any = copy.copy(config)
        sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "num_hidden_layers": 1}
        stand_in.text_config = type(config).sub_configs["text_config"](**sizes, pad_token_id=text.pad_token_id)
        super().__init__(stand_in)  # type: ignore[call-arg]
        self.config, self.language_model = config, LaminaForCausalLM(text)
        self.post_init()  # type: ignore[attr-defined]


def _has_head(config: LaminaConfig) -> bool:
    """Return True if the source's class has the decoder's head in the same module as the decoder."""
    base: str = config.block["layers"].partition(".")[0]
    return str(config.block["head"]).startswith(f"{base}.")


def whole_config(config: LaminaConfig) -> PreTrainedConfig:
    """Return the source's config with the decoder's as its `text_config`.

    Paths of the decoder's modules lose the name that it has in the source's class. Raises ValueError for a checkpoint
    without towers, or with a table of levels for its head, which the source's class has no place for.
    """
    if not config.wrapper:
        raise ValueError(
            f"the source of this checkpoint, a {config.source_model_type} model, has no towers for images; load it by "
            "AutoModelForCausalLM"
        )
    if config.block["head"] in config.level_tables:
        raise ValueError("the head's codes stand for levels in a table, which the source's class does not read")
    base, text = config.block["layers"].split(".")[:2]
    stem = f"{base}.{text}."
    fields = {**config.to_dict(), "auto_map": None, "quantization_config": None, "wrapper": {}, "architectures": None}
    tables = config.level_tables.items()
    if _has_head(config):
        inside = {path: config.block[path].removeprefix(f"{base}.") for path in (*PATHS, "head")}
        fields["level_tables"] = {path.removeprefix(f"{base}."): each for path, each in tables}
    else:
        inside = {path: f"{base}.{config.block[path].removeprefix(stem)}" for path in PATHS}
        fields["level_tables"] = {f"{base}.{path.removeprefix(stem)}": each for path, each in tables}
    fields["block"] = config.block | inside
    own = {*dir(LaminaConfig), *(each.name for each in dataclasses.fields(LaminaConfig))}
    of_text = config.wrapper["text_config"].items()  # which projectors read as well
    others = {name: value for name, value in of_text if name not in own and name not in NOT_OF_TEXT}
    options = {name: fields[name] for name in fields if name not in NOT_OF_TEXT}
    source = {name: value for name, value in config.wrapper.items() if name not in (*NOT_OF_TEXT, "text_config")}
    decoder = LaminaConfig(**{**others, **options})
    source |= {"tie_word_embeddings": config.tie_word_embeddings, "dtype": config.dtype, "text_config": decoder}
    whole: PreTrainedConfig = AutoConfig.for_model(config.wrapper["model_type"], **source)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        whole.quantization_config = quantization
    return whole
