"""Token embeddings before the first layer, final norm and head after the last, as the model itself applies them.

Legend: B batch, S sequence, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lamina.decoder_layer_lamina import make_embedding, make_head, make_norm, make_positions
from workers.layers import LayerReader


def embedding(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Token ids (B, S) -> hidden states (B, S, D), learned positions added where the family has them."""
    positions = layers.config.block["positions"]
    with torch.device("meta"):
        paths: dict[str, nn.Module] = {layers.config.block["embed"]: make_embedding(layers.config)}
        if positions:
            paths[positions["module"]] = make_positions(layers.config)
    table, *learned = _loaded(layers, paths)

    def embed(ids_BS: Tensor) -> Tensor:
        hidden_BSD: Tensor = table(ids_BS)
        if not learned:
            return hidden_BSD
        rows_S = torch.arange(ids_BS.shape[1], device=ids_BS.device) + positions["offset"]
        added_SD: Tensor = learned[0](rows_S)
        return hidden_BSD + added_SD

    return embed


def head(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Hidden states (T, D) that leave the last layer -> logits (T, V) in float32."""
    block = layers.config.block
    with torch.device("meta"):
        paths = {block["final_norm"]: make_norm(layers.config), block["head"]: make_head(layers.config)}
    norm, to_logits = _loaded(layers, paths)
    return lambda hidden_TD: to_logits(norm(hidden_TD)).float()


def _loaded(layers: LayerReader, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Modules by their paths in the model, with their tensors on the device."""
    block = layers.config.block
    tied = {f"{block['head']}.weight": f"{block['embed']}.weight"} if layers.config.tie_word_embeddings else {}
    for path, module in modules.items():
        stored = {key: tied.get(f"{path}.{key}", f"{path}.{key}") for key in module.state_dict()}
        tensors = layers.outer(*stored.values())
        module.load_state_dict({key: tensors[name] for key, name in stored.items()}, assign=True)
        module.requires_grad_(False)
    return [*modules.values()]
