"""What a model family is, as data: where its tensors are called what, and which numbers its config gives.

Legend: D hidden, H query heads, G key/value heads, d head_dim, N intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

LINEAR_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
NORM_ROLES = ("input_norm", "mlp_norm")
HEAD_NORM_ROLES = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Family:
    """One family of decoder models. A new family is one such value in a file of its own, listed in `registry.py`.

    Attributes:
        block: what a layer is, as the `block` of a checkpoint's config.json says it (`lamina.block_lamina` lists the
            keys and checks them): module paths, roles, norm, rotation. `biases` map a role to True, or to the name of
            the config field that says whether the module has a bias.
        fields: standard config name -> this family's name for it, or a constant (`= value` when not a string).
        requires: config field -> the only value that is supported.
        windows: which of `sliding_window` and `layer_types` the family heeds; others carry them without effect.
    """

    model_type: str
    block: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Geometry:
    """The numbers of one model of a family; everything about shapes and names that planning and solving need.

    Attributes:
        activation: of the MLP, by the name that transformers gives it.
        bits: of a stored number, by which indices are counted.
    """

    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    layers_path: str
    modules: tuple[tuple[str, str], ...]
    biases: frozenset[str]
    layer_norm: bool
    outer: tuple[tuple[str, tuple[int, ...]], ...]
    activation: str = "silu"
    bits: int = 16

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles this model's layers have, in the family's order."""
        return tuple(role for role, _ in self.modules)

    def weight_shape(self, role: str) -> tuple[int, ...]:
        """Shape of the dense weight of a role: (out, in) of a linear, (D,) or (d,) of a norm."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
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

    def path(self, layer: int, role: str) -> str:
        """Module path of a role in a layer, as the checkpoint names it."""
        return f"{self.layers_path}.{layer}.{dict(self.modules)[role]}"

    def group_path(self, layer: int, roles: tuple[str, ...], name: str) -> str:
        """Module path of what the roles of a group share: NAME, below the deepest module that holds the attention's, or
        the MLP's roles. The groups `attention` and `mlp` of all these lie in that module itself, or where it is the
        layer, in `NAME_factors`."""
        halves = (("q", "k", "v", "o", *HEAD_NORM_ROLES), ("gate", "up", "down"))
        beside = next(half for half in halves if roles[0] in half)
        parents = [path.split(".")[:-1] for role, path in self.modules if role in beside]
        shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
        inside = [*shared, name] if name not in ("attention", "mlp") else shared or [f"{name}_factors"]
        return ".".join([self.layers_path, str(layer), *inside])

    def tensor_name(self, layer: int, key: str, roles: tuple[str, ...]) -> str:
        """Checkpoint name of `ROLE.PART`, or `GROUP.PART` for the group of `roles`; GROUP.pivoted may be a role's."""
        for role in self.roles:
            part = key.removeprefix(f"{role}.")
            if part != key and not part.startswith("pivoted."):
                return f"{self.path(layer, role)}.{part}"
        group, _, part = key.partition(".")
        return f"{self.group_path(layer, roles, group)}.{part}"

    def layer_tensors(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """`role.weight` / `role.bias` -> (tensor name in the checkpoint, shape), for one layer."""
        return {key: found for role in self.roles for key, found in self.role_tensors(layer, role).items()}

    def role_tensors(self, layer: int, role: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The same of one role."""
        path, shapes = self.path(layer, role), self.role_shapes(role)
        return {f"{role}.{part}": (f"{path}.{part}", shape) for part, shape in shapes.items()}

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold -> its shape."""
        expected = dict(self.outer)
        for layer in range(self.num_layers):
            expected.update(self.layer_tensors(layer).values())
        return expected

    def layer_numbers(self, roles: tuple[str, ...] | None = None) -> int:
        """How many numbers one dense layer (or only some of its roles) stores."""
        chosen = self.roles if roles is None else roles
        return sum(_product(shape) for role in chosen for shape in self.role_shapes(role).values())

    def model_numbers(self) -> int:
        """How many numbers the whole dense model stores; tied embeddings once."""
        return self.num_layers * self.layer_numbers() + sum(_product(shape) for _, shape in self.outer)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
