# mypy: allow-untyped-calls
# (transformers ships types, but its base classes' hooks carry no annotations)
"""A decoder-only language model, dense or compressed, that is described by data.

`config.block` says what a decoder layer of the source family is (module paths, biases, norms), `config.forms`
how each projection of each layer is stored. Nothing here knows a family by name, and with `forms` all empty the model
computes what the source does. Self-contained (torch and transformers only): it is copied next to a checkpoint and
loaded with `trust_remote_code`.

B batch, T tokens of this call, S cached tokens, D hidden, H query heads, G key/value heads, d head_dim, r a rank or the
width of a value head, c rotary width (c <= d), N MLP width, n heads of a projection (H or G), R1, R2, R3 Tucker ranks
(as in the paper, of the modes D, d or N, and role), p roles of a Tucker core.

Sections: factored projections (modules) - forms (what config.json may say of a role) - configuration - parts - the
decoder layer - the model.
"""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

REQUIRED_ROLES = ("input_norm", "q", "k", "v", "o", "up", "down")
OPTIONAL_ROLES = ("q_norm", "k_norm", "mlp_norm", "gate")
ATTENTION_ROLES = ("q", "k", "v", "o", "q_norm", "k_norm")
LINEAR_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
QKVO_ROLES = ("q", "k", "v", "o")
MLP_ROLES = ("gate", "up", "down")
ROWWISE_ROLES = ("o", "down")
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}

# What `block` is when config.json does not say: pre-norm, gated MLP, rotary.
DEFAULT_BLOCK: dict[str, Any] = {
    "embed": "model.embed_tokens", "layers": "model.layers", "final_norm": "model.norm", "head": "lm_head",
    "modules": {
        "input_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    "norm": "rms", "rotary": "half",
}  # fmt: skip
BLOCK_DEFAULTS: dict[str, Any] = {"head_bias": False, "biases": [], "positions": None, "parallel": False}


# Factored projections -------------------------------------------------------------------------------------------------
#
# How roles are called. The module of a role gets its projection's input x, and a second argument when something has
# already been made of x: `given`. Roles that share a first factor share its output, `first(x)`; where the cache holds
# latents, `given` are the latents of all cached slots; the roles of a Tucker group get what its module computed for
# all of them. The caller computes `given` once per forward and keeps it in a local variable: modules hold no state.


class Factored(nn.Module):
    """Base of the modules with tensors of our own; for initialisation."""

    def initial_std(self, name: str, std: float) -> float:
        """Standard deviation of the parameter `name` in a model that starts from nothing."""
        return std


class LowRank(Factored):
    """second(first(x)) + bias: `first.weight` (r, in), `second.weight` (out, r), `bias` (out).

    Without `first` the latents are always given; without `second` they are the output.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool, first: bool = True, second: bool = True
    ) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, rank, bias=False) if first else None
        self.second = nn.Linear(rank, out_features, bias=False) if second else None
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, given_BTr: Tensor | None = None) -> Tensor:
        latent_BTr = self.first(x_BTD) if self.first is not None and given_BTr is None else cast(Tensor, given_BTr)
        out_BTC: Tensor = latent_BTr if self.second is None else self.second(latent_BTr)
        return out_BTC if self.bias is None else out_BTC + self.bias


class HeadLowRank(Factored):
    """A projection to n heads, each with two factors: head i is second[i] @ first[i·r:(i+1)·r] x (+ bias).

    `first.weight` is (n·r, D), `second` (n, d, r), `bias` (n·d); the output is (..., n·d), as of a dense projection.
    Without `first` the latents (..., n·r) are always given.
    """

    def __init__(
        self, in_features: int, out_features: int, head_dim: int, rank: int, bias: bool, first: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.rank = out_features // head_dim, rank
        self.first = nn.Linear(in_features, self.num_heads * rank, bias=False) if first else None
        self.second = nn.Parameter(torch.empty(self.num_heads, head_dim, rank))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, given_BTC: Tensor | None = None) -> Tensor:
        latent_BTC = self.first(x_BTD) if self.first is not None and given_BTC is None else cast(Tensor, given_BTC)
        latent_BTnr = latent_BTC.unflatten(-1, (self.num_heads, self.rank))
        out_BTC = torch.einsum("...nr,ndr->...nd", latent_BTnr, self.second).flatten(-2)
        return out_BTC if self.bias is None else out_BTC + self.bias


class TuckerRole(Factored):
    """A role of a Tucker group: picks its output from the group's, and adds `bias` (out) if it has one."""

    def __init__(self, role: str, out_features: int, bias: bool) -> None:
        super().__init__()
        self.role = role
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, given: dict[str, Tensor]) -> Tensor:
        return given[self.role] if self.bias is None else given[self.role] + self.bias


