"""Token embeddings before the first layer, final norm and head after the last, as the model itself applies them.

Legend: B batch, S sequence, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lamina import LaminaConfig, LaminaForCausalLM
from manifests.records import StagedLayer
from workers.block import Block, Tap
from workers.layers import LayerReader

HEAD_INPUT = "head.in"


def embedding(layers: LayerReader, first: StagedLayer | None = None) -> Callable[[Tensor], Tensor]:
    """Token ids (B, S) -> hidden states (B, S, D), learned positions added where the family has them.

    `first`: the staged layer 0, which holds the table where that is rounded.
    """
    block = layers.config.block
    names = [block["embed"], *([block["positions"]["module"]] if block["positions"] else [])]
    return _outside_of_layers(layers, names, first).get_decoder().embed


def head(layers: LayerReader, last: StagedLayer | None = None) -> Callable[[Tensor], Tensor]:
    """Hidden states (T, D) that leave the last layer -> logits (T, V) in float32.

    `last`: that layer as staged, which holds the head's matrix where that is rounded.
    """
    model = _outside_of_layers(layers, [layers.config.block["final_norm"], layers.config.block["head"]], last)
    return lambda hidden_TD: model.head(hidden_TD).float()


def head_input(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Hidden states (…, D) that leave the last layer -> what the head reads (…, D)."""
    return _outside_of_layers(layers, [layers.config.block["final_norm"]], None).get_decoder().normed


def tapped(
    layers: LayerReader, block: Block, taps: Iterable[tuple[str, Tap]]
) -> Callable[[Tensor, bool], Tensor | None]:
    """Runs a layer, with taps inside of it and at `head.in`: (hidden states, whether the output is wanted) -> as
    `Block.run`. What the head reads comes of the last layer alone."""
    inside = [(point, tap) for point, tap in taps if point != HEAD_INPUT]
    behind = [tap for point, tap in taps if point == HEAD_INPUT]
    if not behind:
        return lambda hidden_BSD, output: block.run(hidden_BSD, inside, output=output)
    normed = head_input(layers)

    def run(hidden_BSD: Tensor, output: bool) -> Tensor | None:
        output_BSD = block.run(hidden_BSD, inside)
        assert output_BSD is not None
        read_BSD = normed(output_BSD)
        for tap in behind:
            tap(read_BSD)
        return output_BSD if output else None

    return run


def _outside_of_layers(layers: LayerReader, modules: list[str], staged: StagedLayer | None) -> LaminaForCausalLM:
    """The model without layers, these modules with their tensors on the device, the others empty."""
    with torch.device("meta"):
        model = LaminaForCausalLM(_without_layers(layers.config))
    tied = {f"{layers.config.block['head']}.weight": f"{layers.config.block['embed']}.weight"}
    stored = {
        name: tied.get(name, name) if layers.config.tie_word_embeddings else name
        for name in (f"{path}.{key}" for path in modules for key in model.get_submodule(path).state_dict())
    }
    tensors = layers.outer(*stored.values(), staged=staged)
    model.load_state_dict({name: tensors[source] for name, source in stored.items()}, strict=False, assign=True)
    model.requires_grad_(False)
    return model


def _without_layers(config: LaminaConfig) -> LaminaConfig:
    config = copy.copy(config)
    config.num_hidden_layers, config.forms, config.layer_types = 0, [], []
    return config
