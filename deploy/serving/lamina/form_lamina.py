"""What a stored form says of itself, and the forms that are one matrix.

D hidden, H query heads, G key/value heads, d head_dim, N MLP width, k kept channels, r rank or width of a value head.
"""

from typing import Any, ClassVar, NamedTuple

from torch import nn

from .block_lamina import LINEAR_ROLES, MLP_ROLES, LayerShape

FormSpec = dict[str, Any]  # what config.forms says of a role: {"form": "low_rank", "rank": 8}
VALUE_ROLES = ("v", "o")
# Fields of factored forms that say what a projection is before it is factored: how many numbers a value head has
# where v and o are in a basis of their own, and how many channels the MLP keeps.
WIDTH_FIELDS = {"value_rank": VALUE_ROLES, "width": MLP_ROLES}


class Source(NamedTuple):
    """A module whose output roles are given; it is called once per forward for all roles with an equal source."""

    path: str  # inside the layer
    args: tuple[str, ...] = ()  # after the roles' input


class Form:
    """A way to store a projection; this one: whole, as in the source.

    A form says everything about itself: a new one is a class, and its line in FORMS. P is the role's module path.
    """

    roles: ClassVar[tuple[str, ...]] = LINEAR_ROLES
    fields: ClassVar[tuple[str, ...]] = ()  # of the spec, besides "form"
    latent: ClassVar[bool] = False  # the cache holds the source's output; the role's module reads it

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        """Where below P the linear is that tensor parallelism cuts by heads or channels; None: there is none."""
        return ""

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        """The name and value of what a rank must not exceed; None: the form has no rank."""
        return None

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        """What is wrong with the values of a spec's fields; None if nothing is."""
        for name, largest in (("value_rank", shape.head_dim), ("width", shape.intermediate_size)):
            if name in spec and role not in WIDTH_FIELDS[name]:
                return f"has {name} for {', '.join(WIDTH_FIELDS[name])} only"
            if name in spec and not is_count(spec[name], largest):
                return f"{name} {spec[name]}, allowed is 1 to {largest}"
        if (limit := self.limit(shape, role, spec)) is None or is_count(spec.get("rank"), limit[1]):
            return None
        return f"rank {spec.get('rank')!r}, allowed is 1 to {limit[0]} {limit[1]}"

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        """What other roles of the layer must have beside this."""
        return {}

    def source(self, shape: LayerShape, role: str, spec: FormSpec) -> Source | None:
        """Where the second argument of the role's module comes from, if it gets one."""
        return None

    def shared_module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module | None:
        """The module at the source's path, unless it is part of a role's module."""
        return None

    def head_width(self, shape: LayerShape, spec: FormSpec) -> int:
        """Numbers of a value head in attention: what v gives and o reads."""
        return int(spec.get("value_rank", shape.head_dim))

    def inner_width(self, shape: LayerShape, spec: FormSpec) -> int:
        """Channels of the MLP: what gate and up give and down reads."""
        return int(spec.get("width", shape.intermediate_size))

    def cache_numbers(self, shape: LayerShape, role: str, spec: FormSpec) -> int:
        """Numbers per token that the layer caches for this role (k or v)."""
        return shape.num_key_value_heads * (shape.head_dim if role == "k" else self.head_width(shape, spec))

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        """The module at P, uninitialised."""
        return nn.Linear(*self.widths(shape, role, spec), bias=self.has_bias(shape, role))

    def has_bias(self, shape: LayerShape, role: str) -> bool:
        """Whether the role's module adds a bias."""
        return role in shape.biases

    def widths(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[int, int]:
        """Numbers in and out of the projection, before it is factored."""
        hidden, heads, kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
        width, inner = self.head_width(shape, spec), self.inner_width(shape, spec)
        return {
            "q": (hidden, heads * shape.head_dim), "k": (hidden, kv_heads * shape.head_dim),
            "v": (hidden, kv_heads * width), "o": (heads * width, hidden),
            "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
        }[role]  # fmt: skip


class HeadPca(Form):
    """v: `P.weight` (G·r, D), `P.bias` (G·r); o: `P.weight` (D, H·r). The cache holds r numbers per value head."""

    roles = VALUE_ROLES
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        """A value head has at most the source's `head_dim` numbers."""
        return "head_dim", shape.head_dim

    def head_width(self, shape: LayerShape, spec: FormSpec) -> int:
        """The rank."""
        return int(spec["rank"])


class Pruned(Form):
    """gate, up: `P.weight` (k, D), `P.bias` (k); down: `P.weight` (D, k). k channels of the MLP are kept."""

    roles = MLP_ROLES
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        """At most the source's channels."""
        return "intermediate_size", shape.intermediate_size

    def inner_width(self, shape: LayerShape, spec: FormSpec) -> int:
        """The rank: the channels that are kept."""
        return int(spec["rank"])


def is_count(number: Any, largest: int) -> bool:
    """Whether `number` is an integer from 1 to `largest`."""
    return type(number) is int and 1 <= number <= largest
