"""Measure what a model loses without the biases of q, k and v, if linear functions of their inputs replace them.

    python -m tools.benchmarks.linear_biases MODEL --text FILE [--windows 28] [--scored 6] [--length 256]

The class to which `method: mla` leads has no biases in vLLM and llama.cpp (docs/methods.md#mla). A bias b becomes
b uᵀx, where uᵀx is the best prediction of 1 from a layer's input, by least squares over the first windows. Prints the
model's loss on the windows after them, with biases and without.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

RIDGE = 1e-9  # in shares of the moment's mean diagonal
BATCH = 4


@torch.no_grad()
def constant_directions(model: Any, ids_WT: Tensor) -> list[Tensor]:
    """Return u (D,) of each layer: least squares of 1 by the inputs of its attention."""
    layers = model.model.layers
    moments: list[Any] = [0.0] * len(layers)
    means: list[Any] = [0.0] * len(layers)

    def add(layer: int) -> Any:
        def hook(_module: Any, _arguments: Any, named: dict[str, Tensor]) -> None:
            x_ND = named["hidden_states"].flatten(0, 1)
            moments[layer] = moments[layer] + (x_ND.T @ x_ND).double()
            means[layer] = means[layer] + x_ND.double().sum(0)

        return hook

    hooks = [
        layer.self_attn.register_forward_pre_hook(add(index), with_kwargs=True) for index, layer in enumerate(layers)
    ]
    for batch_BT in ids_WT.split(BATCH):
        model.model(batch_BT)
    for hook in hooks:
        hook.remove()
    ridges = [RIDGE * moment.diagonal().mean() * torch.eye(len(moment)) for moment in moments]
    return [torch.linalg.solve(m + ridge, mean) for m, ridge, mean in zip(moments, ridges, means, strict=True)]


@torch.no_grad()
def loss(model: Any, ids_WT: Tensor) -> float:
    """Return the model's loss in nats per token."""
    sums = [
        functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        for ids in ids_WT.split(BATCH)
    ]
    return float(sum(sums)) / ids_WT[:, 1:].numel()


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=28)
    parser.add_argument("--scored", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    count = (options.windows + options.scored) * options.length
    ids = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"][:count])
    ids_WT = ids.view(-1, options.length)
    directions = constant_directions(model, ids_WT[: options.windows])
    scored_WT = ids_WT[options.windows :]
    print(f"with biases: {loss(model, scored_WT):.3f} nats per token")
    for layer, direction_D in zip(model.model.layers, directions, strict=True):
        attention = layer.self_attn
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj):
            matrix.weight.data += (matrix.bias.double()[:, None] * direction_D).float()
            matrix.bias.data.zero_()
    print(f"with linear functions: {loss(model, scored_WT):.3f} nats per token")


if __name__ == "__main__":
    main()
