"""Activation functions by transformers' names. Rare ones come from its table, which takes seconds to import."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn


class TanhGELU(nn.Module):
    """x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), each step in the dtype of x as `gelu_new` has it."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…) to the same shape."""
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "gelu_new": TanhGELU,
}


class Channels(nn.Module):
    """The channels of an MLP (…, N) from the outputs of its readers: act(gate) ⊙ up or, without a gate, act(up).

    `clamp`: alpha and limit of gpt-oss, whose gates and ups are clamped: g = min(gate, limit), then
    g σ(alpha g) ⊙ (1 + u), u = up within -limit and limit.
    """

    def __init__(self, name: str, clamp: tuple[float, float] | None = None) -> None:
        super().__init__()
        self.act, self.clamp = activation(name), clamp

    def forward(self, *values: Tensor) -> Tensor:
        """Map the outputs of gate and up, or those of up alone, to the channels."""
        if self.clamp is None or len(values) == 1:
            activated: Tensor = self.act(values[0])
            return activated * values[1] if len(values) > 1 else activated
        (gate, up), (alpha, limit) = values, self.clamp
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def activation(name: str) -> nn.Module:
    """Return the function of a name. Raises KeyError if transformers has none."""
    return ACTIVATIONS[name]() if name in ACTIVATIONS else cast(nn.Module, _rare()[name])


def is_activation(name: str) -> bool:
    """Return True if transformers has a function of this name."""
    return name in ACTIVATIONS or name in _rare()


def _rare() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN
