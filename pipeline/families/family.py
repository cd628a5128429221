"""Model families as data: the names of tensors and the meaning of config fields.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.families.foreign import ForeignFamily
from pipeline.families.mixture import MixtureFamily
from pipeline.families.variants import Variant


@dataclass(frozen=True)
class Family:
    """One family of decoder models, an entry of `FAMILIES` in a file of its kin.

    Attributes:
        model_type: its name in transformers; `name`: in the documentation.
        block: the `block` of a checkpoint's config.json: module paths, roles, norm, rotation (`lamina.block_lamina`
            lists and checks its keys). `biases` map a role to True, or to the config field that switches the bias on.
        optional: role -> the config field that switches its module on, for optional modules.
        fused: module path in the source's layer -> the roles whose rows its tensors concatenate. Lamina's checkpoints
            store them separately, at the paths of `block`.
        fused_by_heads: fused tensors hold the rows of the first key/value head, then of the second, and so on.
        settings: key of the block -> the config field that holds its value.
        fields: standard config name -> this family's name for it, or a constant (`= value` if not a string).
        requires: config field -> the only supported value.
        equal: config field -> another field that it must equal.
        unread: config field -> why it changes no logits. `config_fields` has those that change none in any family.
        own_head_dim: the config may have `head_dim`; otherwise the width of heads follows from the hidden size.
        mixture: the mixtures of experts of its layers; None for a family with dense MLPs.
        foreign: attention that is copied and run by transformers' module.
        further_layers: checkpoints on the hub may have additional layers that predict further tokens.
        rotary_field: the config field of the rotation.
        partial_rotary: the family's model applies `partial_rotary_factor`.
        variants: the kinds of layers, if the family has several.
        other_names: module path in the layers of some files -> the family's path.
        engine_fields: fields of config.json -> fields that other engines read instead.
        windows: which of `sliding_window` and `layer_types` the family applies; in other families they have no effect.
    """

    model_type: str
    name: str
    block: Mapping[str, Any]
    optional: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_by_heads: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    own_head_dim: bool = True
    rotary_field: str = "rope_parameters"
    partial_rotary: bool = False
    variants: tuple[Variant, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    engine_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    windows: tuple[str, ...] = ()
    mixture: MixtureFamily | None = None
    foreign: ForeignFamily | None = None
    further_layers: bool = False
