"""Reads dense and compressed checkpoints back under standard names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import lamina
from lamina.factored_lamina import stored_state
from lamina.stored_lamina import FIELD as STORED_FORMATS
from lamina.stored_lamina import stored_modules
from manifests.errors import InputError
from pipeline.families.config_fields import check_config_fields
from pipeline.families.registry import geometry_of
from pipeline.inputs.job_inputs import STORED_NAMES
from pipeline.inputs.source_dtypes import FIELD as SOURCE_DTYPES
from pipeline.inputs.sources import as_loaded, check_buildable, describe_dense
from pipeline.rounding.schemes import FIELD, TABLES, named_modules, packed_shapes, rounded_modules
from stores.source import SourceCheckpoint, open_source


def read_checkpoint(model: str, code: bool = False) -> tuple[SourceCheckpoint, Mapping[str, Any]]:
    """Open a dense or compressed checkpoint. Return the checkpoint and its config under standard names. Raises
    InputError.

    `code`: see `open_source`.
    """
    source = open_source(model, code=code)
    if source.config.get("model_type") != "lamina":
        return describe_dense(source)
    config = source.config
    missing = [name for name in ("block", "forms", "num_hidden_layers", "dtype") if name not in config]
    if missing:
        raise InputError(f"{model}/config.json: lacks {', '.join(missing)}; it is not a Lamina checkpoint")
    check_config_fields(config)
    try:
        source = source.with_weights(stored_modules(config.get(STORED_FORMATS) or ()))
    except ValueError as error:
        raise InputError(f"{model}/config.json: {error}") from error
    names = ", ".join(STORED_NAMES.values())
    if config["dtype"] not in STORED_NAMES.values():
        raise InputError(f"{model}/config.json: dtype: {config['dtype']!r:.80}; known are {names}")
    check_buildable(config, f"{model}/config.json")
    dtypes = (config.get(SOURCE_DTYPES) or {}).values()
    if unknown := [dtype for dtype in dtypes if dtype not in [*STORED_NAMES.values()]]:
        raise InputError(f"{model}/config.json: {SOURCE_DTYPES}: {unknown[0]!r:.80}; known are {names}")
    try:
        geometry_of(config)
        expected_tensors(config)
    except Exception as error:  # for the reason in `check_buildable`
        raise InputError(f"{model}/config.json: damaged: {type(error).__name__}: {error}") from error
    return as_loaded(source, config)


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return tensor -> shape for a Lamina checkpoint with this config."""
    model = build_on_meta(config)
    expected = {name: tuple(tensor.shape) for name, tensor in stored_state(model).items()}
    if config["tie_word_embeddings"]:
        expected.pop(f"{config['block']['head']}.weight", None)
    modules = {*linear_modules(config), *named_modules(config)}
    return packed_shapes(expected, rounded_modules(config, modules))


def build_on_meta(config: Mapping[str, Any]) -> lamina.LaminaForCausalLM:
    """Build the model of a config on the meta device, without rounding."""
    described = lamina.LaminaConfig(
        **{name: value for name, value in config.items() if name not in (FIELD, TABLES, STORED_FORMATS)}
    )
    with torch.device("meta"):
        return lamina.LaminaForCausalLM(described)


def linear_modules(config: Mapping[str, Any]) -> list[str]:
    """Return the paths of all `torch.nn.Linear` in the model that a config describes."""
    return [path for path, module in build_on_meta(config).named_modules() if isinstance(module, torch.nn.Linear)]
