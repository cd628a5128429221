"""The forms of factored projections: their fields in config.json, and the modules that they become.

D hidden, H query heads, G key/value heads, d head_dim, N MLP width, n heads of a projection, r rank.
"""

from typing import ClassVar

import torch
from torch import nn

from .block_lamina import (
    LINEAR_ROLES,
    MLP_ROLES,
    QKVO_ROLES,
    ROWWISE_ROLES,
    LayerShape,
    attention_path,
    mlp_parent,
    mlp_path,
)
from .factored_lamina import HeadLowRankLinear, LowRankLinear, PivotedLinear, PivotedLinears, RoleOutput
from .foreign_lamina import LATENT_OUTPUT, LATENTS, rank_step
from .form_lamina import WIDTH_FIELDS, Form, FormSpec, HeadPca, Pruned, Source, is_count
from .tucker_lamina import CoreShape, TuckerLinears


class HeadLowRankForm(Form):
    """`P.first.weight` (n·r, D), `P.second` (n, d, r), `P.bias` (n·d): two factors per head."""

    roles = ("q", "k")
    fields = ("rank",)

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        return None  # the factors hold parts of all heads, or lie elsewhere

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        return "head_dim", shape.head_dim

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        widths = self.widths(shape, role, spec)
        return HeadLowRankLinear(*widths, shape.head_dim, spec["rank"], self.has_bias(shape, role))


class LowRankForm(Form):
    """`P.first.weight` (r, in), `P.second.weight` (out, r), `P.bias` (out)."""

    roles: ClassVar[tuple[str, ...]] = (*LINEAR_ROLES, LATENT_OUTPUT)
    fields: ClassVar[tuple[str, ...]] = ("rank", *WIDTH_FIELDS)

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        if role in ROWWISE_ROLES:  # the factor on the side of the heads or channels
            return ".first"
        return None if has_bias or spec.get("absorbed") else ".second"  # a bias would have to be cut with it

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        return "min(in, out)", min(self.widths(shape, role, spec))

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        return LowRankLinear(*self.widths(shape, role, spec), spec["rank"], self.has_bias(shape, role))


class JointLowRank(LowRankForm):
    """The first role of a group has `P.first.weight` (r, D) for both, each its `P.second.weight` (out, r), `P.bias`."""

    roles: ClassVar[tuple[str, ...]] = ("q", "k", "gate", "up")
    fields = ("rank", "group", *WIDTH_FIELDS)
    groups: ClassVar[dict[str, tuple[str, str]]] = {"query_key": ("q", "k"), "gate_up": ("gate", "up")}

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        pair = next(pair for pair in self.groups.values() if role in pair)
        return "min(in, out of both)", min(shape.hidden_size, sum(self.widths(shape, r, spec)[1] for r in pair))

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        pair = self.groups.get(str(spec.get("group")), ())
        if role not in pair:
            return f"group {spec.get('group')!r}, allowed is {[g for g, pair in self.groups.items() if role in pair]}"
        return super().problem(shape, role, spec)

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        return dict.fromkeys(self.groups[spec["group"]], spec)

    def source(self, shape: LayerShape, role: str, spec: FormSpec) -> Source | None:
        return Source(f"{shape.modules[self.groups[spec['group']][0]]}.first")

    def owns_first(self, role: str, spec: FormSpec) -> bool:
        """Return True if the first factor belongs to this role's module."""
        return role == self.groups[spec["group"]][0]

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        widths, bias = self.widths(shape, role, spec), self.has_bias(shape, role)
        return LowRankLinear(*widths, spec["rank"], bias, first=self.owns_first(role, spec))


class JointHeadLowRank(JointLowRank):
    """Per head (H = G): q has `P.first.weight` (H·r, D) for both, each its `P.second` (n, d, r), `P.bias`."""

    roles = ("q", "k")
    fields = ("rank", "group")
    groups: ClassVar[dict[str, tuple[str, str]]] = {"query_key": ("q", "k")}

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        return None  # the factors hold parts of all heads, or lie elsewhere

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        return "min(hidden_size, 2 head_dim)", min(shape.hidden_size, 2 * shape.head_dim)

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        if heads != kv_heads:
            return f"needs as many query as key heads, not {heads} and {kv_heads}"
        return super().problem(shape, role, spec)

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        widths, bias = self.widths(shape, role, spec), self.has_bias(shape, role)
        return HeadLowRankLinear(*widths, shape.head_dim, spec["rank"], bias, first=self.owns_first(role, spec))


