"""Token embeddings before the first layer, final norm and head after the last, as the model itself applies them.

Legend: B batch, S sequence, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from lamina import LaminaConfig, LaminaForCausalLM
from workers.layers import LayerReader


def embedding(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Token ids (B, S) -> hidden states (B, S, D), learned positions added where the family has them."""
    block = layers.config.block
    names = [block["embed"], *([block["positions"]["module"]] if block["positions"] else [])]
    return _outside_of_layers(layers, names).get_decoder().embed


def head(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Hidden states (T, D) that leave the last layer -> logits (T, V) in float32."""
    model = _outside_of_layers(layers, [layers.config.block["final_norm"], layers.config.block["head"]])
    return lambda hidden_TD: model.head(hidden_TD).float()


def _outside_of_layers(layers: LayerReader, modules: list[str]) -> LaminaForCausalLM:
    """The model without layers, these modules with their tensors on the device, the others empty."""
    with torch.device("meta"):
        model = LaminaForCausalLM(_without_layers(layers.config))
    tied = {f"{layers.config.block['head']}.weight": f"{layers.config.block['embed']}.weight"}
    stored = {
        name: tied.get(name, name) if layers.config.tie_word_embeddings else name
        for name in (f"{path}.{key}" for path in modules for key in model.get_submodule(path).state_dict())
    }
    tensors = layers.outer(*stored.values())
    model.load_state_dict({name: tensors[source] for name, source in stored.items()}, strict=False, assign=True)
    model.requires_grad_(False)
    return model


def _without_layers(config: LaminaConfig) -> LaminaConfig:
    config = copy.copy(config)
    config.num_hidden_layers, config.forms, config.layer_types = 0, [], []
    return config
