# mypy: allow-untyped-calls
# (torch and transformers ship types, but not for all of this)
"""The cost of a decoding step, dense and compressed: numbers read and multiplications, counted by running the model.

A step adds a token to each sequence. Weights are read once for a batch; each sequence has its own cache.
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


def decoding_costs(config: Mapping[str, Any], source: Mapping[str, Any] | None = None) -> dict[str, dict[str, int]]:
    """Count the costs of the model that a config describes, and of its dense source (`source`, if its class differs).

    `weights`: numbers of all layers and the head that a step reads from memory (sparse cores are dense there).
    `products`: multiply-adds for the token itself. `cached` and `cached_products`: numbers read and multiply-adds for
    each cached token.
    """
    plain = {name: value for name, value in config.items() if name != FIELD}
    return {"dense": count_dense(source or plain), "compressed": dict(_cost(json.dumps(plain, sort_keys=True)))}


def count_dense(config: Mapping[str, Any]) -> dict[str, int]:
    """Count the costs of the dense model, cached."""
    plain = {name: value for name, value in config.items() if name != FIELD}
    dense = {**plain, "forms": [{} for _ in range(config["num_hidden_layers"])]}
    return dict(_cost(json.dumps(dense, sort_keys=True)))


@functools.lru_cache(maxsize=64)
def _cost(config: str) -> tuple[tuple[str, int], ...]:
    """Run a few steps on the meta device. The products of a step are linear in the number of cached tokens."""
    described = lamina.LaminaConfig(**json.loads(config))
    described._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = lamina.LaminaForCausalLM(described).eval()
    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.rope_type = "default"  # some types read the positions' values, which the meta device lacks
    cost = {
        "weights": sum(_read_numbers(module) for module in model.modules()),
        "cached": sum(described.cache_numbers(layer) for layer in range(described.num_hidden_layers)),
    }
    derives = any(isinstance(module, Derived) for module in model.modules())  # once, at the first step
    counter = _ProductCounter()
    _merge_equal_layers(model, described.forms, counter)
    cache, ids_BT = DynamicCache(config=described), torch.zeros(1, 1, dtype=torch.long, device="meta")
    products = []
    with torch.no_grad():
        for _ in range(3 if derives else 2):
            counter.number = 0
            with counter:
                model(ids_BT, past_key_values=cache, use_cache=True)
            products.append(counter.number)
    per_token = products[-1] - products[-2]
    cost |= {"products": products[-1] - len(products) * per_token, "cached_products": per_token}
    return tuple(cost.items())


def _merge_equal_layers(model: nn.Module, forms: Sequence[Mapping[str, Any]], counter: _ProductCounter) -> None:
    """Keep one layer of each kind, and count its products once for every layer of the kind."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(forms))
    kinds: dict[str, list[nn.Module]] = {}
    for layer, form in zip(layers, forms, strict=True):
        shapes = [(name, *tensor.shape) for name, tensor in layer.state_dict().items()]
        kinds.setdefault(json.dumps([form, shapes], sort_keys=True), []).append(layer)
    for first, *others in kinds.values():
        first.register_forward_pre_hook(counter.begin)
        first.register_forward_hook(functools.partial(counter.repeat, 1 + len(others)))
    merged = {other for _, *others in kinds.values() for other in others}
    for name, layer in list(layers.named_children()):
        if layer in merged:
            delattr(layers, name)


class _ProductCounter(TorchDispatchMode):
    """Counts products like torch's FlopCounterMode, but without hooks on every module."""

    number = start = 0

    def begin(self, *_: Any) -> None:
        """Mark the start of the products that `repeat` counts again. A forward pre-hook."""
        self.start = self.number

    def repeat(self, times: int, *_: Any) -> None:
        """Count the products since `begin` `times` times. Without `times`, this is a forward hook."""
        self.number += (times - 1) * (self.number - self.start)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its products."""
        out = func(*args, **(kwargs or {}))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.number += flops(*args, **(kwargs or {}), out_val=out) // 2
        return out


def _read_numbers(module: nn.Module) -> int:
    """Count a module's own numbers in memory, including the zeros of a sparse core, without an embedding's rows."""
    if isinstance(module, nn.Embedding):
        return 0
    if (shape := getattr(module, "shape", None)) is not None:
        return math.prod(shape)
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))