class Pivoted(Form):
    """A group of roles as r of their rows and the coefficients of the others (PivotedLinears). P has `P.bias` only.

    The group's tensors lie at `GROUP.pivoted` below the module that holds the attention or the MLP
    (`self_attn.query_key.pivoted`, `mlp.down.pivoted`), or in the layer where an MLP has no such module. The output
    projection of latent attention is a PivotedLinear of its own, and P has `P.pivoted` besides.
    """

    roles = ("q", "k", "o", LATENT_OUTPUT, "gate", "up", "down")
    fields = ("rank", "group", *WIDTH_FIELDS)
    groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "query_key": ("q", "k"), "output": ("o",), LATENT_OUTPUT: (LATENT_OUTPUT,), "gate_up": ("gate", "up"),
        "down": ("down",),
    }  # fmt: skip

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        return None  # the factors hold parts of all heads, or lie elsewhere

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        width, outputs = self._stack(shape, spec)
        return "min(in, out of all)", min(width, sum(outputs.values()))

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        if role not in self.groups.get(str(spec.get("group")), ()):
            return f"group {spec.get('group')!r}, allowed is {[g for g, roles in self.groups.items() if role in roles]}"
        return super().problem(shape, role, spec)

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        return {other: spec for other in self.groups[spec["group"]] if other in shape.modules}

    def source(self, shape: LayerShape, role: str, spec: FormSpec) -> Source | None:
        if role == LATENT_OUTPUT:
            return None
        parent = attention_path(shape.modules) if role in QKVO_ROLES else mlp_parent(shape.modules)
        return Source(".".join([*([parent] if parent else []), spec["group"], "pivoted"]))

    def shared_module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module | None:
        return PivotedLinears(*self._stack(shape, spec), spec["rank"])

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        if role == LATENT_OUTPUT:
            return PivotedLinear(*self.widths(shape, role, spec), spec["rank"], self.has_bias(shape, role))
        return RoleOutput(role, self.widths(shape, role, spec)[1], self.has_bias(shape, role))

    def _stack(self, shape: LayerShape, spec: FormSpec) -> tuple[int, dict[str, int]]:
        """Return the inputs of the stack, and its outputs by role."""
        widths = {r: self.widths(shape, r, spec) for r in self.groups[spec["group"]] if r in shape.modules}
        return next(iter(widths.values()))[0], {role: out for role, (_, out) in widths.items()}


