"""The two ends of a model: token embeddings before the first layer, final norm and head after the last.

Legend: B batch, S sequence, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from workers.block import final_norm
from workers.layers import LayerReader


def embedding(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Token ids (B, S) -> hidden states (B, S, D), learned positions added where the family has them."""
    block = layers.setup.config["block"]
    name = f"{block['embed']}.weight"
    positions = f"{block['positions']['module']}.weight" if block["positions"] else None
    tensors = layers.outer(name, *([positions] if positions else []))

    def embed(ids_BS: Tensor) -> Tensor:
        hidden_BSD = functional.embedding(ids_BS, tensors[name])
        if positions is None:
            return hidden_BSD
        offset = block["positions"]["offset"]
        return hidden_BSD + tensors[positions][offset : offset + ids_BS.shape[1]]

    return embed


def head(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Hidden states (T, D) that leave the last layer -> logits (T, V) in float32."""
    block = layers.setup.config["block"]
    norms = [f"{block['final_norm']}.weight", f"{block['final_norm']}.bias"]
    weight = f"{block['embed'] if layers.setup.geometry.tied else block['head']}.weight"
    bias = f"{block['head']}.bias"
    tensors = layers.outer(*norms, weight, bias)
    norm = final_norm(layers.config, {name.rpartition(".")[2]: tensors[name] for name in norms if name in tensors})
    return lambda hidden_TD: functional.linear(norm(hidden_TD), tensors[weight], tensors.get(bias)).float()
