# mypy: allow-untyped-calls
# (torch and transformers ship types, but not for all of this)
"""What a step of decoding reads and multiplies, dense and compressed: counted from the model that a config describes.

A step makes a token of each sequence. Weights are read once for all sequences of a batch; the cache is each one's own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers.cache_utils import DynamicCache

import lamina
from lamina.factored_lamina import Derived
from pipeline.rounding.schemes import FIELD


def decoding_costs(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of the dense model that a config.json comes from, and of the one that it describes.

    `weights`: numbers that a step reads of all layers and the head, as they lie in memory (sparse cores dense).
    `products`: a multiplication and an addition each, for the token itself. `cached` and `cached_products`: numbers
    read and products for each cached token.
    """
    plain = {name: value for name, value in config.items() if name != FIELD}
    return {"dense": count_dense(plain), "compressed": dict(_cost(json.dumps(plain, sort_keys=True)))}


def count_dense(config: Mapping[str, Any]) -> dict[str, int]:
    """As `decoding_costs` has it, of the dense model; remembered."""
    plain = {name: value for name, value in config.items() if name != FIELD}
    dense = {**plain, "forms": [{} for _ in range(config["num_hidden_layers"])]}
    return dict(_cost(json.dumps(dense, sort_keys=True)))


@functools.lru_cache(maxsize=64)
def _cost(config: str) -> tuple[tuple[str, int], ...]:
    """Counted where the model runs, on the meta device: a step's products are linear in the tokens that are cached."""
    described = lamina.LaminaConfig(**json.loads(config))
    described._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = lamina.LaminaForCausalLM(described).eval()
    if (rotary := model.base_model.rotary_emb) is not None:
        rotary.rope_type = "default"  # some types choose their angles by the positions' numbers, which nobody has here
    cost = {
        "weights": sum(_read(module) for module in model.modules()),
        "cached": sum(described.cache_numbers(layer) for layer in range(described.num_hidden_layers)),
    }
    # What is kept is made at the first step.
    first = int(any(isinstance(module, Derived) for module in model.modules()))
    counted = _Products()
    _leave_one_of_each(model, described.forms, counted)
    cache, ids_BT = DynamicCache(config=described), torch.zeros(1, 1, dtype=torch.long, device="meta")
    found = []
    with torch.no_grad():
        for _ in range(first + 2):
            counted.number = 0
            with counted:
                model(ids_BT, past_key_values=cache, use_cache=True)
            found.append(counted.number)
    per_slot = found[-1] - found[-2]
    cost |= {"products": found[-1] - len(found) * per_slot, "cached_products": per_slot}
    return tuple(cost.items())


def _leave_one_of_each(model: nn.Module, forms: Sequence[Mapping[str, Any]], counted: _Products) -> None:
    """Takes layers away that are like one before them; what that one multiplies is counted for all."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(forms))
    kinds: dict[str, list[nn.Module]] = {}
    for layer, form in zip(layers, forms, strict=True):
        shapes = [(name, *tensor.shape) for name, tensor in layer.state_dict().items()]
        kinds.setdefault(json.dumps([form, shapes], sort_keys=True), []).append(layer)
    for first, *others in kinds.values():
        first.register_forward_pre_hook(lambda *_: counted.begin())
        first.register_forward_hook(functools.partial(_repeated, counted, 1 + len(others)))
    gone = {other for _, *others in kinds.values() for other in others}
    for name, layer in list(layers.named_children()):
        if layer in gone:
            delattr(layers, name)


def _repeated(counted: _Products, times: int, *_: Any) -> None:
    counted.repeat(times)


class _Products(TorchDispatchMode):
    """Counts as torch's FlopCounterMode, without its hooks on every module."""

    number = begun = 0

    def begin(self) -> None:
        """What is counted from here may be repeated."""
        self.begun = self.number

    def repeat(self, times: int) -> None:
        """What was counted since `begin` counts so many times."""
        self.number += (times - 1) * (self.number - self.begun)

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
