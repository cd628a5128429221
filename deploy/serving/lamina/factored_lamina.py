# mypy: allow-untyped-calls
"""Projections that are stored as factors, as modules. D hidden, d head_dim, n heads, r rank.

How roles are called. The module of a role gets its projection's input x, and a second argument when something has
already been made of x: `given`. Roles that share a first factor share its output, `first(x)`; where the cache holds
latents, `given` are the latents of all cached slots; the roles of a Tucker or pivoted group get what its module
computed for all of them. The caller computes `given` once per forward and keeps it in a local variable: modules hold
no state.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization


class StoredFactor(NamedTuple):
    """How a checkpoint stores the weight of the linear `module`: as a tensor of `shape`, without `.weight` in its name.

    The tensor's first dimension is what the linear reads (`reads_first`), or its last; the others are what it gives.
    """

    module: str
    shape: tuple[int, ...]
    reads_first: bool

    def linear(self) -> nn.Linear:
        """The linear, uninitialised."""
        read = self.shape[0 if self.reads_first else -1]
        return nn.Linear(read, torch.Size(self.shape).numel() // read, bias=False)

    def weight(self, stored: Tensor) -> Tensor:
        """The linear's weight (out, in). Raises ValueError for a tensor of another shape."""
        if tuple(stored.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(stored.shape)}, not {self.shape}")
        return stored.flatten(1).mT.contiguous() if self.reads_first else stored.flatten(0, -2)

    def stored(self, weight: Tensor) -> Tensor:
        """What a checkpoint stores of a weight (out, in)."""
        return (weight.mT.contiguous() if self.reads_first else weight).reshape(self.shape)


def matrix_of(linear: nn.Module, width: int, like: Tensor) -> Tensor:
    """The matrix (out, in) of a linear of `width` inputs: its weight, or what it does to the unit vectors.

    The latter where it is another module's: with an adapter, in few bits, of an engine, offloaded, or cut.
    """
    if _is_plain(linear):
        return cast(nn.Linear, linear).weight
    out: Tensor = linear(torch.eye(width, dtype=like.dtype, device=like.device))
    return out.mT.contiguous()


def _is_plain(linear: nn.Module) -> bool:
    """Whether the linear is torch's, and its weight all that it multiplies by."""
    return type(linear) is nn.Linear and "forward" not in vars(linear) and not linear._forward_pre_hooks


def _product(linear: nn.Module, x_BTr: Tensor, dtype: torch.dtype) -> Tensor:
    """What a linear without bias of a model in `dtype` makes of its input; of one in float32, in float32.

    A linear that is another module's computes in its own dtype.
    """
    if x_BTr.dtype.itemsize <= dtype.itemsize:
        out_BTC: Tensor = linear(x_BTr)
        return out_BTC
    if _is_plain(linear):
        return nn.functional.linear(x_BTr, cast(nn.Linear, linear).weight.to(x_BTr.dtype))
    return cast(Tensor, linear(x_BTr.to(dtype))).to(x_BTr.dtype)


def stored_factors(module: nn.Module) -> dict[str, tuple[str, StoredFactor]]:
    """Name in `state_dict` → (name in a checkpoint, how it is stored there), of the weights that differ."""
    found = {}
    for path, part in module.named_modules():
        below = f"{path}." if path else ""
        for name, factor in getattr(part, "factors", {}).items():
            found[f"{below}{factor.module}.weight"] = below + name, factor
    return found


def stored_state(module: nn.Module) -> dict[str, Tensor]:
    """`state_dict`, under the names and with the shapes that a checkpoint has."""
    state = module.state_dict()
    for here, (name, factor) in stored_factors(module).items():
        state[name] = factor.stored(state.pop(here))
    return dict(state)


