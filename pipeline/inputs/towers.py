"""Checks the towers of a multimodal model before a job starts: transformers would fill missing tensors at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from pipeline.families.wrapper import architecture, is_tower, whole_config
from pipeline.inputs.loaded_names import Loading
from stores.source import SourceCheckpoint, raise_faults


def check_towers(source: SourceCheckpoint, config: Mapping[str, Any]) -> None:
    """Compare the towers' tensors with those of the source's class, by names and shapes.

    `config`: the source's config. The source's tensors have the names of modules. Raises InputError with all faults (up
    to 20).
    """
    whole = whole_config(config)
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
