"""The interface of stored forms, and the forms that are one matrix.

D hidden, H query heads, G key/value heads, d head_dim, N MLP width, k kept channels, r rank or width of a value head.
"""

from typing import Any, ClassVar, NamedTuple

from torch import nn

from .block_lamina import LINEAR_ROLES, MLP_ROLES, LayerShape
from .foreign_lamina import LATENT_OUTPUT

FormSpec = dict[str, Any]  # an entry of config.forms: {"form": "low_rank", "rank": 8}
VALUE_ROLES = ("v", "o")
# Fields of factored forms that describe a projection before it is factored: the numbers of a value head where v and o
# are in a basis of their own, and the channels that the MLP keeps.
WIDTH_FIELDS = {"value_rank": (*VALUE_ROLES, LATENT_OUTPUT), "width": MLP_ROLES}


class Source(NamedTuple):
    """A module whose output is passed to roles' modules. Called once per forward for all roles with an equal source."""

    path: str  # inside the layer
    args: tuple[str, ...] = ()  # passed after the roles' input


class Form:
    """A way to store a projection; this base class stores it whole, as in the source.

    A new form is a class and its line in FORMS. P is the role's module path.
    """

    roles: ClassVar[tuple[str, ...]] = LINEAR_ROLES
    fields: ClassVar[tuple[str, ...]] = ()  # of the spec, besides "form"
    latent: ClassVar[bool] = False  # the cache holds the source's output; the role's module reads it

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        """Return the path below P of the linear that tensor parallelism cuts by heads or channels; None if none."""
        return ""

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        """Return the name and value of the largest rank; None if the form has no rank."""
        return None

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        """Describe the first wrong value of a spec's fields; None if all are right."""
        for name, largest in (("value_rank", shape.value_dim), ("width", shape.intermediate_size)):
            if name in spec and role not in WIDTH_FIELDS[name]:
                return f"has {name} for {', '.join(WIDTH_FIELDS[name])} only"
            if name in spec and not is_count(spec[name], largest):
                return f"{name} {spec[name]}, allowed is 1 to {largest}"
        if (limit := self.limit(shape, role, spec)) is None or is_count(spec.get("rank"), limit[1]):
            return None
        return f"rank {spec.get('rank')!r}, allowed is 1 to {limit[0]} {limit[1]}"

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        """Return the specs that other roles of the layer must have."""
        return {}

    def source(self, shape: LayerShape, role: str, spec: FormSpec) -> Source | None:
        """Return the source of the second argument of the role's module, if it has one."""
        return None

    def shared_module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module | None:
        """Build the module at the source's path, unless it is part of a role's module."""
        return None

    def head_width(self, shape: LayerShape, spec: FormSpec) -> int:
        """Return the numbers of a value head: v writes them, o reads them."""
        return int(spec.get("value_rank", shape.head_dim))

    def inner_width(self, shape: LayerShape, spec: FormSpec) -> int:
        """Return the channels of the MLP: gate and up write them, down reads them."""
        return int(spec.get("width", shape.intermediate_size))

    def cache_numbers(self, shape: LayerShape, role: str, spec: FormSpec) -> int:
        """Return the numbers per token that the layer caches for this role (k or v)."""
        return shape.num_key_value_heads * (shape.head_dim if role == "k" else self.head_width(shape, spec))

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        """Build the module at P, uninitialised."""
        return nn.Linear(*self.widths(shape, role, spec), bias=self.has_bias(shape, role))

    def has_bias(self, shape: LayerShape, role: str) -> bool:
        """Return True if the role's module adds a bias."""
        return role in shape.biases

    def widths(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[int, int]:
        """Return the inputs and outputs of the projection, before it is factored."""
        if role == LATENT_OUTPUT:
            return shape.num_attention_heads * int(spec.get("value_rank", shape.value_dim)), shape.hidden_size
        return shape.widths(role, self.head_width(shape, spec), self.inner_width(shape, spec))


class HeadPca(Form):
    """v: `P.weight` (G·r, D), `P.bias` (G·r); o: `P.weight` (D, H·r). The cache holds r numbers per value head."""

    roles = VALUE_ROLES
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        return "head_dim", shape.head_dim

    def head_width(self, shape: LayerShape, spec: FormSpec) -> int:
        return int(spec["rank"])


class Pruned(Form):
    """gate, up: `P.weight` (k, D), `P.bias` (k); down: `P.weight` (D, k). k channels of the MLP are kept."""

    roles = MLP_ROLES
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        return "intermediate_size", shape.intermediate_size

    def inner_width(self, shape: LayerShape, spec: FormSpec) -> int:
        return int(spec["rank"])


def is_count(number: Any, largest: int) -> bool:
    """Return True if `number` is an integer from 1 to `largest`."""
    return type(number) is int and 1 <= number <= largest