class Factored(nn.Module):
    """Base of the modules with tensors of our own: for initialisation, and for linears whose weight is stored as a
    tensor of more dimensions, or turned (`factors`, by the stored name)."""

    factors: dict[str, StoredFactor]

    def __init__(self) -> None:
        super().__init__()
        self.factors = {}

    def add_factor(self, name: str, shape: tuple[int, ...], reads_first: bool, module: str = "") -> None:
        """Adds a linear, called `module` or as the tensor `name` of `shape` that checkpoints store of it."""
        self.factors[name] = factor = StoredFactor(module or name, shape, reads_first)
        self.add_module(factor.module, factor.linear())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, factor in self.factors.items():
            if (key := prefix + name) in state_dict:
                try:
                    state_dict[f"{prefix}{factor.module}.weight"] = factor.weight(state_dict.pop(key))
                except ValueError as error:
                    args[-1].append(f"{key}: {error}")  # torch raises them all at the end
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Loads stored tensors by their names below this module, and gives the names: what vLLM looks for by name.

        Raises ValueError for a name that the module does not have, and for a tensor of another shape.
        """
        mine = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for stored_name, tensor in weights:
            name, value = stored_name, tensor
            if stored_name in self.factors:
                factor = self.factors[stored_name]
                name, value = f"{factor.module}.weight", factor.weight(tensor)
            if name not in mine:
                raise ValueError(f"the checkpoint has {stored_name}, which is none of {', '.join(mine)}")
            load = getattr(mine[name], "weight_loader", None)
            if load is not None:
                load(mine[name], value)
            elif mine[name].shape != value.shape:
                raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)}, not {tuple(mine[name].shape)}")
            else:
                mine[name].data.copy_(value)
            yield name

    def initial_std(self, name: str, std: float) -> float:
        """Standard deviation of the parameter `name` in a model that starts from nothing."""
        return std

    def initialise_(self, std: float) -> None:
        """Fills the parameters that are the module's own at random; biases with zeros."""
        for name, parameter in self.named_parameters(recurse=False):
            if name == "bias":
                initialization.zeros_(parameter)
            else:
                initialization.normal_(parameter, std=self.initial_std(name, std))


class LowRankLinear(Factored):
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
        """x (B, T, in), or the latents (B, T, r) given → (B, T, out), in the dtype of the latents."""
        latent_BTr = self.first(x_BTD) if self.first is not None and given_BTr is None else cast(Tensor, given_BTr)
        out_BTC = latent_BTr if self.second is None else _product(self.second, latent_BTr, x_BTD.dtype)
        return out_BTC if self.bias is None else out_BTC + self.bias


class HeadLowRankLinear(Factored):
    """A projection to n heads, each with two factors: head i is second[i] @ first[i·r:(i+1)·r] x (+ bias).

    `first.weight` is (n·r, D), `second` (n, d, r), `bias` (n·d); the output is (..., n·d), as of a dense projection.
    Without `first` the latents (..., n·r) are always given. In memory `second` is `head_second.weight` (n·d, r).
    """

    head_second: nn.Module

    def __init__(
        self, in_features: int, out_features: int, head_dim: int, rank: int, bias: bool, first: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.rank = out_features // head_dim, rank
        self.first = nn.Linear(in_features, self.num_heads * rank, bias=False) if first else None
        self.add_factor("second", (self.num_heads, head_dim, rank), reads_first=False, module="head_second")
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, given_BTC: Tensor | None = None) -> Tensor:
        """x (B, T, D), or the latents (B, T, n·r) given → (B, T, n·d)."""
        latent_BTC = self.first(x_BTD) if self.first is not None and given_BTC is None else cast(Tensor, given_BTC)
        latent_BTnr = latent_BTC.unflatten(-1, (self.num_heads, self.rank))
        second_ndr = matrix_of(self.head_second, self.rank, latent_BTnr).unflatten(0, (self.num_heads, -1))
        out_BTC = torch.einsum("...nr,ndr->...nd", latent_BTnr, second_ndr).flatten(-2)
        return out_BTC if self.bias is None else out_BTC + self.bias


class Derived(Factored):
    """Base of modules that keep what they make of their tensors until these change."""

    _made: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):  # an adapter comes, or goes with what it has changed
            self._made = None
        super().__setattr__(name, value)

    # What torch does to parameters in ways that their versions do not tell.

    def _apply(self, *args: Any, **kwargs: Any) -> "Derived":
        self._made = None
        return cast("Derived", super()._apply(*args, **kwargs))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._made = None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def train(self, mode: bool = True) -> "Derived":
        """As torch's; what was made is made anew."""
        self._made = None
        return super().train(mode)


def is_fleeting(module: nn.Module) -> bool:
    """Whether a part of the module is offloaded, or has an adapter (PEFT), which may be switched off."""
    return any(is_offloaded(part) or hasattr(part, "base_layer") for part in module.modules())


