"""How a projection may be stored: what config.json says of it, and the module that it becomes.

D hidden, H query heads, G key/value heads, d head_dim, N MLP width, k kept channels, n heads of a projection, r rank.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from .block_lamina import LINEAR_ROLES, MLP_ROLES, QKVO_ROLES, ROWWISE_ROLES, LayerShape, attention_path, mlp_path
from .factored_lamina import HeadLowRankLinear, LowRankLinear, RoleOutput
from .tucker_lamina import CoreShape, TuckerLinears

Spec = dict[str, Any]  # what config.forms says of a role: {"form": "low_rank", "rank": 8}


class Source(NamedTuple):
    """A module whose output roles are given; it is called once per forward for all roles with an equal source."""

    path: str  # inside the layer
    args: tuple[str, ...] = ()  # after the roles' input


class Form:
    """A way to store a projection; this one: whole, as in the source.

    A form says everything about itself: a new one is a class below, and its line in FORMS. P is the role's module path.
    """

    roles: ClassVar[tuple[str, ...]] = LINEAR_ROLES
    fields: ClassVar[tuple[str, ...]] = ()  # of the spec, besides "form"
    plain: ClassVar[bool] = True  # one nn.Linear, which tensor parallelism can cut
    latent: ClassVar[bool] = False  # the cache holds the source's output; the role's module reads it

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        """The name and value of what a rank must not exceed; None: the form has no rank."""
        return None

    def problem(self, shape: LayerShape, role: str, spec: Spec) -> str | None:
        """What is wrong with the values of a spec's fields."""
        if (limit := self.limit(shape, role)) is None or _is_count(spec.get("rank"), limit[1]):
            return None
        return f"rank {spec.get('rank')}, allowed is 1 to {limit[0]} {limit[1]}"

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        """What other roles of the layer must have beside this."""
        return {}

    def source(self, shape: LayerShape, role: str, spec: Spec) -> Source | None:
        """Where the second argument of the role's module comes from, if it gets one."""
        return None

    def shared_module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module | None:
        """The module at the source's path, unless it is part of a role's module."""
        return None

    def head_width(self, shape: LayerShape, spec: Spec) -> int:
        """Numbers of a value head in attention."""
        return shape.head_dim

    def inner_width(self, shape: LayerShape, spec: Spec) -> int:
        """Channels of the MLP."""
        return shape.intermediate_size

    def cache_numbers(self, shape: LayerShape, role: str, spec: Spec) -> int:
        """Numbers per token that the layer caches for this role (k or v)."""
        return shape.num_key_value_heads * (shape.head_dim if role == "k" else self.head_width(shape, spec))

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        """The module at P, uninitialised."""
        return nn.Linear(*self.widths(shape, role, spec), bias=self.has_bias(shape, role))

    def has_bias(self, shape: LayerShape, role: str) -> bool:
        return role in shape.biases

    def widths(self, shape: LayerShape, role: str, spec: Spec) -> tuple[int, int]:
        """Numbers in and out of the projection."""
        hidden, heads, kv_heads = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
        width, inner = self.head_width(shape, spec), self.inner_width(shape, spec)
        return {
            "q": (hidden, heads * shape.head_dim), "k": (hidden, kv_heads * shape.head_dim),
            "v": (hidden, kv_heads * width), "o": (heads * width, hidden),
            "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
        }[role]  # fmt: skip


class HeadPca(Form):
    """v: `P.weight` (G·r, D), `P.bias` (G·r); o: `P.weight` (D, H·r). The cache holds r numbers per value head."""

    roles = ("v", "o")
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        return "head_dim", shape.head_dim

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        return dict.fromkeys(self.roles, spec)

    def head_width(self, shape: LayerShape, spec: Spec) -> int:
        return int(spec["rank"])


class Pruned(Form):
    """gate, up: `P.weight` (k, D), `P.bias` (k); down: `P.weight` (D, k). k channels of the MLP are kept."""

    roles = MLP_ROLES
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        return "intermediate_size", shape.intermediate_size

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        return {other: spec for other in self.roles if other in shape.modules}

    def inner_width(self, shape: LayerShape, spec: Spec) -> int:
        return int(spec["rank"])


class HeadLowRankForm(Form):
    """`P.first.weight` (n·r, D), `P.second` (n, d, r), `P.bias` (n·d): two factors per head."""

    roles = ("q", "k")
    fields = ("rank",)
    plain = False

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        return "head_dim", shape.head_dim

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        widths = self.widths(shape, role, spec)
        return HeadLowRankLinear(*widths, shape.head_dim, spec["rank"], self.has_bias(shape, role))


class LowRankForm(Form):
    """`P.first.weight` (r, in), `P.second.weight` (out, r), `P.bias` (out)."""

    fields: ClassVar[tuple[str, ...]] = ("rank",)
    plain = False

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        return "min(in, out)", min(self.widths(shape, role, {}))

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        return LowRankLinear(*self.widths(shape, role, spec), spec["rank"], self.has_bias(shape, role))


