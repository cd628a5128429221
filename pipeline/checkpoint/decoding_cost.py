# mypy: allow-untyped-calls
# (torch and transformers ship types, but not for all of this)
"""What a step of decoding reads and multiplies, dense and compressed: counted from the model that a config describes.

A step makes a token of each sequence. Weights are read once for all sequences of a batch; the cache is each one's own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers.cache_utils import DynamicCache

import lamina
from pipeline.rounding.schemes import FIELD


def decoding_costs(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of the dense model that a config.json comes from, and of the one that it describes.

    `weights`: numbers that a step reads of all layers and the head, as they lie in memory (sparse cores dense).
    `products`: a multiplication and an addition each, for the token itself. `cached` and `cached_products`: numbers
    read and products for each cached token.
    """
    plain = {name: value for name, value in config.items() if name != FIELD}
    dense = {**plain, "forms": [{} for _ in range(config["num_hidden_layers"])]}
    costs = {"dense": dense, "compressed": plain}
    return {name: dict(_cost(json.dumps(described, sort_keys=True))) for name, described in costs.items()}


@functools.lru_cache(maxsize=64)
def _cost(config: str) -> tuple[tuple[str, int], ...]:
    """Counted where the model runs, on the meta device: a step's products are linear in the tokens that are cached."""
    described = lamina.LaminaConfig(**json.loads(config))
    described._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = lamina.LaminaForCausalLM(described).eval()
    cache, ids_BT = DynamicCache(config=described), torch.zeros(1, 1, dtype=torch.long, device="meta")
    found = []
    with torch.no_grad():
        for _ in range(3):  # at the first, factors may be made that are kept
            with _Products() as counted:
                model(ids_BT, past_key_values=cache, use_cache=True)
            found.append(counted.number)
    per_slot = found[2] - found[1]
    cost = {
        "weights": sum(_read(module) for module in model.modules()),
        "products": found[2] - 3 * per_slot,
        "cached": sum(described.cache_numbers(layer) for layer in range(described.num_hidden_layers)),
        "cached_products": per_slot,
    }
    return tuple(cost.items())


class _Products(TorchDispatchMode):
    """Counts as torch's FlopCounterMode, without its hooks on every module."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it if it multiplies."""
        out = func(*args, **(kwargs or {}))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.number += flops(*args, **(kwargs or {}), out_val=out) // 2
        return out


def _read(module: nn.Module) -> int:
    """Numbers of the module's own weights in memory, of a sparse core all that it stands for; of a table one row is."""
    if isinstance(module, nn.Embedding):
        return 0
    if (shape := getattr(module, "shape", None)) is not None:
        return math.prod(shape)
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))
