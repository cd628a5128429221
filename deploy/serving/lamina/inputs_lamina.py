# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""Inputs of decoder layers besides hidden states: positions, rotary angles, masks.

B batch, T tokens of this call, S cached tokens, D hidden.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from .block_lamina import FULL, INDEXED, RECURRENT, SLIDING
from .configuration_lamina import LaminaConfig
from .foreign_lamina import always_masked, has_foreign_rotary
from .layers_lamina import LaminaDecoderLayer
from .rotary_lamina import Angles, LaminaRotaryEmbedding, rotation_of


def create_recurrent_mask(**arguments: Any) -> Any:
    """Return transformers' mask (B, T) of layers with a state, which older versions of transformers lack."""
    from transformers.masking_utils import create_recurrent_attention_mask

    return create_recurrent_attention_mask(**arguments)


def create_indexed_mask(**arguments: Any) -> Any:
    """Return a causal mask even where attention needs none, for an indexer."""
    return create_causal_mask(**arguments, allow_is_causal_skip=False)


MASKS: dict[str, Any] = {  # by layer type
    FULL: create_causal_mask,
    SLIDING: create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
    RECURRENT: create_recurrent_mask,
    INDEXED: create_indexed_mask,
}


class LayerInputs(NamedTuple):
    """Inputs of every layer besides the hidden states: positions, their angles, one mask per layer type.

    `slot_embeddings` holds, for each layer type with latent keys, the angles of the queries' slots and of all cached
    slots. A layer with latent keys rotates keys when it reads them, by the only position that it knows: the slot.
    Queries are rotated by their slots as well, so that all differences are right, whatever the padding.
    """

    position_ids: Tensor
    position_embeddings: dict[str, Angles]  # by layer type; empty if no layer rotates
    masks: dict[str, Any]  # by layer type: a tensor, None (causal), or flex attention's BlockMask
    slot_embeddings: dict[str, tuple[Angles, Angles]] = {}  # noqa: RUF012 - never changed

    def of(self, layer: LaminaDecoderLayer) -> dict[str, Any]:
        """Return the keyword arguments of `layer.forward`."""
        common = {"attention_mask": self.masks.get(layer.layer_type), "position_ids": self.position_ids}
        if not layer.rotates:
            return {**common, "position_embeddings": None}
        if layer.latent_keys and layer.layer_type in self.slot_embeddings:
            query, slots = self.slot_embeddings[layer.layer_type]
            return {**common, "position_embeddings": query, "slot_embeddings": slots}
        return {**common, "position_embeddings": self.position_embeddings[layer.layer_type]}


def default_position_ids(
    config: LaminaConfig, hidden_BTD: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None
) -> Tensor:
    """Return the positions (B or 1, T) of the tokens of this call.

    Rotary models use the cache slot, whatever the padding. Models with learned positions count the unpadded tokens of
    `attention_mask` (B, S), with -1 on padding.
    """
    num_tokens = hidden_BTD.shape[1]
    if config.block["positions"] and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        mask_BS = attention_mask.long()
        return (mask_BS.cumsum(1) * mask_BS - 1)[:, -num_tokens:]
    num_cached = past_key_values.get_seq_length() if past_key_values is not None else 0
    return (torch.arange(num_tokens, device=hidden_BTD.device) + num_cached).unsqueeze(0)


def _slot_embeddings(
    config: LaminaConfig, rotary: nn.Module, hidden_BTD: Tensor, past_key_values: Cache, attention_mask: Any = None
) -> dict[str, tuple[Angles, Angles]]:
    """Return LayerInputs.slot_embeddings. Slots count from the first one that attention reads, as in the masks.

    Norms of rotated heads make scores depend on positions, not on their differences alone: slots then count from the
    first token of each sequence after the padding of `attention_mask` (B, S).
    """
    num_tokens, device = hidden_BTD.shape[1], hidden_BTD.device
    angles = {}
    for layer_type, layer_idx in config.latent_key_layers().items():
        num_slots, first_slot = past_key_values.get_mask_sizes(num_tokens, layer_idx)
        num_cached = past_key_values.get_seq_length(layer_idx)  # a tensor in a static cache
        num_cached = num_cached.to(device) if isinstance(num_cached, Tensor) else num_cached
        query_slots_T = torch.arange(num_tokens, device=device) + (num_cached - first_slot)
        slots_S = torch.arange(num_slots, device=device)
        angles_of = cast(LaminaRotaryEmbedding, rotation_of(rotary, layer_type)).angles
        shift: Any = 0
        if config.block["head_norms"] == "rotated":
            shift = -first_slot
            if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
                shift = (attention_mask.cumsum(-1) == 0).sum(-1, keepdim=True).to(device) - first_slot
        query, keys = (angles_of(hidden_BTD, slots.unsqueeze(0) - shift) for slots in (query_slots_T, slots_S))
        angles[layer_type] = query, keys
    return angles


def _grids(position_ids: Tensor) -> tuple[Tensor, Any]:
    """Return the positions that rotate, and those of the text (B, T).

    Multimodal models of Qwen's pass three grids (3, B, T), whose text positions are None, or text and grids (4, B, T).
    """
    if position_ids.ndim < 3:
        return position_ids, position_ids
    return (position_ids[1:], position_ids[0]) if len(position_ids) == 4 else (position_ids, None)


def prepare_layer_inputs(
    config: LaminaConfig,
    rotary: nn.Module | None,
    hidden_BTD: Tensor,
    attention_mask: Tensor | dict[str, Any] | None = None,
    past_key_values: Cache | None = None,
    position_ids: Tensor | None = None,
) -> LayerInputs:
    """Compute positions, rotary angles and masks for the layers of `config`, from the hidden states before the first.

    `attention_mask` (B, S) is 1 on real tokens; None means no padding. A dict of ready masks is used as it is.
    Raises ValueError if `config._attn_implementation` is not set (a model sets it; for a single layer choose "sdpa").
    """
    if config._attn_implementation is None:
        raise ValueError('no attention implementation: set config._attn_implementation, e.g. to "sdpa", before this')
    if position_ids is None:
        padding = attention_mask if isinstance(attention_mask, Tensor) else None
        position_ids = default_position_ids(config, hidden_BTD, padding, past_key_values)
    grids, position_ids = _grids(position_ids)
    if isinstance(attention_mask, dict):
        masks: dict[str, Any] = attention_mask  # generate() builds them before a compiled forward
    else:
        masks = {
            layer_type: (create_indexed_mask if always_masked(config.foreign, layer_type) else make_mask)(
                config=config,
                inputs_embeds=hidden_BTD,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer_type, make_mask in MASKS.items()
            if layer_type in config.layer_types
        }
    if rotary is None:
        return LayerInputs(position_ids, {}, masks)
    rotations = {layer_type: rotation_of(rotary, layer_type) for layer_type in dict.fromkeys(config.layer_types)}
    by_rotation = {rotation: rotation(hidden_BTD, grids) for rotation in dict.fromkeys(rotations.values())}
    angles = {layer_type: by_rotation[rotation] for layer_type, rotation in rotations.items()}
    if past_key_values is None or has_foreign_rotary(config.foreign):
        return LayerInputs(position_ids, angles, masks)
    return LayerInputs(
        position_ids, angles, masks, _slot_embeddings(config, rotary, hidden_BTD, past_key_values, attention_mask)
    )
