"""Tensors of a source that no module of its model reads: named, unless they are known to change nothing.

Beside codes they are refused, since they may change what codes mean (zeros, rotations, adapters).
docs/formats.md#stored-formats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.families.wrapper import is_tower
from stores.source import SourceCheckpoint, raise_faults

ACTIVATIONS = "rounding of activations or of the cache by an engine; Lamina computes them in the model's dtype"
BUFFER = "a buffer that the model computes itself"
HARMLESS: Mapping[str, str] = {  # ends of names -> the reason why such a tensor changes no weight
    **dict.fromkeys((".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"), ACTIVATIONS),
    **dict.fromkeys((".activation_scale", ".prob_output_scale", ".prob_scale"), ACTIVATIONS),
    **dict.fromkeys((".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point"), ACTIVATIONS),
    **dict.fromkeys((".rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias"), BUFFER),
}
ADDED = (".bias", ".weight_zero_point")  # of a linear whose model, or whose scheme, has none: they must be zeros


def refuse_unread(source: SourceCheckpoint, expected: Collection[str], wrapped: bool, weights: bool = True) -> None:
    """Raise InputError for tensors that no module reads in a source with weights in stored formats.

    `expected`: the tensors of the model. `wrapped`: it has towers. `weights`: allow reading those that must be zeros.
    """
    if not any(record.parts for record in source.tensors.values()):
        return
    unread = _unread(source, expected, wrapped)
    added = [name for name in unread if name.endswith(ADDED)]
    faults = [f"{name}: no module of the model reads it" for name in unread if name not in added]
    if weights:
        zeros = "its model or its format has no such tensor, and it is not zero"
        faults += [f"{name}: {zeros}" for name, tensor in source.read(added).items() if bool(tensor.any())]
    raise_faults(f"{source.place}: tensors beside weights in stored formats that Lamina would ignore", faults)


def unread_remarks(source: SourceCheckpoint, expected: Collection[str], wrapped: bool) -> tuple[str, ...]:
    """Return a remark for a dense source with tensors that no module reads. `wrapped`: its model has towers."""
    if any(record.parts for record in source.tensors.values()):
        return ()
    unread = _unread(source, expected, wrapped)
    if not unread:
        return ()
    return (
        f"model: tensors of the source that no module reads ({len(unread)}, {unread[0]} first) change nothing, as in "
        "transformers",
    )


def _unread(source: SourceCheckpoint, expected: Collection[str], wrapped: bool) -> list[str]:
    others = (name for name in source.tensors.keys() - {*expected} if not name.endswith(tuple(HARMLESS)))
    return sorted(name for name in others if not (wrapped and is_tower(name)))