def first_bits(num_bits: int, num_set: int) -> Tensor:
    """A bitmap (ceil(num_bits / 8),) uint8 with its first `num_set` bits set, least significant bit first."""
    bits = (torch.arange(-(-num_bits // 8) * 8) < num_set).view(-1, 8)
    return (bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8)


class SparseCore(Factored):
    """A tensor as its non-zeros and where they are: `values` (nnz), and the bitmap `mask` uint8 (ceil(numel / 8)).

    Bit i of the flattened tensor is bit i % 8, least significant first, of byte i // 8. A buffer: no cast touches it.
    """

    mask: Tensor

    def __init__(self, shape: tuple[int, ...], nnz: int) -> None:
        super().__init__()
        self.shape, self.nnz = torch.Size(shape), nnz
        self.values = nn.Parameter(torch.empty(nnz))
        self.register_buffer("mask", first_bits(self.shape.numel(), nnz))

    def forward(self) -> Tensor:
        """The dense tensor. Raises ValueError when the bitmap does not have nnz bits."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.mask.device)
        bits = (self.mask.unsqueeze(1) >> shifts & 1).flatten()[: self.shape.numel()].bool()
        if not torch.compiler.is_compiling() and not bits.is_meta and (found := int(bits.sum())) != self.nnz:
            raise ValueError(f"the core's bitmap has {found} bits, config.json says {self.nnz}: a damaged checkpoint?")
        zeros = torch.zeros(self.shape.numel(), dtype=self.values.dtype, device=self.values.device)
        return zeros.masked_scatter(bits, self.values).view(self.shape)


@dataclass(frozen=True)
class CoreShape:
    """One core of a Tucker group: (R1, R2, R3, n) in `core<suffix>`, a row of `third<suffix>` (p, R3) for each role.

    With `own_factors` it has a `first<suffix>` and `second<suffix>` of its own, one role, and no `third`.
    """

    suffix: str
    roles: tuple[str, ...]
    num_heads: int
    ranks: tuple[int, int, int]
    nnz: int | None  # None: stored dense
    own_factors: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.ranks, self.num_heads)


class Tucker(Factored):
    """The projections of an attention or MLP as a shared-subspace Tucker decomposition, never multiplied out.

    `first` (D, R1), `second` (d or N, R2), and per core `third` (p, R3) and `core`; LeSTD, METHODS section 3. With
    M[t, i] = sum over c of core[:, :, c, i] third[t, c], role t of head i is x first M[t, i] secondᵀ; a role that
    writes to the hidden states goes backwards, summed over heads: o second M[t, i]ᵀ firstᵀ.

    M is made at the first call and kept until the parameters change; while they are trained, are offloaded, or in a
    compiled graph that began without M, it is made in each call. With `csr`, cores that are stored sparse are used as
    they are instead of M, as CSR matrices in float32 or wider (CPUs multiply no others), where there is no gradient.
    """

    first: Tensor
    second: Tensor

    def __init__(self, width: int, inner: int, cores: tuple[CoreShape, ...], csr: bool) -> None:
        super().__init__()
        self.cores, self.csr = cores, csr and all(core.nnz is not None for core in cores)
        self.inner = inner
        self.reads = [(role, core) for core in cores for role in core.roles if role not in ROWWISE_ROLES]
        self._made: tuple[Any, dict[str, Any]] | None = None
        for core in cores:
            own = core.suffix if core.own_factors else ""
            if core is cores[0] or core.own_factors:
                self.register_parameter(f"first{own}", nn.Parameter(torch.empty(width, core.ranks[0])))
                self.register_parameter(f"second{own}", nn.Parameter(torch.empty(inner, core.ranks[1])))
            if not core.own_factors:
                third = nn.Parameter(torch.empty(len(core.roles), core.ranks[2]))
                self.register_parameter(f"third{core.suffix}", third)
            if core.nnz is None:
                self.register_parameter(f"core{core.suffix}", nn.Parameter(torch.empty(core.shape)))
            else:
                self.add_module(f"core{core.suffix}", SparseCore(core.shape, core.nnz))

    def forward(self, x: Tensor, direction: str) -> dict[str, Tensor]:
        """The outputs by role. "in": of all roles that read the hidden states x (B, T, D); "out": of the one that
        writes to them, from x (B, T, n·d) or (B, T, N)."""
        csr = self.csr and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        made = self._matrices(csr)
        return self._read(x, made, csr) if direction == "in" else self._write(x, made, csr)

    def initial_std(self, name: str, std: float) -> float:
        """Factors with columns of about unit length, so that the projections' weights get at most `std`."""
        rows: int = getattr(self, name).shape[0]
        return std if name.startswith("core") else rows**-0.5

    def _read(self, x_BTD: Tensor, made: dict[str, Any], csr: bool) -> dict[str, Tensor]:
        y_BTa = x_BTD @ self.first
        z_BTC = self._read_csr(y_BTa, made) if csr else y_BTa @ made["in"]
        out_BTnd = z_BTC.unflatten(-1, (-1, self.second.shape[1])) @ self.second.mT
        heads = [core.num_heads for _, core in self.reads]
        return {role: o.flatten(-2) for (role, _), o in zip(self.reads, out_BTnd.split(heads, -2), strict=True)}

    def _write(self, x_BTC: Tensor, made: dict[str, Any], csr: bool) -> dict[str, Tensor]:
        role, core, own = self._writer()
        s_BTnb = x_BTC.unflatten(-1, (core.num_heads, self.inner)) @ getattr(self, f"second{own}")
        y_BTa = self._write_csr(s_BTnb, made, role, core) if csr else s_BTnb.flatten(-2) @ made["out"]
        first_Da: Tensor = getattr(self, f"first{own}")
        return {role: y_BTa @ first_Da.mT}

    def _writer(self) -> tuple[str, CoreShape, str]:
        """The role that writes, its core, and the suffix of its factors."""
        role, core = next((role, core) for core in self.cores for role in core.roles if role in ROWWISE_ROLES)
        return role, core, core.suffix if core.own_factors else ""

    def _matrices(self, csr: bool) -> dict[str, Any]:
        """What `_read` and `_write` multiply with, made anew when the parameters are not those of the last time."""
        if torch.compiler.is_compiling():
            # A graph can check no versions; casts, loading and train() have dropped what no longer holds.
            return self._made[1] if self._made is not None and not self._made[0][0] else self._make_dense()
        parameters = [*self.parameters()]
        if _is_offloaded(self) or (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return self._make_csr() if csr else self._make_dense()
        tensors = [*parameters, *self.buffers()]
        key = (csr, *((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors))
        if self._made is None or self._made[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._made = key, self._make_csr() if csr else self._make_dense()
        return self._made[1]

    def _core(self, core: CoreShape) -> Tensor:
        stored = getattr(self, f"core{core.suffix}")
        return cast(Tensor, stored() if isinstance(stored, nn.Module) else stored)

    def _make_dense(self) -> dict[str, Any]:
        """M of the reading roles side by side, "in" (R1, sum of n·R2), and of the writing one, "out" (n·R2, R1)."""
        made: dict[str, Tensor] = {}
        for core in self.cores:
            core_abcn = self._core(core)
            if core.own_factors:
                m_panb = core_abcn.permute(2, 0, 3, 1)
            else:
                m_panb = torch.einsum("abcn,pc->panb", core_abcn, getattr(self, f"third{core.suffix}"))
            made.update(zip(core.roles, m_panb, strict=True))
        writer = self._writer()[0]
        return {
            "in": torch.cat([made[role].flatten(1) for role, _ in self.reads], dim=1),
            "out": made[writer].permute(1, 2, 0).flatten(0, 1),
        }

    def _make_csr(self) -> dict[str, Any]:
        """Each core as a matrix (R1, R2·R3·n), "out", and transposed, "in"; only those that a role needs."""
        made = {}
        writer = self._writer()[1]
        for core in self.cores:
            matrix = self._core(core).flatten(1)
            wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
                if any(c is core for _, c in self.reads):
                    made[f"in{core.suffix}"] = wide.mT.contiguous().to_sparse_csr()
                if core is writer:
                    made[f"out{core.suffix}"] = wide.to_sparse_csr()
        return made

    def _read_csr(self, y_BTa: Tensor, made: dict[str, Any]) -> Tensor:
        y_aX = y_BTa.flatten(0, -2).mT
        parts = []
        for core in dict.fromkeys(core for _, core in self.reads):
            matrix = made[f"in{core.suffix}"]
            z_Xbcn = (matrix @ y_aX.to(matrix.dtype)).to(y_aX.dtype).mT.unflatten(-1, core.shape[1:])
            rows = [i for i, role in enumerate(core.roles) if role not in ROWWISE_ROLES]
            third_pc = getattr(self, f"third{core.suffix}")[rows]
            parts.append(torch.einsum("xbcn,pc->xpnb", z_Xbcn, third_pc).flatten(1))
        z_BTC: Tensor = torch.cat(parts, dim=1).unflatten(0, y_BTa.shape[:-1])
        return z_BTC

    def _write_csr(self, s_BTnb: Tensor, made: dict[str, Any], role: str, core: CoreShape) -> Tensor:
        matrix: Tensor = made[f"out{core.suffix}"]
        s_Xnb = s_BTnb.flatten(0, -3)
        third_c = s_Xnb.new_ones(1)
        if not core.own_factors:
            third_c = getattr(self, f"third{core.suffix}")[core.roles.index(role)]
        u_XC = torch.einsum("xnb,c->xbcn", s_Xnb, third_c).flatten(1)
        y_BTa: Tensor = (matrix @ u_XC.mT.to(matrix.dtype)).mT.to(s_BTnb.dtype).unflatten(0, s_BTnb.shape[:-2])
        return y_BTa

    # What torch does to parameters in ways that their versions do not tell.

    def _apply(self, *args: Any, **kwargs: Any) -> "Tucker":
        self._made = None
        return cast("Tucker", super()._apply(*args, **kwargs))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._made = None
        super()._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> "Tucker":
        self._made = None
        return super().train(mode)


def _is_offloaded(module: nn.Module) -> bool:
    """Accelerate brings the parameters for each call only: what is made of them must not stay, either."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))


# Forms ----------------------------------------------------------------------------------------------------------------

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

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        """The name and value of what a rank must not exceed; None: the form has no rank."""
        return None

    def problem(self, config: "LaminaConfig", role: str, spec: Spec) -> str | None:
        """What is wrong with the values of a spec's fields."""
        if (limit := self.limit(config, role)) is None or _is_count(spec.get("rank"), limit[1]):
            return None
        return f"rank {spec.get('rank')}, allowed is 1 to {limit[0]} {limit[1]}"

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        """What other roles of the layer must have beside this."""
        return {}

    def source(self, config: "LaminaConfig", role: str, spec: Spec) -> Source | None:
        """Where the second argument of the role's module comes from, if it gets one."""
        return None

    def shared_module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module | None:
        """The module at the source's path, unless it is part of a role's module."""
        return None

    def head_width(self, config: "LaminaConfig", spec: Spec) -> int:
        """Numbers of a value head in attention."""
        return config.head_dim

    def inner_width(self, config: "LaminaConfig", spec: Spec) -> int:
        """Channels of the MLP."""
        return config.intermediate_size

    def cache_numbers(self, config: "LaminaConfig", role: str, spec: Spec) -> int:
        """Numbers per token that the layer caches for this role (k or v)."""
        return config.num_key_value_heads * (config.head_dim if role == "k" else self.head_width(config, spec))

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        """The module at P, uninitialised."""
        return nn.Linear(*self.widths(config, role, spec), bias=self.has_bias(config, role))

    def has_bias(self, config: "LaminaConfig", role: str) -> bool:
        return role in config.block["biases"]

    def widths(self, config: "LaminaConfig", role: str, spec: Spec) -> tuple[int, int]:
        """Numbers in and out of the projection."""
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        width, inner = self.head_width(config, spec), self.inner_width(config, spec)
        return {
            "q": (hidden, heads * config.head_dim), "k": (hidden, kv_heads * config.head_dim),
            "v": (hidden, kv_heads * width), "o": (heads * width, hidden),
            "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
        }[role]  # fmt: skip


class HeadPca(Form):
    """v: `P.weight` (G·r, D), `P.bias` (G·r); o: `P.weight` (D, H·r). The cache holds r numbers per value head."""

    roles = ("v", "o")
    fields = ("rank",)

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        return "head_dim", config.head_dim

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        return dict.fromkeys(self.roles, spec)

    def head_width(self, config: "LaminaConfig", spec: Spec) -> int:
        return int(spec["rank"])


class Pruned(Form):
    """gate, up: `P.weight` (k, D), `P.bias` (k); down: `P.weight` (D, k). k channels of the MLP are kept."""

    roles = MLP_ROLES
    fields = ("rank",)

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        return "intermediate_size", config.intermediate_size

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        return {other: spec for other in self.roles if other in config.block["modules"]}

    def inner_width(self, config: "LaminaConfig", spec: Spec) -> int:
        return int(spec["rank"])


class HeadLowRankForm(Form):
    """`P.first.weight` (n·r, D), `P.second` (n, d, r), `P.bias` (n·d): two factors per head."""

    roles = ("q", "k")
    fields = ("rank",)
    plain = False

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        return "head_dim", config.head_dim

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        widths = self.widths(config, role, spec)
        return HeadLowRank(*widths, config.head_dim, spec["rank"], self.has_bias(config, role))


class LowRankForm(Form):
    """`P.first.weight` (r, in), `P.second.weight` (out, r), `P.bias` (out)."""

    fields: ClassVar[tuple[str, ...]] = ("rank",)
    plain = False

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        return "min(in, out)", min(self.widths(config, role, {}))

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        return LowRank(*self.widths(config, role, spec), spec["rank"], self.has_bias(config, role))


class JointLowRank(LowRankForm):
    """The first role of a group has `P.first.weight` (r, D) for both, each its `P.second.weight` (out, r), `P.bias`."""

    roles: ClassVar[tuple[str, ...]] = ("q", "k", "gate", "up")
    fields = ("rank", "group")
    groups: ClassVar[dict[str, tuple[str, str]]] = {"query_key": ("q", "k"), "gate_up": ("gate", "up")}

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        pair = next(pair for pair in self.groups.values() if role in pair)
        return "min(in, out of both)", min(config.hidden_size, sum(self.widths(config, r, {})[1] for r in pair))

    def problem(self, config: "LaminaConfig", role: str, spec: Spec) -> str | None:
        pair = self.groups.get(spec.get("group", ""), ())
        if role not in pair:
            return f"group {spec.get('group')!r}, allowed is {[g for g, pair in self.groups.items() if role in pair]}"
        return super().problem(config, role, spec)

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        return dict.fromkeys(self.groups[spec["group"]], spec)

    def source(self, config: "LaminaConfig", role: str, spec: Spec) -> Source | None:
        return Source(f"{config.block['modules'][self.groups[spec['group']][0]]}.first")

    def owns_first(self, role: str, spec: Spec) -> bool:
        return role == self.groups[spec["group"]][0]

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        widths, bias = self.widths(config, role, spec), self.has_bias(config, role)
        return LowRank(*widths, spec["rank"], bias, first=self.owns_first(role, spec))


class JointHeadLowRank(JointLowRank):
    """Per head (H = G): q has `P.first.weight` (H·r, D) for both, each its `P.second` (n, d, r), `P.bias`."""

    roles = ("q", "k")
    groups: ClassVar[dict[str, tuple[str, str]]] = {"query_key": ("q", "k")}

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        return "min(hidden_size, 2 head_dim)", min(config.hidden_size, 2 * config.head_dim)

    def problem(self, config: "LaminaConfig", role: str, spec: Spec) -> str | None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads != kv_heads:
            return f"needs as many query as key heads, not {heads} and {kv_heads}"
        return super().problem(config, role, spec)

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        widths, bias = self.widths(config, role, spec), self.has_bias(config, role)
        return HeadLowRank(*widths, config.head_dim, spec["rank"], bias, first=self.owns_first(role, spec))


class Latent(LowRankForm):
    """`P.first.weight` (r, D), `P.second.weight` (G·d, r), `P.bias` (G·d): the cache holds first(x), r numbers.

    Keys are made, normed and rotated when they are read. Values with `absorbed` have `P.first.weight` only: all heads
    attend over the same r numbers, and o has the form `absorbed`.
    """

    roles = ("k", "v")
    fields = ("rank", "absorbed")
    latent = True

    def problem(self, config: "LaminaConfig", role: str, spec: Spec) -> str | None:
        if type(spec.get("absorbed", False)) is not bool or (role == "k" and "absorbed" in spec):
            return f"absorbed {spec['absorbed']}, which is true or false for v and nothing for k"
        return super().problem(config, role, spec)

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        return {"o": {"form": "absorbed", "rank": spec["rank"]}} if spec.get("absorbed") else {}

    def source(self, config: "LaminaConfig", role: str, spec: Spec) -> Source | None:
        return Source(f"{config.block['modules'][role]}.first")

    def head_width(self, config: "LaminaConfig", spec: Spec) -> int:
        return int(spec["rank"]) if spec.get("absorbed") else config.head_dim

    def cache_numbers(self, config: "LaminaConfig", role: str, spec: Spec) -> int:
        return int(spec["rank"])

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        absorbed, widths = spec.get("absorbed", False), self.widths(config, role, {})
        return LowRank(*widths, spec["rank"], self.has_bias(config, role) and not absorbed, second=not absorbed)

    def widths(self, config: "LaminaConfig", role: str, spec: Spec) -> tuple[int, int]:
        return Form().widths(config, role, {})


class Absorbed(Form):
    """o over absorbed latent values: `P.weight` (D, H·r), and `P.bias` (D) if o or v has one in the source."""

    roles = ("o",)
    fields = ("rank",)

    def limit(self, config: "LaminaConfig", role: str) -> tuple[str, int] | None:
        return FORMS["latent"].limit(config, "v")

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        return {"v": {"form": "latent", "rank": spec["rank"], "absorbed": True}}

    def head_width(self, config: "LaminaConfig", spec: Spec) -> int:
        return int(spec["rank"])

    def has_bias(self, config: "LaminaConfig", role: str) -> bool:
        return not {"o", "v"}.isdisjoint(config.block["biases"])  # v's bias, seen through o, is a constant


class TuckerForm(Form):
    """All roles of the attention, or of the MLP, at once; P has `P.bias` only. See Tucker for the rest.

    Fields, the same on all roles: `ranks` [R1, R2, R3]; `sparse` (default false) with `nnz<suffix>` for each core;
    attention only: `own_output` (default false) with `ranks_o` [R1, R2]. The tensors lie at `tucker` below the module
    that holds the roles (`self_attn.tucker.first`), or below `mlp_factors` where an MLP has no such module.
    Suffixes: "" in the MLP (rows of `third`: gate, up, down) and in attention with G = H (q, k, v, o); `_qo` and `_kv`
    in attention with G < H. With `own_output`, o has core, first and second with `_o`, and `_qo` becomes `_q`.
    """

    fields = ("ranks", "sparse", "own_output", "ranks_o", "nnz", "nnz_qo", "nnz_q", "nnz_kv", "nnz_o")
    plain = False

    def problem(self, config: "LaminaConfig", role: str, spec: Spec) -> str | None:
        if bad := [f for f in ("sparse", "own_output") if type(spec.get(f, False)) is not bool]:
            return f"{bad[0]} {spec[bad[0]]!r}, allowed are true and false"
        own, attention = spec.get("own_output", False), role in QKVO_ROLES
        if not attention and ("own_output" in spec or "ranks_o" in spec):
            return "has own_output and ranks_o in attention only"
        if own != ("ranks_o" in spec):
            return "needs both own_output and ranks_o, or neither"
        roles = [r for r in self._group(config, role) if not (own and r == "o")]
        inner = config.head_dim if attention else config.intermediate_size
        limits = (config.hidden_size, inner, len(roles))
        for name, largest in (("ranks", limits), ("ranks_o", limits[:2]))[: 1 + own]:
            ranks = spec.get(name)
            if not isinstance(ranks, (list, tuple)) or len(ranks) != len(largest):
                return f"{name} {ranks}, expected {len(largest)} numbers"
            if not all(map(_is_count, ranks, largest)):
                return f"{name} {ranks}, allowed is 1 to {[*largest]}"
        cores = self._cores(config, role, spec)
        needed = {f"nnz{core.suffix}" for core in cores} if spec.get("sparse") else set()
        if {f for f in spec if f.startswith("nnz")} != needed:
            return f"with sparse {spec.get('sparse', False)} needs {', '.join(sorted(needed)) or 'no nnz'}"
        for core in cores if needed else ():
            if not _is_count(core.nnz, torch.Size(core.shape).numel()):
                return f"nnz{core.suffix} {core.nnz}, allowed is 1 to {torch.Size(core.shape).numel()} of {core.shape}"
        return None

    def partners(self, config: "LaminaConfig", role: str, spec: Spec) -> dict[str, Spec]:
        return dict.fromkeys(self._group(config, role), spec)

    def source(self, config: "LaminaConfig", role: str, spec: Spec) -> Source | None:
        modules = config.block["modules"]
        parent = attention_path(modules) if role in QKVO_ROLES else mlp_path(modules)
        return Source(f"{parent}.tucker", ("out" if role in ROWWISE_ROLES else "in",))

    def shared_module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module | None:
        inner = config.head_dim if role in QKVO_ROLES else config.intermediate_size
        return Tucker(config.hidden_size, inner, self._cores(config, role, spec), config.core_format == "csr")

    def module(self, config: "LaminaConfig", role: str, spec: Spec) -> nn.Module:
        return TuckerRole(role, self.widths(config, role, spec)[1], self.has_bias(config, role))

    def _group(self, config: "LaminaConfig", role: str) -> tuple[str, ...]:
        group = QKVO_ROLES if role in QKVO_ROLES else MLP_ROLES
        return tuple(r for r in group if r in config.block["modules"])

    def _cores(self, config: "LaminaConfig", role: str, spec: Spec) -> tuple[CoreShape, ...]:
        heads, kv_heads, own = config.num_attention_heads, config.num_key_value_heads, spec.get("own_output", False)
        rank_1, rank_2, rank_3 = spec["ranks"]

        def core(suffix: str, roles: tuple[str, ...], num_heads: int, rank_3: int) -> CoreShape:
            return CoreShape(suffix, roles, num_heads, (rank_1, rank_2, rank_3), spec.get(f"nnz{suffix}"))

        if role not in QKVO_ROLES:
            return (core("", self._group(config, role), 1, rank_3),)
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


def attention_path(modules: dict[str, str]) -> str:
    """The deepest module that holds q, k, v, o and their norms: `self_attn`."""
    return _common_parent([modules[r] for r in ATTENTION_ROLES if r in modules])


def mlp_path(modules: dict[str, str]) -> str:
    """The deepest module that holds gate, up and down: `mlp`; `mlp_factors` where they lie in the layer itself."""
    return _common_parent([modules[r] for r in MLP_ROLES if r in modules]) or "mlp_factors"


def _common_parent(paths: list[str]) -> str:
    parents = [path.split(".")[:-1] for path in paths]
    depth = 0
    while all(len(p) > depth and p[depth] == parents[0][depth] for p in parents):
        depth += 1
    return ".".join(parents[0][:depth])


# Configuration --------------------------------------------------------------------------------------------------------


class LaminaConfig(PreTrainedConfig):
    """config.json of a checkpoint: the usual fields under their usual names, plus `block` and `forms`.

    `layer_types` null means sliding everywhere when `sliding_window` is set, full otherwise. `core_format` is how the
    cores of Tucker forms that are stored sparse lie in memory: "dense" or "csr"; it may be chosen anew at each loading.
    Raises ValueError for a block that cannot be built and for forms that do not fit it, naming layer and role.
    """

    model_type = "lamina"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    ignore_keys_at_rope_validation = {"partial_rotary_factor"}  # noqa: RUF012 - the base class declares the type
    _auto_class: ClassVar[str | None] = "AutoConfig"  # so that save_pretrained copies this file

    source_model_type: str | None = None
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    sliding_window: int | None = None
    layer_types: list[str] = field(default_factory=list)
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    core_format: str = "dense"
    block: dict[str, Any] = field(default_factory=dict)
    forms: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self, **kwargs: Any) -> None:
        self.block = {**BLOCK_DEFAULTS, **copy.deepcopy(self.block or DEFAULT_BLOCK)}
        self.forms = self.forms or [{} for _ in range(self.num_hidden_layers)]
        # Spelled out: transformers' mask and cache helpers read the list as soon as the attribute exists.
        layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
        self.layer_types = self.layer_types or [layer_type] * self.num_hidden_layers
        classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        kwargs.setdefault("auto_map", {auto: f"modeling_lamina.Lamina{name}" for auto, name in classes.items()})
        super().__post_init__(**kwargs)
        _check_block(self)
        _check_forms(self)
        if self.block["rotary"] is None:
            self.rope_parameters = None  # the base class filled in a default
        self.base_model_tp_plan = _tensor_parallel_plan(self)  # type: ignore[misc]

    def form_of(self, layer: int, role: str) -> tuple[Form, Spec]:
        """The form of a role in a layer, and what `forms` says of it (dense where it says nothing)."""
        spec = self.forms[layer].get(role, {"form": "dense"})
        return FORMS[spec["form"]], spec

    def cache_numbers(self, layer: int) -> int:
        """How many numbers a layer caches per token, keys and values together."""
        forms = ((role, *self.form_of(layer, role)) for role in ("k", "v"))
        return sum(form.cache_numbers(self, role, spec) for role, form, spec in forms)

    def latent_key_layers(self) -> dict[str, int]:
        """Layer type → the first layer of that type with latent keys; types without such a layer are left out."""
        layers = (i for i in range(self.num_hidden_layers) if self.form_of(i, "k")[0].latent)
        return {self.layer_types[i]: i for i in reversed([*layers])}


def _check_block(config: LaminaConfig) -> None:
    block, modules = config.block, config.block.get("modules", {})
    required = {*DEFAULT_BLOCK}
    if missing := sorted(required - {*block}) + [f"modules.{r}" for r in REQUIRED_ROLES if r not in modules]:
        raise ValueError(f"block lacks {', '.join(missing)}")
    roles = {*REQUIRED_ROLES, *OPTIONAL_ROLES}
    if unknown := sorted({*block} - required - {*BLOCK_DEFAULTS}) + sorted({*modules} - roles):
        raise ValueError(f"block has unknown {', '.join(unknown)}; a newer lamina may know it")
    for key, allowed in (("norm", ("rms", "layer")), ("rotary", ("half", "interleaved", None))):
        if block[key] not in allowed:
            raise ValueError(f"block.{key} is {block[key]!r}, allowed are {allowed}")
    if "mlp_norm" not in modules and not block["parallel"]:
        raise ValueError("block.modules lacks mlp_norm, which only a parallel block can do without")
    if stray := [role for role in block["biases"] if role not in LINEAR_ROLES or role not in modules]:
        raise ValueError(f"block.biases names {', '.join(stray)}, not a projection of block.modules")
    paths = [block["embed"], block["layers"], block["final_norm"]]
    paths += [block["positions"]["module"]] if block["positions"] else []
    if len({path.split(".")[0] for path in paths}) > 1 or not all("." in path for path in paths):
        raise ValueError(f"block: {', '.join(paths)} must lie below one base module (as in model.layers)")
    if config.core_format not in ("dense", "csr"):
        raise ValueError(f"core_format is {config.core_format!r}, allowed are 'dense' and 'csr'")
    if not attention_path(modules):
        raise ValueError("block.modules: q, k, v and o must lie below one attention module")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(f"{config.num_attention_heads} query heads over {config.num_key_value_heads} KV heads")
    layer_types = config.layer_types
    if len(layer_types) != config.num_hidden_layers or not {*layer_types} <= {*MASKS}:
        raise ValueError(f"layer_types must be {config.num_hidden_layers} of {', '.join(MASKS)}, not {layer_types}")
    if "sliding_attention" in layer_types and config.sliding_window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is null")


def _check_forms(config: LaminaConfig) -> None:
    modules = config.block["modules"]
    if len(config.forms) != config.num_hidden_layers:
        raise ValueError(f"forms has {len(config.forms)} entries for {config.num_hidden_layers} layers")
    for layer_idx, forms in enumerate(config.forms):
        for role, spec in forms.items():
            where, form = f"layer {layer_idx}, {role}", FORMS.get(spec.get("form", ""))
            if role not in modules:
                raise ValueError(f"{where}: block.modules has no such role")
            if form is None:
                raise ValueError(f"{where}: unknown form {spec.get('form')!r}, this version knows {', '.join(FORMS)}")
            if role not in form.roles:
                raise ValueError(f"{where}: {spec['form']} is for {', '.join(form.roles)}")
            if extra := {*spec} - {"form", *form.fields}:
                raise ValueError(f"{where}: {spec['form']} has no {', '.join(sorted(extra))}")
            if problem := form.problem(config, role, spec):
                raise ValueError(f"{where}: {spec['form']} {problem}")
            for other, needed in form.partners(config, role, spec).items():
                if forms.get(other) != needed:
                    text = "the same" if needed == spec else needed
                    raise ValueError(f"{where}: {spec} needs {text} on {other}, which has {forms.get(other, 'none')}")


def _in_base(path: str) -> str:
    """`model.layers` → `layers`: the path inside the base model."""
    return path.partition(".")[2]


def _tensor_parallel_plan(config: LaminaConfig) -> dict[str, str] | None:
    """Columns for what makes heads or MLP channels, rows for what reads them; None where factors would be cut."""
    if any(not FORMS[spec["form"]].plain for layer in config.forms for spec in layer.values()):
        return None
    prefix, modules = _in_base(config.block["layers"]), config.block["modules"]
    styles = {role: "rowwise" if role in ROWWISE_ROLES else "colwise" for role in LINEAR_ROLES if role in modules}
    return {f"{prefix}.*.{modules[role]}": style for role, style in styles.items()}


# Parts ----------------------------------------------------------------------------------------------------------------


class LaminaRMSNorm(nn.Module):
    """x / rms(x) · weight, the root mean square in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


def make_norm(config: LaminaConfig) -> nn.Module:
    """The norm that the layers and the end of the stack use: weight (D), and bias (D) for `layer`."""
    kind = LaminaRMSNorm if config.block["norm"] == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


Angles = tuple[Tensor, Tensor]  # cos and sin


class LaminaRotaryEmbedding(nn.Module):
    """cos and sin of the position angles, each (B, T, c), for every rope type of transformers.

    Build it off the meta device: `inv_freq` is computed, not loaded.
    """

    inv_freq: Tensor

    def __init__(self, config: LaminaConfig, device: torch.device | None = None) -> None:
        super().__init__()
        assert config.rope_parameters is not None
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        self.interleaved = config.block["rotary"] == "interleaved"
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        default = self.compute_default_rope_parameters
        init = default if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: LaminaConfig, device: torch.device | None = None, **kwargs: Any
    ) -> tuple[Tensor, float]:
        """theta^(-2i/c) for i < c/2; the name is what transformers looks for when it fills in buffers."""
        rope = config.rope_parameters or {}
        width = round(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float, device=device) / width
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    @dynamic_rope_update  # type: ignore[untyped-decorator]
    def forward(self, x_BTD: Tensor, position_ids_BT: Tensor) -> Angles:
        return self.angles(x_BTD, position_ids_BT)

    @torch.no_grad()
    def angles(self, x_BTD: Tensor, position_ids_BT: Tensor) -> Angles:
        """As `forward`, with the frequencies that its last call chose (some rope types go by the longest position)."""
        freqs = position_ids_BT[..., None].float() * self.inv_freq.to(device=x_BTD.device, dtype=torch.float)
        angles_BTc = freqs.repeat_interleave(2, -1) if self.interleaved else torch.cat((freqs, freqs), dim=-1)
        cos_BTc, sin_BTc = angles_BTc.cos() * self.attention_scaling, angles_BTc.sin() * self.attention_scaling
        return cos_BTc.to(x_BTD.dtype), sin_BTc.to(x_BTD.dtype)


def rotate(x_BHTd: Tensor, cos_BTc: Tensor, sin_BTc: Tensor, interleaved: bool) -> Tensor:
    """RoPE on the first c of d numbers; pairs are (i, i + c/2), or (2i, 2i + 1) when interleaved."""
    width = cos_BTc.shape[-1]
    turned, rest = x_BHTd[..., :width], x_BHTd[..., width:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * cos_BTc.unsqueeze(1) + other * sin_BTc.unsqueeze(1)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention written out; key (B, G, S, d), value (B, G, S, r) → ((B, T, H, r), weights (B, H, T, S))."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at a dotted path below `root`, making plain containers on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


def _find(root: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Looked up at each call, not remembered: quantizers, adapters and engines replace modules in place."""
    for name in names:
        root = getattr(root, name)
    return root


def _run(root: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    out: Tensor = _find(root, names)(x)
    return out


# The decoder layer ----------------------------------------------------------------------------------------------------

Names = tuple[str, ...]  # a module path, split
Memo = dict[tuple[Names, tuple[str, ...]], Any]  # what sources gave in this call, by path and further arguments


class _Roles:
    """Calls the modules of roles at their paths below this module, each once per forward."""

    _names: dict[str, Names]
    _sources: dict[str, tuple[Names, tuple[str, ...]]]

    def _given(self, role: str, x: Tensor, memo: Memo) -> Any:
        """The output of the role's source on x; None if it has none."""
        if role not in self._sources:
            return None
        names, args = self._sources[role]
        if (names, args) not in memo:
            memo[names, args] = _find(cast(nn.Module, self), names)(x, *args)
        return memo[names, args]

    def _apply_role(self, role: str, x: Tensor, given: Any = None) -> Tensor:
        module = _find(cast(nn.Module, self), self._names[role])
        out: Tensor = module(x) if given is None else module(x, given)
        return out


class LaminaAttention(_Roles, nn.Module):
    """Self-attention with r numbers per value head; its projections are children at the block's paths.

    A layer with latent keys or values caches one head for each of both: latents, or all dense heads side by side.
    """

    def __init__(
        self,
        config: LaminaConfig,
        layer_idx: int,
        names: dict[str, Names],
        sources: dict[str, tuple[Names, tuple[str, ...]]],
    ) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self._names, self._sources = names, sources
        form, spec = config.form_of(layer_idx, "v")
        self.head_dim, self.value_dim = config.head_dim, form.head_width(config, spec)
        self._latent = {role for role in ("k", "v") if config.form_of(layer_idx, role)[0].latent}
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        self.interleaved = config.block["rotary"] == "interleaved"
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        slot_embeddings: Angles | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        memo: Memo = {}
        query = self._heads("q", hidden_states, self._given("q", hidden_states, memo))
        key, value = (self._stored(role, hidden_states, memo) for role in ("k", "v"))
        if position_embeddings is not None:
            query = rotate(query, *position_embeddings, self.interleaved)
            if "k" not in self._latent:
                key = rotate(key, *position_embeddings, self.interleaved)
        if self.value_dim < self.head_dim:
            value = value.contiguous()  # engines that widen values by .view refuse a slice of a fused projection
        if past_key_values is not None:
            key, value = self._update(past_key_values, key, value)
        if "k" in self._latent:
            key = self._heads("k", hidden_states, key.squeeze(1))
            if position_embeddings is not None:
                key = rotate(key, *(slot_embeddings or position_embeddings), self.interleaved)
        if "v" in self._latent:
            value = self._heads("v", hidden_states, value.squeeze(1)).expand(-1, key.shape[1], -1, -1)
        padding = self._padding(query.shape[2])
        if padding > 0:
            value = nn.functional.pad(value, (0, padding))
        elif padding < 0:
            query, key = (nn.functional.pad(x, (0, -padding)) for x in (query, key))

        # This assignment and the one call below are what vLLM looks for in the source.
        attention_interface: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if padding > 0:
            attn_output = attn_output[..., : self.value_dim]
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self._apply_role("o", attn_output, self._given("o", attn_output, {})), attn_weights

    def _heads(self, role: str, x_BTD: Tensor, given: Any) -> Tensor:
        """The output of q, k or v, normed: (B, heads, T, width); of all cached slots if latents of them are given."""
        width = self.value_dim if role == "v" else self.head_dim
        out_BTGw: Tensor = self._apply_role(role, x_BTD, given).unflatten(-1, (-1, width))
        if f"{role}_norm" in self._names:
            out_BTGw = self._apply_role(f"{role}_norm", out_BTGw)
        return out_BTGw.transpose(1, 2)

    def _stored(self, role: str, x_BTD: Tensor, memo: Memo) -> Tensor:
        """What the cache gets of k or v, but for the rotation: (B, heads, T, width), or latents (B, 1, T, r)."""
        given = self._given(role, x_BTD, memo)
        return cast(Tensor, given).unsqueeze(1) if role in self._latent else self._heads(role, x_BTD, given)

    def _update(self, cache: Cache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All cached keys and values. Static caches take the number of heads from the keys, so it must be common."""
        if not self._latent:
            return cache.update(key, value, self.layer_idx)
        widths = {"k": self.head_dim, "v": self.value_dim}
        key, value = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (key, value))
        key, value = (
            x if role in self._latent else x.squeeze(1).unflatten(-1, (-1, widths[role])).transpose(1, 2)
            for role, x in zip(widths, cache.update(key, value, self.layer_idx), strict=True)
        )
        return key, value

    def _padding(self, num_queries: int) -> int:
        """Zeros to add to each value head (or, negative, to query and key heads) for the kernel, never for the cache.

        Fused kernels want r = d; without them a prefill builds the T × S scores (4 times slower, and the memory).
        One query has no such scores, and there reading r instead of d numbers per token wins.
        """
        kernel = self.config._attn_implementation or ""
        fused = "flash" in kernel or ("sdpa" in kernel and num_queries > 1)
        return self.head_dim - self.value_dim if fused else 0


class LaminaDecoderLayer(_Roles, GradientCheckpointingLayer):
    """One decoder layer; state dict keys are those of the source's layer.

    Each role's module is called once per forward: q, k and v on one input, o on (B, T, H·r) with the heads in order,
    down on the MLP's hidden values, so that forward hooks on `role(...)` see what statistics are taken of. Some forms'
    modules get a second argument, and latent keys and values are those of all cached tokens.
    """

    def __init__(self, config: LaminaConfig, layer_idx: int) -> None:
        super().__init__()
        modules: dict[str, str] = config.block["modules"]
        self.layer_type = config.layer_types[layer_idx]
        self.latent_keys = config.form_of(layer_idx, "k")[0].latent
        self.parallel = config.block["parallel"]
        self._names = {role: tuple(path.split(".")) for role, path in modules.items()}
        self._sources = {}
        made: dict[str, nn.Module] = {path: _make_role(config, layer_idx, role) for role, path in modules.items()}
        for role in LINEAR_ROLES:
            form, spec = config.form_of(layer_idx, role)
            if role in modules and (source := form.source(config, role, spec)):
                self._sources[role] = (tuple(source.path.split(".")), source.args)
                if source.path not in made and (shared := form.shared_module(config, role, spec)) is not None:
                    made[source.path] = shared
        attention = attention_path(modules)
        self._attention = tuple(attention.split("."))
        depth = len(self._attention)
        inside = {r: names[depth:] for r, names in self._names.items() if r in ATTENTION_ROLES}
        sources = {r: (names[depth:], args) for r, (names, args) in self._sources.items() if r in ATTENTION_ROLES}
        _attach(self, attention, LaminaAttention(config, layer_idx, inside, sources))
        for path, module in made.items():
            _attach(self, path, module)
        self.act_fn = ACT2FN[config.hidden_act]

    def role(self, role: str) -> nn.Module:
        """The module of a role ("q", "down", "input_norm", …); raises KeyError for one that the block lacks."""
        return _find(self, self._names[role])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Angles | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        slot_embeddings: Angles | None = None,
        **kwargs: Any,
    ) -> Tensor:
        normed = self._apply_role("input_norm", hidden_states)
        attention, _ = _find(self, self._attention)(
            hidden_states=normed,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            slot_embeddings=slot_embeddings,
            **kwargs,
        )
        if self.parallel:
            normed = self._apply_role("mlp_norm", hidden_states) if "mlp_norm" in self._names else normed
            return attention + self._mlp(normed) + hidden_states  # type: ignore[no-any-return]
        hidden_states = hidden_states + attention
        return hidden_states + self._mlp(self._apply_role("mlp_norm", hidden_states))

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        memo: Memo = {}
        inner_BTN = self._apply_role("up", x_BTD, self._given("up", x_BTD, memo))
        if "gate" in self._names:
            gate_BTN = self._apply_role("gate", x_BTD, self._given("gate", x_BTD, memo))
            inner_BTN = self.act_fn(gate_BTN) * inner_BTN
        else:
            inner_BTN = self.act_fn(inner_BTN)
        return self._apply_role("down", inner_BTN, self._given("down", inner_BTN, {}))


def _make_role(config: LaminaConfig, layer_idx: int, role: str) -> nn.Module:
    if role in ("q_norm", "k_norm"):
        return LaminaRMSNorm(config.head_dim, config.norm_eps)
    if role not in LINEAR_ROLES:
        return make_norm(config)
    form, spec = config.form_of(layer_idx, role)
    return form.module(config, role, spec)


class LayerInputs(NamedTuple):
    """What every layer gets besides the hidden states: positions, their angles, one mask per layer type.

    `slot_embeddings`, by layer type, is there where a layer of that type caches latents instead of keys: the angles of
    the queries' and of all cached slots. Such a layer rotates keys when it reads them, and what it knows of a cached
    token is its slot; rotating the query by its slot, too, keeps every difference right, whatever the padding.
    """

    position_ids: Tensor
    position_embeddings: Angles | None
    masks: dict[str, Any]  # by layer type: a tensor, None (plainly causal), or flex attention's BlockMask
    slot_embeddings: dict[str, tuple[Angles, Angles]] = {}  # noqa: RUF012 - a default that nobody changes

    def of(self, layer: LaminaDecoderLayer) -> dict[str, Any]:
        """The keyword arguments of `layer.forward`."""
        mine = {"attention_mask": self.masks[layer.layer_type], "position_ids": self.position_ids}
        if layer.latent_keys and layer.layer_type in self.slot_embeddings:
            query, slots = self.slot_embeddings[layer.layer_type]
            return {**mine, "position_embeddings": query, "slot_embeddings": slots}
        return {**mine, "position_embeddings": self.position_embeddings}


def default_position_ids(
    config: LaminaConfig, hidden_BTD: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None
) -> Tensor:
    """Positions (B or 1, T) of the tokens of this call.

    Rotary: the cache slot, whatever the padding. Learned: counted over the unpadded tokens of `attention_mask` (B, S),
    -1 on padding, as models with an offset table do.
    """
    num_tokens = hidden_BTD.shape[1]
    if config.block["positions"] and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        mask_BS = attention_mask.long()
        return (mask_BS.cumsum(1) * mask_BS - 1)[:, -num_tokens:]
    seen = past_key_values.get_seq_length() if past_key_values is not None else 0
    return (torch.arange(num_tokens, device=hidden_BTD.device) + seen).unsqueeze(0)


def _slot_embeddings(
    config: LaminaConfig, rotary: LaminaRotaryEmbedding, hidden_BTD: Tensor, past_key_values: Cache
) -> dict[str, tuple[Angles, Angles]]:
    """LayerInputs.slot_embeddings; slots are counted from the first that attention gets, as the masks count them."""
    num_tokens, device = hidden_BTD.shape[1], hidden_BTD.device
    angles = {}
    for layer_type, layer_idx in config.latent_key_layers().items():
        num_slots, first_slot = past_key_values.get_mask_sizes(num_tokens, layer_idx)
        seen = past_key_values.get_seq_length(layer_idx)  # a tensor in a static cache
        seen = seen.to(device) if isinstance(seen, Tensor) else seen
        query_slots_T = torch.arange(num_tokens, device=device) + (seen - first_slot)
        slots_S = torch.arange(num_slots, device=device)
        query, keys = (rotary.angles(hidden_BTD, slots.unsqueeze(0)) for slots in (query_slots_T, slots_S))
        angles[layer_type] = query, keys
    return angles


def prepare_layer_inputs(
    config: LaminaConfig,
    rotary: LaminaRotaryEmbedding | None,
    hidden_BTD: Tensor,
    attention_mask: Tensor | dict[str, Any] | None = None,
    past_key_values: Cache | None = None,
    position_ids: Tensor | None = None,
) -> LayerInputs:
    """Positions, rotary angles and masks for the layers of `config`, from the hidden states before any of them.

    `attention_mask` (B, S) is 1 on real tokens; None means no padding. A dict of ready masks passes through.
    Raises ValueError when `config._attn_implementation` is not set (a model sets it; for a lone layer say "sdpa").
    """
    if config._attn_implementation is None:
        raise ValueError('no attention implementation: set config._attn_implementation, e.g. to "sdpa", before this')
    if position_ids is None:
        padding = attention_mask if isinstance(attention_mask, Tensor) else None
        position_ids = default_position_ids(config, hidden_BTD, padding, past_key_values)
    if isinstance(attention_mask, dict):
        masks: dict[str, Any] = attention_mask  # generate() makes them ahead of a compiled forward
    else:
        masks = {
            layer_type: make_mask(
                config=config,
                inputs_embeds=hidden_BTD,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer_type, make_mask in MASKS.items()
            if layer_type in config.layer_types
        }
    if rotary is None:
        return LayerInputs(position_ids, None, masks)
    angles = rotary(hidden_BTD, position_ids)
    slots = _slot_embeddings(config, rotary, hidden_BTD, past_key_values) if past_key_values is not None else {}
    return LayerInputs(position_ids, angles, masks, slots)


# The model ------------------------------------------------------------------------------------------------------------


class LaminaPreTrainedModel(PreTrainedModel):
    config: LaminaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LaminaDecoderLayer"]  # noqa: RUF012 - the base class declares the types
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": LaminaDecoderLayer, "attentions": LaminaAttention}  # noqa: RUF012

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        self.base_model_prefix = config.block["embed"].partition(".")[0]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Factored):
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    initialization.zeros_(parameter)
                else:
                    initialization.normal_(parameter, std=module.initial_std(name, self.config.initializer_range))
        if isinstance(module, SparseCore):
            initialization.copy_(module.mask, first_bits(module.mask.numel() * 8, module.nnz).to(module.mask.device))


def _old_buffers(modules: dict[str, str]) -> list[str]:
    """Patterns of buffers that old checkpoints stored with each layer: causal masks and rotary frequencies."""
    attention = re.escape(attention_path(modules))
    return [r"\.rotary_emb\.inv_freq$", rf"\.{attention}\.(bias|masked_bias)$"]


class LaminaModel(LaminaPreTrainedModel):
    """Embedding, decoder layers and final norm, at the block's paths below the base module."""

    _auto_class = "AutoModel"

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        block, positions = config.block, config.block["positions"]
        self._names = {key: tuple(_in_base(block[key]).split(".")) for key in ("embed", "layers", "final_norm")}
        layers = nn.ModuleList([LaminaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        _attach(self, _in_base(block["embed"]), nn.Embedding(config.vocab_size, config.hidden_size))
        if positions:
            self._names["positions"] = tuple(_in_base(positions["module"]).split("."))
            table = nn.Embedding(config.max_position_embeddings + positions["offset"], config.hidden_size)
            _attach(self, _in_base(positions["module"]), table)
        _attach(self, _in_base(block["layers"]), layers)
        _attach(self, _in_base(block["final_norm"]), make_norm(config))
        self.rotary_emb = LaminaRotaryEmbedding(config) if block["rotary"] else None
        self.gradient_checkpointing = False
        head = rf"^{re.escape(block['head'])}\."  # the causal model's file, loaded as a base
        self._keys_to_ignore_on_load_unexpected = [head, *_old_buffers(block["modules"])]
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return _find(self, self._names["embed"])

    def set_input_embeddings(self, value: nn.Module) -> None:
        _attach(self, ".".join(self._names["embed"]), value)

    def get_decoder(self) -> "LaminaModel":
        return self

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden_BTD: Tensor = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        inputs = prepare_layer_inputs(
            self.config, self.rotary_emb, hidden_BTD, attention_mask, past_key_values, position_ids
        )
        if positions := self.config.block["positions"]:
            hidden_BTD = hidden_BTD + _find(self, self._names["positions"])(inputs.position_ids + positions["offset"])
        for layer in _find(self, self._names["layers"]).children():
            mine = inputs.of(layer)  # type: ignore[arg-type]
            hidden_BTD = layer(hidden_BTD, past_key_values=past_key_values, use_cache=use_cache, **mine, **kwargs)
        hidden_BTD = _run(self, self._names["final_norm"], hidden_BTD)
        return BaseModelOutputWithPast(last_hidden_state=hidden_BTD, past_key_values=past_key_values)


class LaminaForCausalLM(LaminaPreTrainedModel, GenerationMixin):
    """The base model under its source's name (`model`, `transformer`) and the language-model head."""

    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: LaminaConfig) -> None:
        super().__init__(config)
        self._head = tuple(config.block["head"].split("."))
        base = LaminaModel(config)
        # Here a stray head tensor is an error worth seeing.
        base._keys_to_ignore_on_load_unexpected = set(_old_buffers(config.block["modules"]))
        self.add_module(self.base_model_prefix, base)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.block["head_bias"])
        _attach(self, config.block["head"], head)
        self._tied_weights_keys = {f"{config.block['head']}.weight": f"{config.block['embed']}.weight"}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.get_decoder().get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.get_decoder().set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return _find(self, self._head)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        _attach(self, ".".join(self._head), new_embeddings)

    def get_decoder(self) -> LaminaModel:
        return cast(LaminaModel, getattr(self, self.base_model_prefix))

    def _get_static_cache_init_shape(self) -> tuple[int | list[int], int | list[int]] | None:
        """None: generate() then leaves a static cache to its first update, where widths other than d show."""
        config = self.config
        forms = [config.form_of(i, role) for i in range(config.num_hidden_layers) for role in ("k", "v")]
        if any(form.latent or form.head_width(config, spec) != config.head_dim for form, spec in forms):
            return None
        return super()._get_static_cache_init_shape()  # type: ignore[misc]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.get_output_embeddings()(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
