"""Checks of the values of a standard config: sizes, epsilon, activation, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import transformers  # its activations are slow to import, and are looked up at their use

from manifests.errors import InputError

POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
COMMON_ACTIVATIONS = frozenset({"silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"})
MAX_LAYERS = 10_000  # a config makes lists of this length
MAX_SIZE = 2**31


def check_fields(standard: Mapping[str, Any]) -> None:
    """Check the values of a standard config. Raises InputError with every fault."""
    faults = _size_faults(standard)
    own = standard.get("layer_sizes") or []
    if not isinstance(own, list) or not all(isinstance(sizes, Mapping) for sizes in own):
        faults.append(f"layer_sizes: {own!r:.80} is not a list of the sizes by layer")
    elif own and len(own) != standard.get("num_hidden_layers"):
        faults.append(f"layer_sizes: {len(own)} entries for {standard.get('num_hidden_layers')!r:.80} layers")
    elif not faults:
        faults += [
            f"layer {layer}: {fault}"
            for layer, sizes in enumerate(own)
            for fault in _size_faults({**standard, **sizes})
        ]
    epsilon, activation = standard.get("norm_eps"), standard.get("hidden_act")
    if not (isinstance(epsilon, float | int) and 0.0 <= epsilon < math.inf):
        faults.append(f"norm epsilon: {epsilon!r:.80} is not a number from 0 on")
    if not isinstance(activation, str) or not _is_activation(activation):
        faults.append(f"activation: {activation!r:.80} is not an activation of transformers")
    if not isinstance(standard.get("tie_word_embeddings"), bool):
        faults.append(f"tie_word_embeddings: {standard.get('tie_word_embeddings')!r:.80} is neither true nor false")
    if faults:
        raise InputError("config.json:\n  " + "\n  ".join(faults))


def _is_activation(name: str) -> bool:
    """Return True if transformers has it; common names avoid its table, which takes seconds and 85 MiB to import."""
    return name in COMMON_ACTIVATIONS or name in transformers.activations.ACT2FN


def _size_faults(sizes: Mapping[str, Any]) -> list[str]:
    """Return the faults in the sizes of a model or of one of its layers."""
    faults = [
        f"{name}: {sizes.get(name)!r:.80} is not a positive integer below {limit}"
        for name in POSITIVE_FIELDS
        for limit in (MAX_LAYERS + 1 if name == "num_hidden_layers" else MAX_SIZE,)
        if type(sizes.get(name)) is not int or not 1 <= sizes[name] < limit
    ]
    if not faults and sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        faults.append(
            f"num_attention_heads: {sizes['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads: {sizes['num_key_value_heads']}"
        )
    return faults
