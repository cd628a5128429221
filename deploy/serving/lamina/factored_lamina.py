# mypy: allow-untyped-calls
"""Projections that are stored as factors, as modules. D hidden, d head_dim, n heads, r rank.

How roles are called: the module of a role gets its projection's input x, and as a second argument the output of its
source, if it has one (Form.source). Roles that share a first factor get its output, `first(x)`. Where the cache holds
latents, they get the latents of all cached slots. Roles of a Tucker or pivoted group get the outputs of the group's
module, by role. The caller computes a source once per forward and keeps its output in a local variable: modules hold
no state.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import initialization


class StoredFactor(NamedTuple):
    """The stored tensor of a linear's weight, of `shape` and without `.weight` in its name. `module`: the linear.

    The linear's inputs are the tensor's first dimension (`reads_first`) or its last; the others are its outputs.
    """

    module: str
    shape: tuple[int, ...]
    reads_first: bool

    def linear(self) -> nn.Linear:
        """Build the linear, uninitialised."""
        read = self.shape[0 if self.reads_first else -1]
        return nn.Linear(read, torch.Size(self.shape).numel() // read, bias=False)

    def weight(self, stored: Tensor) -> Tensor:
        """Return the linear's weight (out, in). Raises ValueError for a tensor of another shape."""
        if tuple(stored.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(stored.shape)}, not {self.shape}")
        return stored.flatten(1).mT.contiguous() if self.reads_first else stored.flatten(0, -2)

    def stored(self, weight: Tensor) -> Tensor:
        """Return the tensor that a checkpoint stores, from a weight (out, in)."""
        return (weight.mT.contiguous() if self.reads_first else weight).reshape(self.shape)


def matrix_of(linear: nn.Module, width: int, like: Tensor) -> Tensor:
    """Return the matrix (out, in) of a linear of `width` inputs: its weight, or its outputs for the unit vectors.

    The latter for a linear with an adapter, in few bits, of an engine, offloaded, or cut.
    """
    if _is_plain(linear):
        return cast(nn.Linear, linear).weight
    out: Tensor = linear(torch.eye(width, dtype=like.dtype, device=like.device))
    return out.mT.contiguous()


def _is_plain(linear: nn.Module) -> bool:
    """Return True if the linear is torch's own, without hooks: it multiplies by its weight alone."""
    return type(linear) is nn.Linear and "forward" not in vars(linear) and not linear._forward_pre_hooks