class JointLowRank(LowRankForm):
    """The first role of a group has `P.first.weight` (r, D) for both, each its `P.second.weight` (out, r), `P.bias`."""

    roles: ClassVar[tuple[str, ...]] = ("q", "k", "gate", "up")
    fields = ("rank", "group")
    groups: ClassVar[dict[str, tuple[str, str]]] = {"query_key": ("q", "k"), "gate_up": ("gate", "up")}

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        pair = next(pair for pair in self.groups.values() if role in pair)
        return "min(in, out of both)", min(shape.hidden_size, sum(self.widths(shape, r, {})[1] for r in pair))

    def problem(self, shape: LayerShape, role: str, spec: Spec) -> str | None:
        pair = self.groups.get(spec.get("group", ""), ())
        if role not in pair:
            return f"group {spec.get('group')!r}, allowed is {[g for g, pair in self.groups.items() if role in pair]}"
        return super().problem(shape, role, spec)

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        return dict.fromkeys(self.groups[spec["group"]], spec)

    def source(self, shape: LayerShape, role: str, spec: Spec) -> Source | None:
        return Source(f"{shape.modules[self.groups[spec['group']][0]]}.first")

    def owns_first(self, role: str, spec: Spec) -> bool:
        return role == self.groups[spec["group"]][0]

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        widths, bias = self.widths(shape, role, spec), self.has_bias(shape, role)
        return LowRankLinear(*widths, spec["rank"], bias, first=self.owns_first(role, spec))


class JointHeadLowRank(JointLowRank):
    """Per head (H = G): q has `P.first.weight` (H·r, D) for both, each its `P.second` (n, d, r), `P.bias`."""

    roles = ("q", "k")
    groups: ClassVar[dict[str, tuple[str, str]]] = {"query_key": ("q", "k")}

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        return "min(hidden_size, 2 head_dim)", min(shape.hidden_size, 2 * shape.head_dim)

    def problem(self, shape: LayerShape, role: str, spec: Spec) -> str | None:
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        if heads != kv_heads:
            return f"needs as many query as key heads, not {heads} and {kv_heads}"
        return super().problem(shape, role, spec)

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        widths, bias = self.widths(shape, role, spec), self.has_bias(shape, role)
        return HeadLowRankLinear(*widths, shape.head_dim, spec["rank"], bias, first=self.owns_first(role, spec))


class Latent(LowRankForm):
    """`P.first.weight` (r, D), `P.second.weight` (G·d, r), `P.bias` (G·d): the cache holds first(x), r numbers.

    Keys are made, normed and rotated when they are read. Values with `absorbed` have `P.first.weight` only: all heads
    attend over the same r numbers, and o has the form `absorbed`.
    """

    roles = ("k", "v")
    fields = ("rank", "absorbed")
    latent = True

    def problem(self, shape: LayerShape, role: str, spec: Spec) -> str | None:
        if type(spec.get("absorbed", False)) is not bool or (role == "k" and "absorbed" in spec):
            return f"absorbed {spec['absorbed']}, which is true or false for v and nothing for k"
        return super().problem(shape, role, spec)

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        return {"o": {"form": "absorbed", "rank": spec["rank"]}} if spec.get("absorbed") else {}

    def source(self, shape: LayerShape, role: str, spec: Spec) -> Source | None:
        return Source(f"{shape.modules[role]}.first")

    def head_width(self, shape: LayerShape, spec: Spec) -> int:
        return int(spec["rank"]) if spec.get("absorbed") else shape.head_dim

    def cache_numbers(self, shape: LayerShape, role: str, spec: Spec) -> int:
        return int(spec["rank"])

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        absorbed, widths = spec.get("absorbed", False), self.widths(shape, role, {})
        return LowRankLinear(*widths, spec["rank"], self.has_bias(shape, role) and not absorbed, second=not absorbed)

    def widths(self, shape: LayerShape, role: str, spec: Spec) -> tuple[int, int]:
        return Form().widths(shape, role, {})


class Absorbed(Form):
    """o over absorbed latent values: `P.weight` (D, H·r), and `P.bias` (D) if o or v has one in the source."""

    roles = ("o",)
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str) -> tuple[str, int] | None:
        return FORMS["latent"].limit(shape, "v")

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        return {"v": {"form": "latent", "rank": spec["rank"], "absorbed": True}}

    def head_width(self, shape: LayerShape, spec: Spec) -> int:
        return int(spec["rank"])

    def has_bias(self, shape: LayerShape, role: str) -> bool:
        return not {"o", "v"}.isdisjoint(shape.biases)  # v's bias, seen through o, is a constant