def is_offloaded(module: nn.Module) -> bool:
    """Accelerate brings the parameters for each call only: what is made of them must not stay, either."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))


class PivotedLinears(Derived):
    """Projections of one input whose stacked matrix W (m, in) has rank r, as r of its rows and coefficients: exact.

    `rows.weight` (r, in) are the rows W_P, `indices` (r) int32 their positions among the m outputs of all roles one
    after another, ascending; `coefficients.weight` (m - r, r) give the other outputs, in order, from those of the
    rows: W x is W_P x at the indices and C (W_P x) elsewhere. At r = m there are no coefficients.
    """

    indices: Tensor

    def __init__(self, in_features: int, out_features: dict[str, int], rank: int) -> None:
        super().__init__()
        self.out_features, others = out_features, sum(out_features.values()) - rank
        self.rows = nn.Linear(in_features, rank, bias=False)
        self.coefficients = nn.Linear(rank, others, bias=False) if others else None
        self.register_buffer("indices", torch.arange(rank, dtype=torch.int32))

    def initialise_(self, std: float) -> None:
        """Takes the first r outputs for the rows."""
        super().initialise_(std)
        initialization.copy_(self.indices, torch.arange(len(self.indices), device=self.indices.device))

    def forward(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """The outputs (B, T, out) by role, without biases."""
        out_BTm: Tensor = self.rows(x_BTD)
        if self.coefficients is not None:
            out_BTm = torch.cat((out_BTm, self.coefficients(out_BTm)), dim=-1).index_select(-1, self._order())
        return dict(zip(self.out_features, out_BTm.split([*self.out_features.values()], dim=-1), strict=True))

    @torch.no_grad()
    def plain_factors(self) -> tuple[Tensor, dict[str, Tensor]]:
        """`first` (r, in), and by role `second` (out, r): W = [I; C] W_P as two plain factors."""
        rank = self.rows.weight.shape[0]
        second_mr = torch.eye(rank, dtype=self.rows.weight.dtype, device=self.rows.weight.device)
        if self.coefficients is not None:
            second_mr = torch.cat((second_mr, self.coefficients.weight))[self._order()]
        parts = second_mr.split([*self.out_features.values()])
        return self.rows.weight.detach(), dict(zip(self.out_features, parts, strict=True))

    def _order(self) -> Tensor:
        """For each of the m outputs, its place (m) in the rows' outputs followed by the others'."""
        if torch.compiler.is_compiling() or is_offloaded(self):
            return self._make_order()
        key = (self.indices.data_ptr(), 0 if self.indices.is_inference() else self.indices._version)
        if self._made is None or self._made[0] != key:
            self.check_stored()
            with torch.inference_mode(False):
                self._made = key, self._make_order()
        return cast(Tensor, self._made[1])

    def _make_order(self) -> Tensor:
        rank, num_outputs = len(self.indices), sum(self.out_features.values())
        is_row_m = torch.zeros(num_outputs, dtype=torch.bool, device=self.indices.device)
        is_row_m = is_row_m.index_fill(0, self.indices.long(), True)
        rows_so_far_m = is_row_m.cumsum(0)
        outputs_m = torch.arange(num_outputs, device=self.indices.device)
        return torch.where(is_row_m, rows_so_far_m - 1, rank + outputs_m - rows_so_far_m)

    def check_stored(self) -> None:
        """Raises ValueError unless the indices are ascending positions of outputs."""
        if self.indices.is_meta:
            return
        num_outputs, indices = sum(self.out_features.values()), self.indices.tolist()
        if sorted({*indices}) != indices or not 0 <= indices[0] <= indices[-1] < num_outputs:
            raise ValueError(
                f"the indices of pivoted {', '.join(self.out_features)} are not {len(indices)} ascending positions "
                f"below {num_outputs}: a damaged checkpoint?"
            )


class RoleOutput(Factored):
    """A role of a group that is computed at once: picks its output (B, T, out), and adds `bias` (out) if it has one."""

    def __init__(self, role: str, out_features: int, bias: bool) -> None:
        super().__init__()
        self.role = role
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, given: dict[str, Tensor]) -> Tensor:
        """The role's part (B, T, out) of what the group gave; x is there for hooks that look at inputs."""
        return given[self.role] if self.bias is None else given[self.role] + self.bias