def _product(linear: nn.Module, x_BTr: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a linear without bias of a model in `dtype`; to an input in float32, in float32 if it is torch's own.

    Other linears compute in their own dtype.
    """
    if x_BTr.dtype.itemsize <= dtype.itemsize:
        out_BTC: Tensor = linear(x_BTr)
        return out_BTC
    if _is_plain(linear):
        return nn.functional.linear(x_BTr, cast(nn.Linear, linear).weight.to(x_BTr.dtype))
    return cast(Tensor, linear(x_BTr.to(dtype))).to(x_BTr.dtype)


def stored_factors(module: nn.Module) -> dict[str, tuple[str, StoredFactor]]:
    """Return the weights that a checkpoint stores otherwise: name in `state_dict` → (stored name, factor)."""
    factors = {}
    for path, part in module.named_modules():
        below = f"{path}." if path else ""
        for name, factor in getattr(part, "factors", {}).items():
            factors[f"{below}{factor.module}.weight"] = below + name, factor
    return factors


def stored_state(module: nn.Module) -> dict[str, Tensor]:
    """Return `state_dict` with the names and shapes of a checkpoint."""
    state = module.state_dict()
    for here, (name, factor) in stored_factors(module).items():
        state[name] = factor.stored(state.pop(here))
    return dict(state)


class Factored(nn.Module):
    """Base of modules with tensors of their own: initialises them, and loads linears that are stored otherwise.

    `factors`, by stored name, are the linears whose weight is stored transposed or with more dimensions.
    """

    factors: dict[str, StoredFactor]

    def __init__(self) -> None:
        super().__init__()
        self.factors = {}

    def add_factor(self, name: str, shape: tuple[int, ...], reads_first: bool, module: str = "") -> None:
        """Add a linear for the stored tensor `name` of `shape`; it is called `module`, by default `name`."""
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
        """Load stored tensors by their names below this module, and yield the names; vLLM calls this method.

        Raises ValueError for a name that the module does not have, and for a tensor of another shape.
        """
        targets = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for stored_name, tensor in weights:
            name, value = stored_name, tensor
            if stored_name in self.factors:
                factor = self.factors[stored_name]
                name, value = f"{factor.module}.weight", factor.weight(tensor)
            if name not in targets:
                raise ValueError(f"the checkpoint has {stored_name}, which is none of {', '.join(targets)}")
            load = getattr(targets[name], "weight_loader", None)
            if load is not None:
                load(targets[name], value)
            elif targets[name].shape != value.shape:
                raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)}, not {tuple(targets[name].shape)}")
            else:
                targets[name].data.copy_(value)
            yield name

    def initial_std(self, name: str, std: float) -> float:
        """Return the standard deviation of the parameter `name` in a model with random weights."""
        return std

    def initialise_(self, std: float) -> None:
        """Fill the module's own parameters at random, and biases with zeros."""
        for name, parameter in self.named_parameters(recurse=False):
            if name == "bias":
                initialization.zeros_(parameter)
            else:
                initialization.normal_(parameter, std=self.initial_std(name, std))


class LowRankLinear(Factored):
    """second(first(x)) + bias: `first.weight` (r, in), `second.weight` (out, r), `bias` (out).

    Without `first`, the latents must be passed; without `second`, they are the output.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool, first: bool = True, second: bool = True
    ) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, rank, bias=False) if first else None
        self.second = nn.Linear(rank, out_features, bias=False) if second else None
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, latent_BTr: Tensor | None = None) -> Tensor:
        """Map x (B, T, in), or its latents (B, T, r) if passed, to (B, T, out), in the dtype of the latents."""
        latent_BTr = self.first(x_BTD) if self.first is not None and latent_BTr is None else cast(Tensor, latent_BTr)
        out_BTC = latent_BTr if self.second is None else _product(self.second, latent_BTr, x_BTD.dtype)
        return out_BTC if self.bias is None else out_BTC + self.bias


class HeadLowRankLinear(Factored):
    """A projection to n heads, each with two factors: head i is second[i] @ first[i·r:(i+1)·r] x (+ bias).

    `first.weight` is (n·r, D), `second` (n, d, r), `bias` (n·d); the output is (..., n·d), as of a dense projection.
    Without `first`, the latents (..., n·r) must be passed. In memory `second` is `head_second.weight` (n·d, r).
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

    def forward(self, x_BTD: Tensor, latent_BTC: Tensor | None = None) -> Tensor:
        """Map x (B, T, D), or its latents (B, T, n·r) if passed, to (B, T, n·d)."""
        latent_BTC = self.first(x_BTD) if self.first is not None and latent_BTC is None else cast(Tensor, latent_BTC)
        latent_BTnr = latent_BTC.unflatten(-1, (self.num_heads, self.rank))
        second_ndr = matrix_of(self.head_second, self.rank, latent_BTnr).unflatten(0, (self.num_heads, -1))
        out_BTC = torch.einsum("...nr,ndr->...nd", latent_BTnr, second_ndr).flatten(-2)
        return out_BTC if self.bias is None else out_BTC + self.bias


class Derived(Factored):
    """Base of modules that cache tensors derived from their parameters until these change."""

    _derived: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):  # an adapter is added or removed
            self._derived = None
        super().__setattr__(name, value)

    # The methods below change parameters without changing their versions.

    def _apply(self, *args: Any, **kwargs: Any) -> "Derived":
        self._derived = None
        return cast("Derived", super()._apply(*args, **kwargs))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._derived = None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def train(self, mode: bool = True) -> "Derived":
        """Set the mode as torch does, and drop the cached tensors."""
        self._derived = None
        return super().train(mode)


def is_fleeting(module: nn.Module) -> bool:
    """Return True if a part of the module is offloaded, or has an adapter (PEFT), which may be switched off."""
    return any(is_offloaded(part) or hasattr(part, "base_layer") for part in module.modules())


