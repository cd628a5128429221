"""The modules outside the layers: token embeddings, final norm and head.

Legend: B batch, S sequence, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from lamina.embedding_lamina import finish_logits, make_embedding, make_head, make_positions
from lamina.norms_lamina import make_norm
from manifests.records import StagedLayer
from workers.branched_layer import Places
from workers.layers import LayerReader
from workers.tapped_layer import Taps
from workers.wide_linear import widen_linears_

HEAD_INPUT = "head.in"


class TokenEmbedding(Protocol):
    """Maps token ids (B, S) to hidden states (B, S, D). `places`: of the tokens, if samples branch."""

    def __call__(self, ids_BS: Tensor, places: Places | None = None) -> Tensor: ...


def embedding(layers: LayerReader, first: StagedLayer | None = None) -> TokenEmbedding:
    """Return the map from token ids to hidden states, with learned positions if the family has them.

    `first`: the staged layer 0, which holds the embedding table if the table is rounded.
    """
    positions = layers.config.block["positions"]
    with torch.device("meta"):
        modules: dict[str, nn.Module] = {layers.config.block["embed"]: make_embedding(layers.config)}
        if positions:
            modules[positions["module"]] = make_positions(layers.config)
    table, *learned = _loaded(layers, modules, first)

    def embed(ids_BS: Tensor, places: Places | None = None) -> Tensor:
        hidden_BSD: Tensor = table(ids_BS)
        if not learned:
            return hidden_BSD
        rows_S = torch.arange(ids_BS.shape[1], device=ids_BS.device) if places is None else places.positions
        added: Tensor = learned[0](rows_S + positions["offset"])
        return hidden_BSD + added

    return embed


def head(layers: LayerReader, last: StagedLayer | None = None) -> Callable[[Tensor], Tensor]:
    """Return the map from outputs of the last layer (T, D) to logits (T, V) in float32.

    `last`: the staged last layer, which holds the head's matrix if the matrix is rounded.
    """
    with torch.device("meta"):
        norm, matrix = make_norm(layers.config), make_head(layers.config)
    block = layers.config.block
    normed, to_logits = _loaded(layers, {block["final_norm"]: norm, block["head"]: matrix}, last)
    return lambda hidden_TD: finish_logits(layers.config, to_logits(normed(hidden_TD))).float()


def head_input(layers: LayerReader) -> Callable[[Tensor], Tensor]:
    """Return the map from outputs of the last layer (…, D) to the head's inputs (…, D)."""
    with torch.device("meta"):
        norm = make_norm(layers.config)
    return _loaded(layers, {layers.config.block["final_norm"]: norm}, None)[0]


def split_taps(layers: LayerReader, taps: Taps) -> tuple[Taps, Callable[[Tensor], None] | None]:
    """Return the taps inside the layer, and a function that calls those at `head.in`, if any, with its outputs."""
    inside = [(point, tap) for point, tap in taps if point != HEAD_INPUT]
    behind = [tap for point, tap in taps if point == HEAD_INPUT]
    if not behind:
        return inside, None
    normed = head_input(layers)

    def see(output_BSD: Tensor) -> None:
        read_BSD = normed(output_BSD)
        for tap in behind:
            tap(read_BSD)

    return inside, see


def _loaded(layers: LayerReader, modules: dict[str, nn.Module], staged: StagedLayer | None) -> list[nn.Module]:
    """Load modules, by their paths in the model, onto the device, or return those that `layers` holds."""
    block = layers.config.block
    tied = {f"{block['head']}.weight": f"{block['embed']}.weight"} if layers.config.tie_word_embeddings else {}
    stored = {
        path: {key: tied.get(f"{path}.{key}", f"{path}.{key}") for key in module.state_dict()}
        for path, module in modules.items()
    }

    names = [name for of_module in stored.values() for name in of_module.values()]
    paths = tuple(f"{path}." for path in modules)
    rounded = staged if staged and any(name.startswith(paths) for name in staged.tensors) else None

    def build() -> list[nn.Module]:
        tensors = layers.outer(*names, staged=rounded)
        for path, module in modules.items():
            module.load_state_dict({key: tensors[name] for key, name in stored[path].items()}, assign=True)
            module.requires_grad_(False)
        return [widen_linears_(module, layers.setup.dtype, layers.device) for module in modules.values()]

    return layers.kept_outside((*modules, rounded and rounded.path), build)
