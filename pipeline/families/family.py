"""What a model family is, as data: where its tensors are called what, and which numbers its config gives.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

LINEAR_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
NORM_ROLES = ("input_norm", "mlp_norm")
HEAD_NORM_ROLES = ("q_norm", "k_norm")


TRAINING = "training alone"


@dataclass(frozen=True)
class Family:
    """One family of decoder models. A new family is one such value in a file of its own, listed in `registry.py`.

    Attributes:
        block: what a layer is, as the `block` of a checkpoint's config.json says it (`lamina.block_lamina` lists the
            keys and checks them): module paths, roles, norm, rotation. `biases` map a role to True, or to the name of
            the config field that says whether the module has a bias.
        fields: standard config name -> this family's name for it, or a constant (`= value` when not a string).
        requires: config field -> the only value that is supported.
        equal: config field -> another one that it must equal.
        unread: config field -> why it changes no logits. `config_fields` has those of all families.
        unlisted: fields that the family's model in transformers reads though its config class does not list them.
        windows: which of `sliding_window` and `layer_types` the family heeds; others carry them without effect.
    """

    model_type: str
    block: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()
    windows: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer: its sizes and shapes, and what its tensors are called. Another layer's may be others.

    Attributes:
        index: of the layer, from 0.
        prefix: of the names of its tensors, with the trailing dot.
        modules: role -> module path inside the layer, in the family's order.
        activation: of the MLP, by the name that transformers gives it.
        bits: of most stored numbers, by which indices are counted.
        own_bits: `role.weight` or `role.bias` -> bits of a number, of the tensors that are stored in another dtype.
        outer: role -> module path and shape of the matrices outside of the layers that go with this one: `embed` with
            the first, `head` with the last. None of its own roles, they are part of it only where they are asked for.
    """

    model_type: str
    index: int
    prefix: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    modules: tuple[tuple[str, str], ...]
    biases: frozenset[str]
    layer_norm: bool
    activation: str
    bits: int
    outer: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    own_bits: tuple[tuple[str, int], ...] = ()

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that this layer has, in the family's order."""
        return tuple(role for role, _ in self.modules)

    def weight_shape(self, role: str) -> tuple[int, ...]:
        """Shape of the dense weight of a role: (out, in) of a linear, (D,) or (d,) of a norm."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            **{name: shape for name, _, shape in self.outer},
            "q": (query, self.hidden),
            "k": (key_value, self.hidden),
            "v": (key_value, self.hidden),
            "o": (self.hidden, query),
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        return shapes.get(role) or ((self.head_dim,) if role in HEAD_NORM_ROLES else (self.hidden,))

    def role_shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        """`weight` and, where the module has one, `bias` -> shape."""
        weight = self.weight_shape(role)
        has_bias = role in self.biases or (role in NORM_ROLES and self.layer_norm)
        return {"weight": weight, "bias": weight[:1]} if has_bias else {"weight": weight}

    def path(self, role: str) -> str:
        """Module path of a role, as the checkpoint names it."""
        outside = {name: path for name, path, _ in self.outer}
        return outside.get(role) or self.prefix + dict(self.modules)[role]

    def group_path(self, roles: tuple[str, ...], name: str) -> str:
        """Module path of what the roles of a group share: NAME, below the deepest module that holds the attention's, or
        the MLP's roles. The groups `attention` and `mlp` of all these lie in that module itself, or where it is the
        layer, in `NAME_factors`."""
        halves = (("q", "k", "v", "o", *HEAD_NORM_ROLES), ("gate", "up", "down"))
        beside = next(half for half in halves if roles[0] in half)
        parents = [path.split(".")[:-1] for role, path in self.modules if role in beside]
        shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
        inside = [*shared, name] if name not in ("attention", "mlp") else shared or [f"{name}_factors"]
        return self.prefix + ".".join(inside)

    def tensor_name(self, key: str, roles: tuple[str, ...]) -> str:
        """Checkpoint name of `ROLE.PART`, or `GROUP.PART` for the group of `roles`; GROUP.pivoted may be a role's."""
        for role in (*self.roles, *self._outside(roles)):
            part = key.removeprefix(f"{role}.")
            if part != key and not part.startswith("pivoted."):
                return f"{self.path(role)}.{part}"
        group, _, part = key.partition(".")
        return f"{self.group_path(roles, group)}.{part}"

    def tensors(self, roles: Collection[str] | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
        """`role.weight` / `role.bias` -> (tensor name in the checkpoint, shape), of all or only some of its roles."""
        return {
            f"{role}.{part}": (f"{self.path(role)}.{part}", shape)
            for role in (*self.roles, *self._outside(roles or ()))
            if roles is None or role in roles
            for part, shape in self.role_shapes(role).items()
        }

    def _outside(self, roles: Collection[str]) -> tuple[str, ...]:
        """Those of some roles that lie outside of the layer."""
        return tuple(role for role, _, _ in self.outer if role in roles)

    def numbers(self, roles: Collection[str] | None = None) -> int:
        """How many numbers the dense layer (or only some of its roles) stores."""
        return sum(math.prod(shape) for _, shape in self.tensors(roles).values())

    def bits_of(self, key: str) -> int:
        """Bits of a stored number of `role.weight` or `role.bias`."""
        return dict(self.own_bits).get(key, self.bits)

    def num_bytes(self, roles: Collection[str] | None = None) -> int:
        """Stored by the dense layer (or only some of its roles), each tensor in its own dtype."""
        return sum(math.prod(shape) * self.bits_of(key) // 8 for key, (_, shape) in self.tensors(roles).items())

    @property
    def cache_numbers(self) -> int:
        """How many numbers the dense layer caches per token, keys and values together."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Geometry:
    """The numbers of one model of a family: what is the whole model's, and `layers`, each by itself.

    Attributes:
        layers: in order; whatever reads a layer's sizes takes that layer's, and a total is a sum over them.
        outer: (name, shape) of every tensor outside of the layers.
        outer_bits: name -> bits of a number, of those of them that are stored in another dtype than the layers.
    """

    model_type: str
    hidden: int
    vocab: int
    tied: bool
    layers_path: str
    layers: tuple[LayerGeometry, ...]
    outer: tuple[tuple[str, tuple[int, ...]], ...]
    outer_bits: tuple[tuple[str, int], ...] = ()

    @property
    def bits(self) -> int:
        """Of most stored numbers, by which indices are counted; the same in all layers."""
        return self.layers[0].bits

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold -> its shape."""
        expected = dict(self.outer)
        for layer in self.layers:
            expected.update(layer.tensors().values())
        return expected

    def decoder_numbers(self) -> int:
        """How many numbers the dense layers store."""
        return sum(layer.numbers() for layer in self.layers)

    def model_numbers(self) -> int:
        """How many numbers the whole dense model stores; tied embeddings once."""
        return self.decoder_numbers() + sum(math.prod(shape) for _, shape in self.outer)

    def decoder_bytes(self) -> int:
        """Stored by the dense layers, each tensor in its own dtype."""
        return sum(layer.num_bytes() for layer in self.layers)

    def model_bytes(self) -> int:
        """Stored by the whole dense model; tied embeddings once."""
        own = dict(self.outer_bits)
        return self.decoder_bytes() + sum(
            math.prod(shape) * own.get(name, self.bits) // 8 for name, shape in self.outer
        )
