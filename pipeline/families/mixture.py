"""The mixtures of experts of families, as data: the mapping between a source's config and the standard one.

The standard config's `mixture` is that of a Lamina checkpoint, whose keys `lamina.mixture_lamina` lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from lamina.mixture_lamina import DEFAULTS, check_mixture
from manifests.errors import InputError

EVERY_LAYER, SPARSE_STEP, FIRST_DENSE = "", "mlp_only_layers", "first_k_dense_replace"
MIXED = "moe_layers"  # lists the layers with a mixture; by default, layers at a regular interval
BY_TYPE = "layer_types"  # has `moe` for layers with a mixture
LISTED = "mlp_layer_types"  # has `dense` for layers with a dense MLP; FIRST_DENSE is its default
ROUTING_FIELDS = (
    "score",
    "renormalise",
    "scale",
    "weighs",
    "groups",
    "top_groups",
    "group_score",
)  # of a layer's router
GATE_UP, DOWN = ("gate", "up"), ("down",)  # the roles that most fused tensors hold


@dataclass(frozen=True)
class FusedExperts:
    """A tensor that holds matrices or biases of all experts of a layer, expert by expert.

    Attributes:
        roles: the roles of an expert whose rows are concatenated.
        part: `weight` or `bias`.
        transposed: matrices are transposed.
        interleaved: the rows of the roles alternate.
    """

    roles: tuple[str, ...]
    part: str = "weight"
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class MixtureFamily:
    """The mixtures of one family.

    Attributes:
        paths: `router`, `experts`, `modules` and, if there are any, `score_bias`, `shared` and `shared_gate`.
        sizes: `experts`, `width` and `top_k` -> the source's field.
        shared: the source's fields whose product is the width of the shared expert.
        routing: a key of `mixture` -> its value; `fields`: a key -> the source's field that holds it.
        group_methods: the source's field for the choice of experts, its value for a choice without groups, and its
            value for a choice from the best groups; empty if groups always count.
        dense_layers: the source's field that determines which layers have a dense MLP; empty if none has.
        fused: tensor name in the source's layer -> its parts of all experts. Lamina's checkpoints store the tensors of
            each expert separately, at `paths`.
    """

    paths: Mapping[str, Any]
    sizes: Mapping[str, str]
    shared: tuple[str, ...] = ()
    routing: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    group_methods: tuple[str, ...] = ()
    dense_layers: str = EVERY_LAYER
    fused: Mapping[str, FusedExperts] = field(default_factory=dict)

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Return the source's fields that the mixture holds."""
        layers: dict[str, tuple[str, ...]] = {
            EVERY_LAYER: (),
            BY_TYPE: (),
            SPARSE_STEP: (SPARSE_STEP, "decoder_sparse_step"),
            FIRST_DENSE: (FIRST_DENSE,),
            LISTED: (LISTED, FIRST_DENSE),
            MIXED: (MIXED, "interleave_moe_layer_step"),
        }
        names = (*self.sizes.values(), *self.shared, *self.fields.values(), *self.group_methods[:1])
        names += layers[self.dense_layers]
        return tuple(dict.fromkeys(names))

    def padded_shared(self, shared_width: int, width: int) -> int:
        """Return the least width of the shared expert that a config can express with routed experts of `width`."""
        if self.sizes["width"] not in self.shared:
            return shared_width
        return -(-shared_width // width) * width

    def standard(self, source: PreTrainedConfig) -> dict[str, Any]:
        """Return the standard `mixture` of a source's config. Raises InputError if it cannot be built."""
        sizes = {name: getattr(source, own) for name, own in self.sizes.items()}
        if self.shared:
            sizes["shared_width"] = math.prod(getattr(source, own) or 0 for own in self.shared)
        routing = {name: getattr(source, own) for name, own in self.fields.items()}
        routing |= {name: 1 for name in ("groups", "top_groups") if routing.get(name, 1) is None}
        if self.group_methods and not self._is_grouped(source):
            routing |= {"groups": 1, "top_groups": 1}
        layers = [
            {name: _of_layer(size, layer) for name, size in sizes.items()} if self._is_mixture(source, layer) else None
            for layer in range(source.num_hidden_layers)
        ]
        mixture = {**DEFAULTS, **self.paths, **self.routing, **routing, "layers": layers}
        try:
            check_mixture(mixture, source.num_hidden_layers)
        except ValueError as error:
            raise InputError(f"config.json: {error}") from error
        return mixture

    def _is_grouped(self, source: PreTrainedConfig) -> bool:
        """Return True if experts are chosen from the best groups. Raises InputError for another choice."""
        own, *known = self.group_methods
        if (method := getattr(source, own)) not in known:
            raise InputError(f"config.json: {own}: {method!r:.80} is not one of {', '.join(known)}")
        return bool(method == known[1])

    def _is_mixture(self, source: PreTrainedConfig, layer: int) -> bool:
        if self.dense_layers == BY_TYPE:
            return bool(source.layer_types[layer] == "moe")
        if self.dense_layers == LISTED:
            return bool(source.mlp_layer_types[layer] != "dense")
        if self.dense_layers == MIXED:
            return layer in source.moe_layers
        if self.dense_layers == FIRST_DENSE:
            return bool(layer >= source.first_k_dense_replace)
        if self.dense_layers == SPARSE_STEP:
            return layer not in source.mlp_only_layers and (layer + 1) % source.decoder_sparse_step == 0
        return True

    def source_fields(self, mixture: Mapping[str, Any]) -> dict[str, Any]:
        """Return the source's fields of a standard mixture. Raises InputError if its layers differ."""
        layers = mixture["layers"]
        each = [sizes for sizes in layers if sizes is not None]
        if any(sizes != each[0] for sizes in each):
            raise InputError("the mixtures of this model's layers differ in size; a dense model of them is not written")
        sizes = each[0] if each else dict.fromkeys((*self.sizes, "shared_width"), 1)
        fields = {own: sizes[name] for name, own in self.sizes.items()}
        if self.shared:
            count = self.shared[-1]
            known = math.prod(fields[own] for own in self.shared[:-1])
            if sizes["shared_width"] % known:
                raise InputError(f"a shared expert of {sizes['shared_width']} channels is not a multiple of {known}")
            fields[count] = sizes["shared_width"] // known
        fields |= {own: mixture[name] for name, own in self.fields.items()}
        if self.group_methods:
            own, alone, grouped = self.group_methods
            fields[own] = grouped if mixture["groups"] > 1 else alone
        return fields | self._dense_fields(layers)

    def _dense_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        dense = [layer for layer, sizes in enumerate(layers) if sizes is None]
        if self.dense_layers == FIRST_DENSE:
            return {FIRST_DENSE: len(dense)}
        if self.dense_layers == LISTED:
            first = next((layer for layer, sizes in enumerate(layers) if sizes is not None), len(layers))
            return {LISTED: ["sparse" if sizes else "dense" for sizes in layers], FIRST_DENSE: first}
        if self.dense_layers in (EVERY_LAYER, BY_TYPE):
            return {}
        if self.dense_layers == MIXED:
            mixed = [layer for layer, sizes in enumerate(layers) if sizes is not None]
            step = mixed[0] + 1 if mixed else len(layers) + 1
            regular = mixed == [*range(step - 1, len(layers), step)]
            return {MIXED: mixed, "interleave_moe_layer_step": step if regular else 1}
        for step in range(1, len(layers) + 1):
            if dense == [layer for layer in range(len(layers)) if (layer + 1) % step]:
                return {SPARSE_STEP: [], "decoder_sparse_step": step}
        return {SPARSE_STEP: dense, "decoder_sparse_step": 1}


def _of_layer(size: Any, layer: int) -> Any:
    """Return the size of a layer; some configs list sizes by layer."""
    return size[layer] if isinstance(size, list) and layer < len(size) else size