def is_offloaded(module: nn.Module) -> bool:
    """Return True if Accelerate loads the parameters for each call: derived tensors must not outlive it."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))


class PivotedLinears(Derived):
    """Projections of one input whose stacked matrix W (m, in) has rank r, exact as r of its rows and coefficients.

    `rows.weight` (r, in) are the rows W_P. `indices` (r) int32, ascending, are their positions among the m outputs of
    all roles one after another. `coefficients.weight` C (m - r, r) compute the other outputs, in order: W x is W_P x at
    the indices and C (W_P x) elsewhere. At r = m there are no coefficients.
    """

    indices: Tensor
    row_positions: Tensor  # after fix_positions
    other_positions: Tensor

    def __init__(self, in_features: int, out_features: dict[str, int], rank: int) -> None:
        super().__init__()
        self.out_features, others = out_features, sum(out_features.values()) - rank
        self.rows = nn.Linear(in_features, rank, bias=False)
        self.coefficients = nn.Linear(rank, others, bias=False) if others else None
        self.register_buffer("indices", torch.arange(rank, dtype=torch.int32))

    def initialise_(self, std: float) -> None:
        """Fill the parameters at random, and make the rows those of the first r outputs."""
        super().initialise_(std)
        initialization.copy_(self.indices, torch.arange(len(self.indices), device=self.indices.device))

    def forward(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """Return the outputs (B, T, out) by role, without biases."""
        rows_BTr: Tensor = self.rows(x_BTD)
        out_BTm = rows_BTr
        if self.coefficients is not None:
            rows_r, others_k = self._positions()
            others_BTk: Tensor = self.coefficients(rows_BTr)
            # In two dimensions: torch copies along the last of three several times more slowly on CPUs.
            out_Nm = rows_BTr.new_empty(rows_BTr.shape[:-1].numel(), len(rows_r) + len(others_k))
            out_Nm.index_copy_(-1, rows_r, rows_BTr.flatten(0, -2))
            out_Nm.index_copy_(-1, others_k, others_BTk.flatten(0, -2))
            out_BTm = out_Nm.view(*rows_BTr.shape[:-1], -1)
        return dict(zip(self.out_features, out_BTm.split([*self.out_features.values()], dim=-1), strict=True))

    def fix_positions(self) -> None:
        """Store the positions of the outputs as buffers, for an engine that never changes the indices it has loaded.

        Compiled code then reads them instead of computing them at every call. Raises ValueError as `check_stored`.
        """
        self.check_stored()
        for name, positions in zip(("row_positions", "other_positions"), self._find_positions(), strict=True):
            if hasattr(self, name):
                getattr(self, name).copy_(positions)  # graphs may have captured the address
            else:
                self.register_buffer(name, positions, persistent=False)

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows (r) and of the other outputs (m - r) among all outputs, int64."""
        if hasattr(self, "row_positions"):
            return self.row_positions, self.other_positions
        if torch.compiler.is_compiling() or is_offloaded(self):
            return self._find_positions()
        key = (self.indices.data_ptr(), 0 if self.indices.is_inference() else self.indices._version)
        if self._derived is None or self._derived[0] != key:
            self.check_stored()
            with torch.inference_mode(False):
                self._derived = key, self._find_positions()
        return cast(tuple[Tensor, Tensor], self._derived[1])

    def _find_positions(self) -> tuple[Tensor, Tensor]:
        rows_r, num_outputs = self.indices.long(), sum(self.out_features.values())
        num_others, outputs_m = num_outputs - len(rows_r), torch.arange(num_outputs, device=rows_r.device)
        is_row_m = torch.zeros_like(outputs_m, dtype=torch.bool).index_fill(0, rows_r, True)
        # Each other output goes to its place among the others, and all rows to one more place, which is cut off.
        place_m = torch.where(is_row_m, num_others, outputs_m - is_row_m.cumsum(0))
        return rows_r, outputs_m.new_empty(num_others + 1).scatter(0, place_m, outputs_m)[:num_others]

    def check_stored(self) -> None:
        """Raise ValueError unless the indices are ascending positions of outputs."""
        if self.indices.is_meta:
            return
        num_outputs, indices = sum(self.out_features.values()), self.indices.tolist()
        if sorted({*indices}) != indices or not 0 <= indices[0] <= indices[-1] < num_outputs:
            raise ValueError(
                f"the indices of pivoted {', '.join(self.out_features)} are not {len(indices)} ascending positions "
                f"below {num_outputs}: a damaged checkpoint?"
            )


class PivotedLinear(Factored):
    """One projection stored as PivotedLinears, `pivoted`, and its `bias` (out) if any."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.pivoted = PivotedLinears(in_features, {"out": out_features}, rank)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map x (B, T, in) to (B, T, out)."""
        out_BTC: Tensor = self.pivoted(x_BTD)["out"]
        return out_BTC if self.bias is None else out_BTC + self.bias


class RoleOutput(Factored):
    """A role of a group that is computed at once: selects its output (B, T, out), and adds its `bias` (out) if any."""

    def __init__(self, role: str, out_features: int, bias: bool) -> None:
        super().__init__()
        self.role = role
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, outputs: dict[str, Tensor]) -> Tensor:
        """Return the role's output (B, T, out) from those of the group; x is an argument for hooks that read inputs."""
        return outputs[self.role] if self.bias is None else outputs[self.role] + self.bias