class Latent(LowRankForm):
    """`P.first.weight` (r, D), `P.second.weight` (G·d, r), `P.bias` (G·d): the cache holds first(x), r numbers.

    Keys are computed, normed and rotated when they are read. Values with `absorbed` have `P.first.weight` only: all
    heads attend over the same r numbers, and o has the form `absorbed`.
    """

    roles = ("k", "v")
    fields = ("rank", "absorbed")
    latent = True

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        if type(spec.get("absorbed", False)) is not bool or (role == "k" and "absorbed" in spec):
            return f"absorbed {spec['absorbed']}, which is true or false for v and nothing for k"
        return super().problem(shape, role, spec)

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        return {"o": {"form": "absorbed", "rank": spec["rank"]}} if spec.get("absorbed") else {}

    def source(self, shape: LayerShape, role: str, spec: FormSpec) -> Source | None:
        return Source(f"{shape.modules[role]}.first")  # its output is cached

    def head_width(self, shape: LayerShape, spec: FormSpec) -> int:
        return int(spec["rank"]) if spec.get("absorbed") else shape.head_dim

    def cache_numbers(self, shape: LayerShape, role: str, spec: FormSpec) -> int:
        return int(spec["rank"])  # latents are common to all heads

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        absorbed, widths = spec.get("absorbed", False), self.widths(shape, role, {})
        return LowRankLinear(*widths, spec["rank"], self.has_bias(shape, role) and not absorbed, second=not absorbed)

    def widths(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[int, int]:
        return Form().widths(shape, role, {})  # the source's: absorbing does not change the largest rank


class Absorbed(Form):
    """o over absorbed latent values: `P.weight` (D, H·r), and `P.bias` (D) if o or v has one in the source."""

    roles = ("o",)
    fields = ("rank",)

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        return FORMS["latent"].limit(shape, "v", spec)

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        return {"v": {"form": "latent", "rank": spec["rank"], "absorbed": True}}

    def head_width(self, shape: LayerShape, spec: FormSpec) -> int:
        return int(spec["rank"])

    def has_bias(self, shape: LayerShape, role: str) -> bool:
        return not {"o", "v"}.isdisjoint(shape.biases)  # o maps v's bias to a constant


class TuckerForm(Form):
    """All roles of the attention, or of the MLP, as one TuckerLinears; P has `P.bias` only.

    Fields, the same on all roles: `ranks` [R1, R2, R3]; `sparse` (default false) with `nnz<suffix>` for each core;
    attention only: `own_output` (default false) with `ranks_o` [R1, R2]. The tensors lie at `tucker` below the module
    that holds the roles (`self_attn.tucker.first`), or below `mlp_factors` where an MLP has no such module.
    Suffixes: "" in the MLP (rows of `third`: gate, up, down) and in attention with G = H (q, k, v, o); `_qo` and `_kv`
    in attention with G < H. With `own_output`, o has core, first and second with `_o`, and `_qo` becomes `_q`.
    """

    fields = ("ranks", "sparse", "own_output", "ranks_o", "nnz", "nnz_qo", "nnz_q", "nnz_kv", "nnz_o")

    def cut(self, role: str, spec: FormSpec, has_bias: bool) -> str | None:
        return None  # the factors hold parts of all heads, or lie elsewhere

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
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
            if not all(map(is_count, ranks, largest)):
                return f"{name} {ranks}, allowed is 1 to {[*largest]}"
        cores = self._cores(shape, role, spec)
        needed = {f"nnz{core.suffix}" for core in cores} if spec.get("sparse") else set()
        if {f for f in spec if f.startswith("nnz")} != needed:
            return f"with sparse {spec.get('sparse', False)} needs {', '.join(sorted(needed)) or 'no nnz'}"
        for core in cores if needed else ():
            if not is_count(core.nnz, torch.Size(core.shape).numel()):
                return f"nnz{core.suffix} {core.nnz}, allowed is 1 to {torch.Size(core.shape).numel()} of {core.shape}"
        return None

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        return dict.fromkeys(self._group(shape, role), spec)

    def source(self, shape: LayerShape, role: str, spec: FormSpec) -> Source | None:
        modules = shape.modules
        parent = attention_path(modules) if role in QKVO_ROLES else mlp_path(modules)
        return Source(f"{parent}.tucker", ("out" if role in ROWWISE_ROLES else "in",))

    def shared_module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module | None:
        inner = shape.head_dim if role in QKVO_ROLES else shape.intermediate_size
        return TuckerLinears(shape.hidden_size, inner, self._cores(shape, role, spec), shape.core_format == "csr")

    def module(self, shape: LayerShape, role: str, spec: FormSpec) -> nn.Module:
        return RoleOutput(role, self.widths(shape, role, spec)[1], self.has_bias(shape, role))

    def _group(self, shape: LayerShape, role: str) -> tuple[str, ...]:
        group = QKVO_ROLES if role in QKVO_ROLES else MLP_ROLES
        return tuple(r for r in group if r in shape.modules)

    def _cores(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[CoreShape, ...]:
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


class Experts(Form):
    """router: `P.weight` (r, D), and as many score biases. Experts 0 to r - 1 of the layer are stored."""

    roles = ("router",)
    fields = ("rank",)


class Narrow(Form):
    """A latent of latent attention with r numbers: its writer, its norm and its reader, each as in the source.

    Further outputs of the writer, the rotated part of keys, stay. With `value_rank` each head has so many values; the
    output projection has it too, in this form (without a rank) or in a factored one.
    """

    roles = (*LATENTS["kv_lora_rank"], *LATENTS["q_lora_rank"], LATENT_OUTPUT)
    fields = ("rank", "value_rank")

    def limit(self, shape: LayerShape, role: str, spec: FormSpec) -> tuple[str, int] | None:
        field = _latent_of(role)
        return None if field is None else (field, shape.foreign[field])

    def problem(self, shape: LayerShape, role: str, spec: FormSpec) -> str | None:
        if role == LATENT_OUTPUT and ("rank" in spec or "value_rank" not in spec):
            return f"has value_rank and no rank for {LATENT_OUTPUT}"
        if "value_rank" in spec and role in LATENTS["q_lora_rank"]:
            return "has value_rank for keys and values only"
        values = {"value_rank": spec["value_rank"]} if "value_rank" in spec else {}
        problem = super().problem(shape, LATENT_OUTPUT, values)
        if problem is not None or role == LATENT_OUTPUT:
            return problem
        problem = super().problem(shape, role, {"rank": spec.get("rank")})
        if problem is None and spec["rank"] % (step := rank_step(shape.foreign)):
            return f"rank {spec['rank']}, of which {shape.foreign['model_type']} needs a multiple of {step}"
        return problem

    def partners(self, shape: LayerShape, role: str, spec: FormSpec) -> dict[str, FormSpec]:
        field = _latent_of(role)
        return {} if field is None else dict.fromkeys(LATENTS[field], spec)


def _latent_of(role: str) -> str | None:
    """Return the field that holds the width of the latent that a role belongs to; None for the output projection."""
    return next((field for field, roles in LATENTS.items() if role in roles), None)


FORMS: dict[str, Form] = {
    "dense": Form(),
    "experts": Experts(),
    "head_pca": HeadPca(),
    "pruned": Pruned(),
    "head_low_rank": HeadLowRankForm(),
    "low_rank": LowRankForm(),
    "joint_low_rank": JointLowRank(),
    "joint_head_low_rank": JointHeadLowRank(),
    "pivoted": Pivoted(),
    "latent": Latent(),
    "absorbed": Absorbed(),
    "tucker": TuckerForm(),
    "narrow": Narrow(),
}
