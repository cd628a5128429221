"""Projections that are stored as factors, as modules. D hidden, d head_dim, n heads, r rank.

How roles are called. The module of a role gets its projection's input x, and a second argument when something has
already been made of x: `given`. Roles that share a first factor share its output, `first(x)`; where the cache holds
latents, `given` are the latents of all cached slots; the roles of a Tucker group get what its module computed for
all of them. The caller computes `given` once per forward and keeps it in a local variable: modules hold no state.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization


class Factored(nn.Module):
    """Base of the modules with tensors of our own; for initialisation."""

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
        latent_BTr = self.first(x_BTD) if self.first is not None and given_BTr is None else cast(Tensor, given_BTr)
        out_BTC: Tensor = latent_BTr if self.second is None else self.second(latent_BTr)
        return out_BTC if self.bias is None else out_BTC + self.bias


class HeadLowRankLinear(Factored):
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


class RoleOutput(Factored):
    """A role of a Tucker group: picks its output from the group's, and adds `bias` (out) if it has one."""

    def __init__(self, role: str, out_features: int, bias: bool) -> None:
        super().__init__()
        self.role = role
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_BTD: Tensor, given: dict[str, Tensor]) -> Tensor:
        return given[self.role] if self.bias is None else given[self.role] + self.bias
