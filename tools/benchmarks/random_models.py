"""Write checkpoints of random weights, of any number of layers, with one file in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from tests.factories import make_tokenizer

Shapes = dict[str, tuple[int, ...]]


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
