"""Write checkpoints of random weights, of any number of layers, with one file in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig

from tests.factories import make_tokenizer

Shapes = dict[str, tuple[int, ...]]
# More attention than MLP: a wide MLP would spend the time of this benchmark in decompositions (N³), not on layers.
LLAMA: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 2048,
    "intermediate_size": 1536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MIXTURE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def write_random_model(
    directory: Path,
    config: PreTrainedConfig,
    architecture: str,
    layer_shapes: Callable[[int], Shapes],
    tensors_per_file: int | None = None,
) -> int:
    """Write a model in bfloat16 with its tokenizer, a file for every layer. Return the bytes of its tensors.

    Args:
        architecture: the name of the model's class in transformers.
        layer_shapes: returns the names and shapes of a layer's tensors.
        tensors_per_file: the number of a layer's tensors in each file.
    """
    directory.mkdir(parents=True)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    make_tokenizer(config.vocab_size).save_pretrained(directory)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(_files(config, layer_shapes, tensors_per_file)):
        file, generator = f"model-{number + 1:05d}.safetensors", torch.Generator().manual_seed(number)
        save_file({name: _random_weight(shape, generator) for name, shape in shapes.items()}, directory / file)
        weight_map |= dict.fromkeys(shapes, file)
        total += sum(numbers_of(shapes)) * torch.bfloat16.itemsize
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def write_llama(directory: Path, num_layers: int, sizes: Mapping[str, int] = MappingProxyType({})) -> int:
    """Write a random Llama, a shard for every layer, with one layer in memory. Return the parameters of a layer.

    `sizes`: fields of its config that differ from LLAMA.
    """
    fields = {**LLAMA, **sizes}
    config = LlamaConfig(**fields, num_hidden_layers=num_layers, dtype="bfloat16")
    write_random_model(directory, config, "LlamaForCausalLM", lambda layer: _llama_shapes(layer, fields))
    return sum(numbers_of(_llama_shapes(0, fields)))


def _llama_shapes(layer: int, fields: Mapping[str, Any]) -> Shapes:
    hidden, wide = fields["hidden_size"], fields["intermediate_size"]
    shapes = {
        **_attention_shapes(fields),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(sizes: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a layer's norms and of the matrices of its attention."""
    hidden = sizes["hidden_size"]
    queries, keys = (sizes[f"num_{name}_heads"] * sizes["head_dim"] for name in ("attention", "key_value"))
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }


def mixture_shapes(layer: int, sizes: Mapping[str, Any]) -> Shapes:
    """Return the names and shapes of a layer of the Qwen3-MoE kind."""
    hidden, wide, head = sizes["hidden_size"], sizes["moe_intermediate_size"], sizes["head_dim"]
    shapes: Shapes = {
        **_attention_shapes(sizes),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate.weight": (sizes["num_experts"], hidden),
    }
    for expert in range(sizes["num_experts"]):
        shapes |= {
            f"mlp.experts.{expert}.gate_proj.weight": (wide, hidden),
            f"mlp.experts.{expert}.up_proj.weight": (wide, hidden),
            f"mlp.experts.{expert}.down_proj.weight": (hidden, wide),
        }
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def numbers_of(shapes: Shapes) -> Iterator[int]:
    """Yield the count of numbers of each tensor."""
    return map(math.prod, shapes.values())


def _files(
    config: PreTrainedConfig, layer_shapes: Callable[[int], Shapes], tensors_per_file: int | None
) -> Iterator[Shapes]:
    for layer in range(config.num_hidden_layers):
        tensors = [*layer_shapes(layer).items()]
        count = tensors_per_file or len(tensors)
        yield from (dict(tensors[first : first + count]) for first in range(0, len(tensors), count))
    yield {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
    }


def _random_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return ones for a norm, noise for a matrix, in bfloat16."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    noise = torch.randn(shape, generator=generator)
    return noise.mul_(shape[1] ** -0.5).to(torch.bfloat16)
