"""Mixtures of experts in vLLM: fused if the experts of a layer have the same shape, else computed one after another.

Each layer has its own number and width of experts. T tokens, E experts of the layer, D hidden, k experts of a token.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.platforms import current_platform

from lamina.configuration_lamina import LaminaConfig
from lamina.mixture_lamina import ROUTER, Router
from lamina.vllm_lamina import unlike_experts

SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}  # vLLM's names
PARAMETERS = {"gate": "w13_weight", "up": "w13_weight", "down": "w2_weight"}
Load = Callable[[Tensor], None]


def check_mixtures(config: LaminaConfig, vllm_config: VllmConfig) -> None:
    """Raise ValueError for mixtures that vLLM would compute wrongly or not at all."""
    unlike = unlike_experts(config)
    if unlike and not vllm_config.model_config.enforce_eager:
        raise ValueError(
            f"layer {unlike[0]}: its experts differ in width or form and are computed one after another, which cannot "
            "be compiled; start vLLM with --enforce-eager, or compress with shapes: layer"
        )
    if config.mixture is None or not vllm_config.parallel_config.enable_expert_parallel:
        return
    if current_platform.is_cpu():
        raise ValueError(
            "enable_expert_parallel: vLLM's experts on CPUs ignore which device has which expert; leave it out, and "
            "tensor parallelism cuts every expert by its channels"
        )
    if unlike:
        raise ValueError(
            f"enable_expert_parallel: the experts of layer {unlike[0]} differ in width or form, and vLLM places equal "
            "ones; leave it out, or compress with shapes: layer"
        )


class FusedExperts:
    """The fused mixture of a layer: vLLM's kernel for the experts, with the layer's own router."""

    def __init__(self, config: LaminaConfig, layer: int, width: int, prefix: str) -> None:
        sizes, mixture = config.layer_mixture(layer), config.mixture
        assert mixture is not None
        assert sizes is not None
        self.count, self.path, self.names = sizes.experts, mixture["experts"], mixture["modules"]
        self.router_path: str = config.layer_modules(layer)[ROUTER]
        self.bias_path: str | None = mixture["score_bias"]
        self.runner: Any = FusedMoEFactory(
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=width,
            renormalize=False,  # the router does
            custom_routing_function=self._route,
            activation="silu" if config.hidden_act == "swish" else config.hidden_act,
            router_logits_dtype=torch.float32,
            prefix=f"{prefix}.{self.path}",
        )

    def attach(self, layer: nn.Module) -> None:
        """Replace the layer's experts."""
        self.router = cast(Router, layer.get_submodule(self.router_path))
        self.layer = layer
        parent, _, name = self.path.rpartition(".")
        layer.get_submodule(parent).add_module(name, self.runner)

    def places(self) -> Iterator[tuple[str, Load]]:
        """Yield the path of each expert's matrix, and the function that copies it if this device has the expert."""
        for expert in range(self.count):
            for role, name in self.names.items():
                yield f"{self.path}.{expert}.{name}", partial(self._load, expert, role)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the sum over each token's experts (T, D)."""
        out_TD: Tensor = self.runner(hidden_states=x_TD, router_logits=self.router.scores(x_TD))
        return out_TD

    def _route(self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
        """Return weights and experts (T, k) from the scores (T, E) of the layer's router."""
        bias_E = None if self.bias_path is None else self.layer.get_parameter(self.bias_path)
        return self.router.select(gating_output, bias_E)

    def _load(self, expert: int, role: str, stored: Tensor) -> None:
        held, name = self.runner.routed_experts, PARAMETERS[role]
        held.weight_loader(getattr(held, name), stored, name, shard_id=SHARDS[role], expert_id=expert)