class TuckerForm(Form):
    """All roles of the attention, or of the MLP, at once; P has `P.bias` only. See TuckerLinears for the rest.

    Fields, the same on all roles: `ranks` [R1, R2, R3]; `sparse` (default false) with `nnz<suffix>` for each core;
    attention only: `own_output` (default false) with `ranks_o` [R1, R2]. The tensors lie at `tucker` below the module
    that holds the roles (`self_attn.tucker.first`), or below `mlp_factors` where an MLP has no such module.
    Suffixes: "" in the MLP (rows of `third`: gate, up, down) and in attention with G = H (q, k, v, o); `_qo` and `_kv`
    in attention with G < H. With `own_output`, o has core, first and second with `_o`, and `_qo` becomes `_q`.
    """

    fields = ("ranks", "sparse", "own_output", "ranks_o", "nnz", "nnz_qo", "nnz_q", "nnz_kv", "nnz_o")
    plain = False

    def problem(self, shape: LayerShape, role: str, spec: Spec) -> str | None:
        if bad := [f for f in ("sparse", "own_output") if type(spec.get(f, False)) is not bool]:
            return f"{bad[0]} {spec[bad[0]]!r}, allowed are true and false"
        own, attention = spec.get("own_output", False), role in QKVO_ROLES
        if not attention and ("own_output" in spec or "ranks_o" in spec):
            return "has own_output and ranks_o in attention only"
        if own != ("ranks_o" in spec):
            return "needs both own_output and ranks_o, or neither"
        roles = [r for r in self._group(shape, role) if not (own and r == "o")]
        inner = shape.head_dim if attention else shape.intermediate_size
        limits = (shape.hidden_size, inner, len(roles))
        for name, largest in (("ranks", limits), ("ranks_o", limits[:2]))[: 1 + own]:
            ranks = spec.get(name)
            if not isinstance(ranks, (list, tuple)) or len(ranks) != len(largest):
                return f"{name} {ranks}, expected {len(largest)} numbers"
            if not all(map(_is_count, ranks, largest)):
                return f"{name} {ranks}, allowed is 1 to {[*largest]}"
        cores = self._cores(shape, role, spec)
        needed = {f"nnz{core.suffix}" for core in cores} if spec.get("sparse") else set()
        if {f for f in spec if f.startswith("nnz")} != needed:
            return f"with sparse {spec.get('sparse', False)} needs {', '.join(sorted(needed)) or 'no nnz'}"
        for core in cores if needed else ():
            if not _is_count(core.nnz, torch.Size(core.shape).numel()):
                return f"nnz{core.suffix} {core.nnz}, allowed is 1 to {torch.Size(core.shape).numel()} of {core.shape}"
        return None

    def partners(self, shape: LayerShape, role: str, spec: Spec) -> dict[str, Spec]:
        return dict.fromkeys(self._group(shape, role), spec)

    def source(self, shape: LayerShape, role: str, spec: Spec) -> Source | None:
        modules = shape.modules
        parent = attention_path(modules) if role in QKVO_ROLES else mlp_path(modules)
        return Source(f"{parent}.tucker", ("out" if role in ROWWISE_ROLES else "in",))

    def shared_module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module | None:
        inner = shape.head_dim if role in QKVO_ROLES else shape.intermediate_size
        return TuckerLinears(shape.hidden_size, inner, self._cores(shape, role, spec), shape.core_format == "csr")

    def module(self, shape: LayerShape, role: str, spec: Spec) -> nn.Module:
        return RoleOutput(role, self.widths(shape, role, spec)[1], self.has_bias(shape, role))

    def _group(self, shape: LayerShape, role: str) -> tuple[str, ...]:
        group = QKVO_ROLES if role in QKVO_ROLES else MLP_ROLES
        return tuple(r for r in group if r in shape.modules)

    def _cores(self, shape: LayerShape, role: str, spec: Spec) -> tuple[CoreShape, ...]:
        heads, kv_heads, own = shape.num_attention_heads, shape.num_key_value_heads, spec.get("own_output", False)
        rank_1, rank_2, rank_3 = spec["ranks"]

        def core(suffix: str, roles: tuple[str, ...], num_heads: int, rank_3: int) -> CoreShape:
            return CoreShape(suffix, roles, num_heads, (rank_1, rank_2, rank_3), spec.get(f"nnz{suffix}"))

        if role not in QKVO_ROLES:
            return (core("", self._group(shape, role), 1, rank_3),)
        if heads == kv_heads:
            cores = [core("", QKVO_ROLES[:3] if own else QKVO_ROLES, heads, rank_3)]
        else:
            query = core("_q", ("q",), heads, 1) if own else core("_qo", ("q", "o"), heads, min(rank_3, 2))
            cores = [query, core("_kv", ("k", "v"), kv_heads, min(rank_3, 2))]
        if own:
            rank_1, rank_2 = spec["ranks_o"]
            cores.append(CoreShape("_o", ("o",), heads, (rank_1, rank_2, 1), spec.get("nnz_o"), own_factors=True))
        return tuple(cores)


def _is_count(number: Any, largest: int) -> bool:
    return type(number) is int and 1 <= number <= largest


FORMS: dict[str, Form] = {
    "dense": Form(),
    "head_pca": HeadPca(),
    "pruned": Pruned(),
    "head_low_rank": HeadLowRankForm(),
    "low_rank": LowRankForm(),
    "joint_low_rank": JointLowRank(),
    "joint_head_low_rank": JointHeadLowRank(),
    "latent": Latent(),
    "absorbed": Absorbed(),
    "tucker": TuckerForm(),
}
